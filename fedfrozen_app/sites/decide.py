"""Record a person's decision about a proposal, for the command line and the desk alike.

    VAR/approvals/decisions.jsonl   every decision, chained by digests like the audit log

Only the executor writes the audit log, because two writers would break its chain. Decisions therefore have a
separate log.
"""

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import printable
from fedfrozen_app.exchange.proposal import Proposal
from fedfrozen_app.sites.approval import Approvals, Asked, Decision, account_name
from fedfrozen_app.sites.audit_log import AuditLog, read_audit
from fedfrozen_app.sites.kit import Kit

LONGEST_REASON = 500  # characters
LOG = "decisions.jsonl"


def approve(kit: Kit, asked: Asked) -> Decision:
    """Approve a proposal. Recorded before it takes effect: without an intact record nothing is approved."""
    if asked.proposal is None:
        raise UserError(
            f"{asked.hash} cannot be read ({asked.problem}), so that nobody can know what it asks for: "
            f"`fedfrozen site refuse {asked.hash} {kit.folder}` refuses it."
        )
    approvals = Approvals(kit.approvals)
    if isinstance(asked.proposal, Proposal) and approvals.has_left(asked.proposal.run.id):
        raise UserError(
            f"{kit.name} has left the run {asked.proposal.run.id}, and gives it nothing: only a run with "
            "another id can be approved."
        )
    with decision_log(kit) as log:
        _write(log, "approved", asked)
        return approvals.decide(asked.hash, approved=True)


def refuse(kit: Kit, asked: Asked, reason: str = "") -> Decision:
    """Refuse a proposal. Takes effect before it is recorded, so that a damaged record cannot prevent it. A
    run that has already started gets no further reply."""
    return _refuse(kit, asked, reason, "refused")


def revoke(kit: Kit, asked: Asked, reason: str = "") -> Decision:
    """Take an approval back: the run gets no further reply."""
    before = Approvals(kit.approvals).decision(asked.hash)
    if before is None or not before.approved:
        raise UserError(
            f"{asked.hash[:12]} is not approved, so there is nothing to revoke: "
            f"`fedfrozen site refuse {asked.hash[:12]} {kit.folder}` refuses it."
        )
    return _refuse(kit, asked, reason, "revoked")


def leave(kit: Kit, run: str, proposals: Sequence[str], reason: str = "") -> Decision:
    """Leave a run for good. Takes effect before it is recorded. Returns the last decision."""
    reason = _checked(reason)
    approvals = Approvals(kit.approvals)
    approvals.leave(run)
    found = [approvals.decide(one, approved=False, reason=reason) for one in proposals]
    with decision_log(kit) as log:
        for one in proposals:
            log.write("left", proposal=one, what=f"the run {run}", by=account_name(), reason=reason)
    return found[-1]


def decisions(kit: Kit) -> list[dict[str, Any]]:
    """Every decision, oldest first; `UserError` if the chain is broken."""
    return read_audit(kit.approvals / LOG)


def _refuse(kit: Kit, asked: Asked, reason: str, event: str) -> Decision:
    reason = _checked(reason)
    decision = Approvals(kit.approvals).decide(asked.hash, approved=False, reason=reason)
    with decision_log(kit) as log:
        _write(log, event, asked, reason)
    return decision


def _checked(reason: str) -> str:
    reason = printable(reason.strip())
    if len(reason) > LONGEST_REASON:
        raise UserError(f"The reason has {len(reason)} characters: give {LONGEST_REASON} at most.")
    return reason


def _write(log: AuditLog, event: str, asked: Asked, reason: str = "") -> None:
    log.write(event, proposal=asked.hash, what=asked.title, by=account_name(), reason=reason)


@contextmanager
def decision_log(kit: Kit) -> Iterator[AuditLog]:
    """One writer at a time: the command line and the desk may be used at once."""
    kit.approvals.mkdir(parents=True, exist_ok=True)
    with _locked(kit.approvals / f".{LOG}.lock"):
        yield AuditLog(kit.approvals / LOG)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
