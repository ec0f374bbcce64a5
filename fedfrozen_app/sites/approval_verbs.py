"""`fedfrozen site pending|show|approve|refuse|revoke`: what people of a site see and decide."""

import json
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import asdict

from fedfrozen_app.census.ask import Ask
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import printable
from fedfrozen_app.core.verb_table import parse
from fedfrozen_app.exchange.proposal import Proposal
from fedfrozen_app.sites import decide
from fedfrozen_app.sites.approval import (
    Approvals,
    Asked,
    described,
    described_census,
    masks_lines,
)
from fedfrozen_app.sites.audit_log import read_audit
from fedfrozen_app.sites.history import bundle_of
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.policy import Policy
from fedfrozen_app.sites.proposal_diff import change_lines
from fedfrozen_app.sites.shown_settings import noise_lines
from fedfrozen_app.sites.study_lines import described_study
from fedfrozen_app.sites.survey import Survey, survey, survey_lines
from fedfrozen_app.sites.verdict import verdict, verdict_lines
from fedfrozen_app.study.study_ask import StudyAsk


def _read(words: list[str], verb: str) -> tuple[Kit, Approvals, Namespace]:
    options = parse(f"site {verb}", words)
    kit = Kit.read(options.kit)
    return kit, Approvals(kit.approvals), options


def print_lines(lines: Iterable[str]) -> None:
    """Print untrusted text: a proposal holds the server's words, which must not move the cursor or add
    lines."""
    for line in lines:
        print(printable(line))


def pending(words: list[str]) -> None:
    """`fedfrozen site pending [KIT]`."""
    kit, approvals, _ = _read(words, "pending")
    waiting = approvals.waiting()
    for one in waiting:
        print_lines([one.line, *noise_lines(one.proposal)])
    if not waiting:
        print(f"Nothing waits for an answer of the site {kit.name}.")


def show(words: list[str]) -> None:
    """`fedfrozen site show HASH [KIT]`."""
    kit, approvals, options = _read(words, "show")
    asked = approvals.find(options.hash)
    found = counted_of(asked, kit) if options.count else None
    if options.json:
        print(json.dumps(None if found is None else asdict(found)))
        return
    print_lines(described_lines(asked, kit))
    if asked.proposal is not None:
        policy = Policy.read(kit.policy)
        print_lines(verdict_lines(verdict(asked.proposal, kit, policy, known_bundle(kit, asked), found)))
        print_lines(change_lines(approvals, asked))
    if found is not None:
        print_lines(survey_lines(found))
    if (decision := approvals.decision(asked.hash)) is not None:
        verb = "approved" if decision.approved else "refused"
        reason = f": {decision.reason}" if decision.reason else ""
        print_lines([f"answer    {verb} by {decision.by}, {decision.time}{reason}"])


def counted_of(asked: Asked, kit: Kit) -> Survey | None:
    """Count what a run would read and send; None for a census or a study, which trains nothing."""
    proposal = asked.proposal
    if not isinstance(proposal, Proposal):
        return None
    if (view := kit.view(proposal.data.view)) is None:
        raise UserError(f"{asked.title} names no view of this site's: there is nothing to count.")
    try:
        return survey(proposal, view, kit)
    except ValueError as error:
        raise UserError(f"{asked.title} cannot be counted: {error}.") from error


def known_bundle(kit: Kit, asked: Asked) -> str | None:
    """The bundle of this proposal in the audit log; without one the rule about bundles counts as unknown."""
    try:
        return bundle_of(read_audit(kit.audit), asked.hash)
    except UserError:  # a broken log must not prevent a refusal; `site audit` reports what is wrong
        return None


def described_lines(asked: Asked, kit: Kit) -> list[str]:
    proposal = asked.proposal
    if proposal is None:
        unread = f"CANNOT BE READ ({asked.problem}): it can only be refused"
        return [f"hash      {asked.hash}", f"proposal  {unread}"]
    policy = Policy.read(kit.policy)
    if isinstance(proposal, Ask):
        return described_census(proposal, kit, policy)
    if isinstance(proposal, StudyAsk):
        return described_study(proposal, kit, policy)
    return described(proposal, kit, policy)


def approve(words: list[str]) -> None:
    """`fedfrozen site approve HASH [KIT]`."""
    kit, approvals, options = _read(words, "approve")
    asked = approvals.find(options.hash)
    print_lines(noise_lines(asked.proposal))
    decide.approve(kit, asked)
    print(f"Approved: {asked.title}, {asked.hash}.")
    if isinstance(asked.proposal, Proposal):
        print_lines(masks_lines(asked.proposal, Policy.read(kit.policy)))


def refuse(words: list[str]) -> None:
    """`fedfrozen site refuse HASH [KIT]`; a run that has already started gets no further reply."""
    kit, approvals, options = _read(words, "refuse")
    asked = approvals.find(options.hash)
    decide.refuse(kit, asked, options.reason)
    print(f"Refused: {asked.title}, {asked.hash}.")


def revoke(words: list[str]) -> None:
    """`fedfrozen site revoke HASH [KIT]`."""
    kit, approvals, options = _read(words, "revoke")
    asked = approvals.find(options.hash)
    decide.revoke(kit, asked, options.reason)
    print(f"Revoked: {asked.title}, {asked.hash}. It gets no further reply.")
