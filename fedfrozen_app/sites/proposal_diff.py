"""What differs between a proposal and the last run that the site approved."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedfrozen_app.core.formatting import flatten
from fedfrozen_app.exchange.proposal import Proposal
from fedfrozen_app.exchange.strict import hash_of
from fedfrozen_app.sites.approval import Approvals, Asked
from fedfrozen_app.sites.shown_settings import MOST_LISTED


@dataclass(frozen=True)
class Change:
    """One changed value; None where that side has none."""

    key: str
    before: Any
    after: Any


def last_approved(approvals: Approvals, asked: Asked) -> Asked | None:
    """The most recently approved run other than this one; only runs are compared with runs."""
    found = []
    for one in approvals.asked():
        decision = approvals.decision(one.hash)
        if one.hash != asked.hash and isinstance(one.proposal, Proposal) and decision and decision.approved:
            found.append((decision.time, one.hash, one))
    return max(found)[2] if found and isinstance(asked.proposal, Proposal) else None


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Every value that differs, in the order of the proposal."""
    old, new = flatten(before), flatten(after)
    keys = [*new, *(key for key in old if key not in new)]
    return [Change(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)]


def shown(value: Any) -> str:
    """As JSON, so that text cannot pass for another value; long values as length and digest."""
    if isinstance(value, list | str) and len(value) > MOST_LISTED:
        return f"({len(value)} values, SHA-256 {hash_of(value)[:12]})"
    return "none" if value is None else json.dumps(value)


def change_lines(approvals: Approvals, asked: Asked) -> list[str]:
    """For the command line: what differs from the last run that was approved."""
    before = last_approved(approvals, asked)
    if before is None or before.proposal is None or asked.proposal is None:
        return []
    found = changes(before.proposal.plain, asked.proposal.plain)
    lines = [f"          {one.key}: {shown(one.before)} -> {shown(one.after)}" for one in found]
    return [f"changed   since {before.title} ({before.hash[:12]}), which was approved last:", *lines]
