"""What the people of a site read before they approve a survival study."""

from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.policy import Policy
from fedfrozen_app.study.site_rules import problem as problem_of_study
from fedfrozen_app.study.study_ask import StudyAsk


def study_line(ask: StudyAsk) -> str:
    """For a list of what waits."""
    times = "EXACT TIMES" if ask.edges is None else f"counts between {len(ask.edges)} edges"
    return f"{ask.hash}  survival study {ask.id}: {ask.columns.event} by {ask.columns.time}, {times}"


def described_study(ask: StudyAsk, kit: Kit, policy: Policy) -> list[str]:
    view, columns = kit.view(ask.view), ask.columns
    where = f"{view.name} ({view.kind})" if view else f"{ask.view}, WHICH THIS SITE DOES NOT HAVE"
    group = "none" if columns.group is None else f"{columns.group}: {', '.join(columns.levels)}"
    noise = "NONE: counts leave as they are, but for small ones"
    if ask.epsilon is not None:
        noise = f"noise of epsilon {ask.epsilon:g} for each person"
    lines = [
        f"hash      {ask.hash}",
        f"survival  {ask.id}: nothing is trained",
        f"view      {where}",
        f"columns   time {columns.time}, event {columns.event}",
        f"groups    {group}",
        *times_lines(ask, policy),
        *regression_lines(ask),
        *mask_lines(ask),
        f"privacy   {noise}",
    ]
    if problem := problem_of_study(ask, policy.study_rules()):
        lines.append(f"          THE POLICY REFUSES IT: {problem}")
    return lines


def mask_lines(ask: StudyAsk) -> list[str]:
    if ask.masks is None:
        return ["masks     NONE: the server sees the counts and sums of this site"]
    return [
        f"masks     the server sees sums over {ask.masks.min_cohort} sites or more, and at which edges the",
        "          counts of this site may be shown",
    ]


def times_lines(ask: StudyAsk, policy: Policy) -> list[str]:
    if ask.edges is None:
        return [
            "times     EXACT: the server learns when each person had the event or was last seen, and with",
            "          covariates each person's values",
        ]
    return [
        f"times     counts between {', '.join(f'{edge:g}' for edge in ask.edges)}",
        f"          counts of fewer than {policy.census_floor} people are joined with their neighbours",
    ]


def regression_lines(ask: StudyAsk) -> list[str]:
    if not ask.columns.covariates:
        return ["regression none"]
    sums = (
        "one gradient and curvature a step"
        if ask.strata == "site"
        else "sums over those who leave at each time"
    )
    return [
        f"regression of {', '.join(ask.columns.covariates)}: {sums},",
        "          at coefficients that the server chooses, as often as survival_answers_per_day allows",
    ]
