"""Survival study requests: the site sums over its rows, within what its policy allows."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import Message

from fedfrozen_app.census.memory import read_memory, write_memory
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.sources.tabular import TEXT_FILES, text_frame
from fedfrozen_app.exchange.hello_messages import WAITING
from fedfrozen_app.exchange.strict import canonical
from fedfrozen_app.exchange.study_messages import study_texts
from fedfrozen_app.sites.handle_census import answer_once, census_answer, other_memories, records_of_view
from fedfrozen_app.sites.handle_masked_study import key_answer, sum_answer
from fedfrozen_app.sites.policy import Policy
from fedfrozen_app.sites.refusals import RequestRefused
from fedfrozen_app.sites.site_budget import Price
from fedfrozen_app.sites.site_state import Incoming, SiteState
from fedfrozen_app.sites.views import View
from fedfrozen_app.study.answer_study import answer
from fedfrozen_app.study.masked_steps import MaskedStep, read_masked_step
from fedfrozen_app.study.site_rules import SiteRows
from fedfrozen_app.study.study_ask import Step, StudyAsk, read_step, read_study


def handle_study(site: SiteState, incoming: Incoming) -> Message:
    message, policy, details = incoming.message, incoming.policy, incoming.details
    try:
        asked, one_step = study_texts(message)
        ask = read_study(asked)
        masked = None if ask.masks is None else read_masked_step(one_step, ask)
        step = read_step(one_step, ask) if masked is None else masked.sum or Step()
    except ValueError as error:
        raise RequestRefused(f"the survival study cannot be read: {error}") from None
    name = step.name if masked is None else title_of(masked)
    details |= {"run": ask.id, "proposal": ask.hash, "step": name}
    view = site.view(ask.view)
    if problem := policy.problem_of_study(ask, view, incoming.bundle):
        raise RequestRefused(problem)
    if site.is_waiting(ask.hash, policy.approval):
        if not site.approvals.has(ask.hash):
            site.check_limit("hellos", policy.hellos_per_day, "hello", "pending")
            site.approvals.ask(ask)
            site.audit.write("pending", **details, view=view.name, epsilon_asked=ask.epsilon)
        return census_answer(site, message, WAITING)
    if masked is not None and masked.question is not None:
        return census_answer(site, message, "", key_answer(site, ask, masked.question, policy, details))
    site.check_limit("answers to survival studies", policy.survival_answers_per_day, "survival")
    if masked is None:
        text, charged = add_up(site, ask, step, view, policy)
    else:
        text, charged = add_up_masked(site, ask, masked, view, policy)
    epsilon, delta = site.budget.spent()
    site.audit.write(
        "survival",
        **details,
        view=view.name,
        columns=list(ask.columns.names),
        exact_times=ask.edges is None,
        floor=policy.census_floor,
        bytes=len(text.encode()),
        answer=hashlib.sha256(text.encode()).hexdigest(),
        epsilon=ask.epsilon,
        charged=charged,
        epsilon_all_runs=epsilon,
        delta_all_runs=delta,
    )
    return census_answer(site, message, "", text)


def title_of(step: MaskedStep) -> str:
    """In the log: "edges", "keys", "masked counts"."""
    if step.question is not None:
        return str(step.question["step"])
    return step.name if step.sum is None else f"{step.name} {step.sum.name}"


def add_up_masked(
    site: SiteState, ask: StudyAsk, step: MaskedStep, view: View, policy: Policy
) -> tuple[str, str | None]:
    """`add_up` under masks, or the edges at which the counts may be shown."""
    charged: list[str | None] = [None]

    def plain(own: StudyAsk, asked: Step) -> str:
        text, charged[0] = add_up(site, own, asked, view, policy)
        return text

    try:
        return sum_answer(site, ask, step, plain), charged[0]
    except UserError as error:
        raise RequestRefused(str(error)) from error


def add_up(site: SiteState, ask: StudyAsk, step: Step, view: View, policy: Policy) -> tuple[str, str | None]:
    """Returns the answer's text and the budget entry that its epsilon was charged to."""
    place = site.kit.var / "survival" / f"{view.name}.json"
    rules = policy.study_rules()
    try:
        if ask.epsilon is None:
            memory = read_memory(place)
            text = canonical(answer(ask, step, rows_of_view(view), rules, memory, other_memories(place)))
            write_memory(place, memory)
            return text, None
        price = Price(ask.epsilon, 0.0, view.unit, ask.hash)

        def draw() -> str:
            return canonical(answer(ask, step, rows_of_view(view), rules, {}))

        return answer_once(site, policy, price, place, draw, "survival")
    except UserError as error:
        raise RequestRefused(str(error)) from error


def rows_of_view(view: View) -> SiteRows:
    """The view's rows. A text table is read directly, because a dataset reader would require a text or image
    column; a view that selects some of its rows goes through its reader."""
    path = Path(str(view.path))
    if view.limit is None and view.keep_classes is None and path.is_file() and path.name.endswith(TEXT_FILES):
        cells = text_frame(path).cells
        return SiteRows(cells, names_of(cells, view.column))
    records = records_of_view(view)
    return SiteRows(records.columns, names_of(records.columns, view.column))


def names_of(columns: Mapping[str, Sequence[Any]], unit: str | None) -> list[str]:
    """An identifier per row: the value of the view's unit, else a digest of the row."""
    count = len(next(iter(columns.values()), ()))
    if unit is not None:
        if unit not in columns:
            raise UserError(f"The rows have no column {unit}, which the view says is whose they are.")
        return [f"unit {value}" for value in columns[unit]]
    seen: dict[str, int] = {}
    names = []
    for row in range(count):
        text = repr([(name, str(values[row])) for name, values in sorted(columns.items())])
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        seen[digest] = seen.get(digest, 0) + 1
        names.append(f"row {digest} {seen[digest]}")
    return names
