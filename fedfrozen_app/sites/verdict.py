"""Evaluates the site's policy on a proposal, rule by rule, before a person decides.

The rules are those that the site applies when the proposal, and later a request, arrives: a person who
approves what a rule refuses changes nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from fedfrozen_app.census.ask import Ask
from fedfrozen_app.census.site import problem as problem_of_ask
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.exchange.proposal import Proposal
from fedfrozen_app.sites.accepted import run_of_text
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.policy import Policy
from fedfrozen_app.sites.request_rules import problem_of_rows
from fedfrozen_app.sites.site_budget import Price, SiteBudget
from fedfrozen_app.sites.survey import Survey
from fedfrozen_app.sites.views import View
from fedfrozen_app.study.study_ask import StudyAsk

UNKNOWN = "?"


@dataclass(frozen=True)
class Finding:
    """The outcome of one rule: None where it allows the proposal, a reason where it refuses it."""

    rule: str
    problem: str | None
    known: bool = True  # whether the rule can be applied now


def verdict(
    asked: Proposal | Ask | StudyAsk,
    kit: Kit,
    policy: Policy,
    bundle: str | None,
    survey: Survey | None = None,
) -> list[Finding]:
    """Every rule. `bundle`: of the message that carried the proposal; None if the log has none.
    `survey`: what was counted of the view."""
    name = asked.data.view if isinstance(asked, Proposal) else asked.view
    view = kit.view(name)
    if view is None:
        return [Finding("view", "it names no view of this site's, or none where there are several")]
    found = [Finding("view", None)]
    if bundle is None:
        found.append(Finding("bundle", None, known=policy.bundles == "any"))
    own = bundle or UNKNOWN
    if isinstance(asked, Ask):
        rules = policy.census_rules(kit.match_key)
        found.append(
            Finding("census", policy.problem_of_census(asked, view, own) or problem_of_ask(asked, rules))
        )
    elif isinstance(asked, StudyAsk):
        found.append(Finding("survival", policy.problem_of_study(asked, view, own)))
    else:
        found += of_run(asked, kit, policy, view, own, survey)
    price = price_of(asked, view)
    charged = asked.run.id if isinstance(asked, Proposal) else f"{asked.plain['kind']}-{asked.hash[:32]}"
    if price is not None:
        found.append(of_budget(kit, policy, charged, price))
    return found


def price_of(asked: Proposal | Ask | StudyAsk, view: View) -> Price | None:
    if isinstance(asked, Proposal):
        return Price.of(asked, view.unit)
    return None if asked.epsilon is None else Price(asked.epsilon, 0.0, view.unit, asked.hash)


def of_run(
    proposal: Proposal, kit: Kit, policy: Policy, view: View, bundle: str, survey: Survey | None
) -> Iterator[Finding]:
    for rule, problem in policy.rules(proposal, view, bundle):
        if (rule, bundle) != ("bundle", UNKNOWN):
            yield Finding(rule, problem)
    kept = [role for role in proposal.run.roles if role not in policy.upload_roles]
    refused = f"the run asks for {', '.join(kept)} parameters, which may not leave it"
    yield Finding("roles", refused if kept else None)
    if survey is None:
        yield Finding("rows", None, known=False)
    else:
        yield Finding("rows", problem_of_rows(policy, proposal, survey.rows, survey.people))
    yield Finding("package", problem_of_package(proposal, kit, view))


def problem_of_package(proposal: Proposal, kit: Kit, view: View) -> str | None:
    try:
        run_of_text(proposal.text, view, kit.model_path, "cpu")
    except (ValueError, UserError) as error:
        return f"the package installed here cannot do it: {error}"
    return None


def of_budget(kit: Kit, policy: Policy, run: str, price: Price) -> Finding:
    budget = SiteBudget(kit.var / "state" / "budget.json")
    try:
        return Finding("budget", budget.problem(run, price, policy.max_epsilon, policy.max_delta))
    except UserError as error:
        return Finding("budget", str(error))


def verdict_lines(findings: list[Finding]) -> list[str]:
    """For the command line: what is refused comes with its reason."""
    lines = []
    for one in findings:
        word = "?      " if not one.known else "ok     " if one.problem is None else "REFUSES"
        lines.append(f"policy    {word} {one.rule}{f': {one.problem}' if one.problem else ''}")
    return lines
