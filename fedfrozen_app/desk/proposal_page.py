"""Values for the page of one proposal: requester, training, data read, data that leaves, and cost."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedfrozen_app.census.ask import Ask
from fedfrozen_app.core.formatting import flatten
from fedfrozen_app.desk.counting import Counts
from fedfrozen_app.desk.site_records import Entries
from fedfrozen_app.exchange.proposal import Proposal
from fedfrozen_app.sites.approval import Approvals, Asked, spent_by
from fedfrozen_app.sites.history import bundle_of, first_asked
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.policy import Policy
from fedfrozen_app.sites.proposal_diff import changes, last_approved, shown
from fedfrozen_app.sites.shown_settings import is_noise_in_sum
from fedfrozen_app.sites.survey import Survey
from fedfrozen_app.sites.verdict import verdict
from fedfrozen_app.sites.views import View

COLUMNS = (
    *("text_column", "image_column", "prompt_column", "answer_column", "label_column"),
    *("time_column", "event_column", "unit_column"),
)
NAME = "run.id"  # which the title and the list of what differs name
NOISE = ("privacy.epsilon", "privacy.delta", "privacy.unit", "privacy.unit_column")
TABLE = "table.columns"  # in the list of changes: the names alone, before their levels and scales


@dataclass(frozen=True)
class Site:
    """The current state of the kit, which every page reads."""

    kit: Kit
    policy: Policy
    approvals: Approvals
    entries: Entries  # of the audit log; empty if its chain is broken


def kind_of(asked: Asked) -> str:
    if asked.proposal is None:
        return "unread"
    if isinstance(asked.proposal, Proposal):
        return "run"
    return "census" if isinstance(asked.proposal, Ask) else "study"


def name_of(asked: Asked) -> str:
    one = asked.proposal
    return "" if one is None else one.run.id if isinstance(one, Proposal) else one.id


def view_of(site: Site, asked: Asked) -> View | None:
    return None if asked.proposal is None else site.kit.view(asked_view(asked))


def asked_view(asked: Asked) -> str | None:
    """The view's name in the proposal; None if the server leaves the choice of the only view to the site."""
    one = asked.proposal
    if one is None:
        return None
    return one.data.view if isinstance(one, Proposal) else one.view


def summary(site: Site, asked: Asked) -> dict[str, Any]:
    """The values for a list of proposals."""
    first, view = first_asked(site.entries, asked.hash), view_of(site, asked)
    return {
        "asked": asked,
        "kind": kind_of(asked),
        "name": name_of(asked),
        "view": asked_view(asked) if view is None else view.name,
        "decision": site.approvals.decision(asked.hash),
        "time": None if first is None else first["time"],
    }


def with_verdict(site: Site, asked: Asked) -> dict[str, Any]:
    """`summary`, and whether the policy refuses it, as far as that is known without reading data."""
    found = summary(site, asked)
    if asked.proposal is not None:
        rules = verdict(asked.proposal, site.kit, site.policy, bundle_of(site.entries, asked.hash))
        found["refused"] = any(one.problem is not None for one in rules)
    return found


def values_of(site: Site, asked: Asked, counts: Counts) -> dict[str, Any]:
    """All values that the template shows for one proposal."""
    found = summary(site, asked)
    found |= {"findings": [], "refused": [], "open": []}
    proposal = asked.proposal
    if proposal is None:
        return found
    view = view_of(site, asked)
    count = counts.of(asked.hash) if isinstance(proposal, Proposal) and view is not None else None
    survey = None if count is None else count.survey
    bundle = bundle_of(site.entries, asked.hash)
    findings = verdict(proposal, site.kit, site.policy, bundle, survey)
    return found | {
        "proposal": proposal,
        "bundle": bundle,
        "data": view,
        "columns": columns_of(view),
        "table_columns": table_columns(proposal, site.policy),
        "count": count,
        "survey": survey,
        "findings": findings,
        "refused": [one for one in findings if one.problem is not None],
        "open": [one for one in findings if not one.known],
        "fine": [one for one in findings if one.known and one.problem is None],
        "cost": cost_of(site, proposal, view),
        "parts_of_model": [] if survey is None else parts_of(survey),
        "diff": diff_of(site, asked),
        "all_values": [(key, shown(value)) for key, value in flatten(proposal.plain).items()],
        "noise_in_sum": isinstance(proposal, Proposal) and is_noise_in_sum(proposal),
    }


def columns_of(view: View | None) -> list[tuple[str, str]]:
    """The columns named in the steward's view."""
    if view is None:
        return []
    return [(key, getattr(view, key)) for key in COLUMNS if getattr(view, key) is not None]


def table_columns(proposal: Any, policy: Policy) -> list[tuple[str, bool]]:
    """The columns that a run over a table reads, and whether the policy forbids each."""
    table = proposal.table if isinstance(proposal, Proposal) else None
    return [] if table is None else [(name, name in policy.forbidden_columns) for name in table.columns]


def parts_of(survey: Survey) -> list[tuple[str, int, float]]:
    """(role, bytes, share of the largest)."""
    largest = max(survey.by_role.values(), default=0) or 1
    return [(role, size, size / largest) for role, size in survey.by_role.items()]


def cost_of(site: Site, proposal: Any, view: View | None) -> dict[str, Any]:
    """The proposal's epsilon and delta, next to those already spent."""
    spent, limit = spent_by(site.kit), site.policy.max_epsilon
    found = {"epsilon": proposal.epsilon, "limit": limit, "known": spent is not None}
    if spent is None:
        return found
    asks = proposal.epsilon or 0.0
    whole = max(limit, spent[0] + asks) or 1.0
    return found | {
        "delta": proposal.delta if isinstance(proposal, Proposal) else 0.0,
        "unit": view.unit if view is not None else "example",
        "spent": spent[0],
        "left": limit - spent[0] - asks,
        "over": spent[0] + asks > limit * (1 + 1e-9),
        "spent_share": spent[0] / whole,
        "asked_share": asks / whole,
        "limit_share": limit / whole,
    }


def diff_of(site: Site, asked: Asked) -> dict[str, Any] | None:
    """The changes since the last approved run; None if there is none to compare with."""
    before = last_approved(site.approvals, asked)
    if before is None or before.proposal is None or asked.proposal is None:
        return None
    old, new = before.proposal.plain, asked.proposal.plain
    rows = [one for one in diff_rows(old, new) if one[0] != NAME]
    implied = implied_keys(old, new)
    return {
        "run": name_of(before),
        "rows": [one for one in rows if one[0] not in implied],
        "implied": [one for one in rows if one[0] in implied],
    }


def implied_keys(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    """Differences that follow from others: how a column is read that is new or gone, and the settings of the
    noise where there is none."""
    old, new = (one.get("table", {}).get("columns", {}) for one in (before, after))
    in_one = {name: (old | new)[name] for name in old.keys() ^ new.keys()}
    noise = NOISE if after["privacy"]["name"] == "none" else ()
    return {*flatten(in_one, f"{TABLE}."), *noise}


def diff_rows(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(key, before, after). A table's column names come first, and how its columns are read comes last."""
    names = [sorted(one.get("table", {}).get("columns", {})) for one in (before, after)]
    found = sorted(changes(before, after), key=lambda one: one.key.startswith("table."))
    first = [(TABLE, shown(names[0]), shown(names[1]))] if names[0] != names[1] else []
    return [*first, *((one.key, shown(one.before), shown(one.after)) for one in found)]
