"""The steps of a masked round that carry no update: keys, shares, confirmation and unmasking. What leaves is
in the audit log before it leaves.

Each attempt at a round draws new neighbours, and a server might retry until it controls them: attempts are
limited per round and per day.
"""

from typing import Any

from flwr.app import Message

from fedfrozen_app.exchange.masking_messages import masking_reply, masking_text
from fedfrozen_app.exchange.proposal import Proposal
from fedfrozen_app.secure import secagg_messages
from fedfrozen_app.secure.client import CONFIRMED, DONE, KEYS, Session
from fedfrozen_app.secure.client import SHARES as SHARED
from fedfrozen_app.sites.policy import Policy
from fedfrozen_app.sites.refusals import RequestRefused, refusing_what_masks_refuse
from fedfrozen_app.sites.site_state import Incoming, SiteState
from fedfrozen_app.sites.store import UPDATES

ATTEMPTS = 4  # per round of a run: after too many drop-outs, or after a resume


def handle_masking(site: SiteState, incoming: Incoming) -> Message:
    policy, details = incoming.policy, incoming.details
    proposal = site.accepted_proposal(incoming)
    site.check_proposal(proposal, incoming)
    site.check_approved(proposal, policy)
    asked = proposal.secure_aggregation
    if asked.name != "on":
        raise RequestRefused("the run has no masks")
    try:
        with refusing_what_masks_refuse():
            question = secagg_messages.read_question(masking_text(incoming.message))
            details["step"] = question["step"]
            session, text = site.masks.answer_step(proposal.hash, question, asked)
    except ValueError as error:
        raise RequestRefused(f"the step cannot be read: {error}") from None
    about = {**details, "session": session.terms.session, "round": session.terms.round}
    if session.state == KEYS:
        begin_attempt(site, policy, proposal, session, about)
    elif session.state == SHARED:
        roster = session.roster
        site.audit.write(
            "roster",
            **about,
            roster=roster.digest.hex(),
            cohort=list(roster.names),
            neighbours=list(session.drawn),
        )
    elif session.state == CONFIRMED:
        confirm_survivors(site, policy, proposal, session, about)
    elif session.state == DONE:
        site.audit.write("unmasked", **about)
    site.masks.keep(proposal.hash, session)
    return masking_reply(incoming.message, text)


def begin_attempt(
    site: SiteState, policy: Policy, proposal: Proposal, session: Session, about: dict[str, Any]
) -> None:
    """Count an attempt before its keys leave."""
    number, rounds = session.terms.round, proposal.run.num_rounds
    if number > rounds:
        raise RequestRefused(f"the masks are for round {number} of {rounds}")
    if site.audit.attempts(proposal.run.id, number) >= ATTEMPTS:
        raise RequestRefused(f"round {number} was begun {ATTEMPTS} times, and that is all it gives")
    site.check_limit("masked rounds", UPDATES * policy.rounds_per_day, "keys")
    site.audit.write("keys", **about)


def confirm_survivors(
    site: SiteState, policy: Policy, proposal: Proposal, session: Session, about: dict[str, Any]
) -> None:
    """Confirm one list of survivors per round of a run, and none that could be differenced against an earlier
    sum: see `differencing`. A repeated round may confirm the same list again, unless each sum has its own
    noise: two noised sums of one round protect less than one."""
    asked, secure = site.masked_sums[proposal.hash], proposal.secure_aggregation
    assert asked.session == session.terms.session  # a proposal has one session at a time
    before = site.audit.confirmed(proposal.run.id, asked.round)
    if before is not None and (secure.noise == "sum" or before != list(session.survivors)):
        raise RequestRefused(f"round {asked.round} was summed over other sites before")
    site.audit.sums.check(asked, session.survivors, policy.differencing, secure.min_cohort)
    site.audit.write("confirmed", **{**about, **asked.entry(session.survivors)})
