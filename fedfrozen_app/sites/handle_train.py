"""A train request: train, evaluate or choose layers under an accepted proposal.

`TRANSITIONS` has the states of such a request. Their order is a security property:

- Whether the noise fits is known, and the run's epsilon is charged, before the first private step.
- The round is charged before its reply is stored, and what is stored may be sent: filtered and with noise.
- Masks belong to one session and are not stored. What leaves is in the audit log before it leaves.
"""

import datetime
import logging
from dataclasses import replace

import numpy as np
from flwr.app import Message, RecordDict
from torch import Tensor

from fedfrozen_app.config.codec_checks import down_codec_of
from fedfrozen_app.core.digests import digest
from fedfrozen_app.core.seeds import numpy_generator
from fedfrozen_app.exchange.broadcast import with_decoded
from fedfrozen_app.exchange.messages import Reply, arrays_of, train_reply
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.local.share_audit import record_share
from fedfrozen_app.secure.client import Session
from fedfrozen_app.secure.work import encoded, masked, noised, noised_name, noised_reply, noised_vector
from fedfrozen_app.sites import train_guards
from fedfrozen_app.sites.check_train import CheckedRequest, check_limits, check_request
from fedfrozen_app.sites.client_run import ClientRun
from fedfrozen_app.sites.opening_hours import opens_at, seconds_until
from fedfrozen_app.sites.refusals import refusing_what_masks_refuse
from fedfrozen_app.sites.reply_filter import filtered
from fedfrozen_app.sites.request_states import State, Transition, process_request
from fedfrozen_app.sites.site_state import Incoming, SiteState
from fedfrozen_app.sites.train_progress import SiteReply, TrainProgress

log = logging.getLogger(__name__)


def handle_train(site: SiteState, incoming: Incoming) -> Message:
    progress = TrainProgress(site, incoming)
    try:
        return process_request(TRANSITIONS, progress)
    finally:
        progress.close()
        incoming.context.state = RecordDict()  # the SuperNode gets the context, and must not see it


# Checked, approved, admitted ----------------------------------------------------------------------------


def check(progress: TrainProgress) -> None:
    site, incoming = progress.site, progress.incoming
    progress.proposal = site.accepted_proposal(incoming)
    progress.view = site.check_proposal(progress.proposal, incoming)


def approve(progress: TrainProgress) -> None:
    assert progress.proposal is not None
    progress.site.check_approved(progress.proposal, progress.incoming.policy)


def admit(progress: TrainProgress) -> None:
    """Check the request itself against proposal, policy and limits; look up a stored reply to it."""
    site, incoming, proposal, view = progress.site, progress.incoming, progress.proposal, progress.view
    assert proposal is not None and view is not None
    checked = check_request(site, incoming, site.run_of(proposal, view, incoming.policy))
    progress.checked_request = checked
    progress.outcome = stored_reply(site, checked)
    again = progress.outcome is not None and progress.outcome.again
    check_limits(site, incoming, checked, again=again)


def stored_reply(site: SiteState, checked: CheckedRequest) -> SiteReply | None:
    """The reply stored for this request of this proposal by an earlier message, if it may be sent."""
    request, proposal = checked.request, checked.proposal
    reply = checked.store.reply_to(proposal.hash, request.round, request.work) if request.trains else None
    if reply is None:
        return None
    if (
        checked.session is not None
        and noised(request)
        and noised_name(request, checked.session.roster) not in reply.arrays
    ):
        return None  # noised for a cohort of another size
    again = site.audit.has_sent(proposal.run.id, proposal.hash, request.work)
    return SiteReply(reply, fresh=False, again=again)


def recall(progress: TrainProgress) -> None:
    """Send the stored reply. For a masked update, the base arrays of the request must be here."""
    find_base(progress, sent=True)


def postpone(progress: TrainProgress) -> None:
    """Start nothing new outside the opening hours; a stored reply may be sent."""
    site, incoming = progress.site, progress.incoming
    opens = opens_at(incoming.policy.availability)
    if opens is None:  # it has just opened
        opens = datetime.datetime.now()
    site.check_limit("requests outside its opening hours", incoming.policy.refusals_per_day, "closed")
    log.info("Round %d waits: outside the opening hours, until %s.", progress.checked.request.round, opens)
    site.audit.write("closed", **incoming.details, opens=f"{opens:%Y-%m-%d %H:%M}")
    reply = Reply(
        progress.checked.request.digest,
        declined=f"is outside its opening hours, and opens on {opens:%A at %H:%M}, its own time",
        opens_in=seconds_until(opens),
        anchor=site.audit.head,
    )
    progress.answer = train_reply(incoming.message, reply, local=False)


# Prepared, charged, trained -----------------------------------------------------------------------------


def prepare(progress: TrainProgress) -> None:
    """Run the client's code up to its first private step: by then it has reported whatever is missing."""
    progress.client = ClientRun(progress.site, progress.incoming, progress.checked)
    progress.client.until_payment()
    reply = progress.client.reply
    progress.lacks = [] if reply is None else reply.lacks


def charge(progress: TrainProgress) -> None:
    """Charge the site's record first, then the client's own."""
    checked, site = progress.checked, progress.site
    assert progress.client is not None
    if checked.price is not None:
        site.budget.begin(checked.proposal.run.id, checked.price, site.audit.head)
        progress.client.pay()


def train(progress: TrainProgress) -> None:
    progress.outcome = SiteReply(*finish_client(progress))
    progress.lacks = progress.outcome.reply.lacks
    if not progress.lacks:
        find_base(progress, sent=False)  # training has put the arrays into the cache


def finish_client(progress: TrainProgress) -> tuple[Reply, dict[str, Tensor]]:
    assert progress.client is not None
    return progress.client.finish()


def find_base(progress: TrainProgress, *, sent: bool) -> None:
    checked = progress.checked
    if checked.session is not None:
        cache = checked.worker.cache
        arrays = arrays_of(progress.incoming.message) if sent else {}
        codec = down_codec_of(checked.worker.config.codec)
        known = with_decoded(codec, checked.request.base, arrays, cache)
        progress.base, progress.lacks = cache.complete(checked.request.base, known, verify=True)


def ask_for_arrays(progress: TrainProgress) -> None:
    """Ask for missing arrays of the request's base: the server sends them with its next message."""
    site, incoming, lacks = progress.site, progress.incoming, progress.lacks
    limit = incoming.policy.rounds_per_day
    site.check_limit("requests with arrays that are not here", limit, "lacks")
    site.audit.write("lacks", **incoming.details, names=len(lacks))
    reply = Reply(progress.checked.request.digest, lacks=lacks, anchor=site.audit.head)
    progress.answer = train_reply(incoming.message, reply, local=False)


# Noised, stored -----------------------------------------------------------------------------------------


def add_noise(progress: TrainProgress) -> None:
    """Remove what the policy withholds. With noise in the sum, the update becomes its noised vector;
    otherwise training has already added noise."""
    checked, outcome = progress.checked, progress.known_outcome
    if not outcome.fresh and noised(checked.request):
        return  # stored with noise: it holds nothing that could be filtered
    reply = filtered(outcome.reply, checked.request, progress.incoming.policy, checked.run.view)
    if checked.session is not None and noised(checked.request):
        with refusing_what_masks_refuse():
            roster, base, examples = checked.session.roster, progress.base, reply.examples
            drawn = rounding(progress.site, checked)
            reply = noised_reply(roster, checked.request, reply, base, drawn)
            vector = noised_vector(roster, checked.request, reply)
            folder = checked.store.of(checked.proposal.hash) / "privacy"
            record_share(
                *(
                    checked.worker,
                    progress.site.kit.name,
                    folder,
                    checked.request,
                    roster,
                    base,
                    examples,
                    vector,
                ),
                rounding(progress.site, checked),
            )
    progress.outcome = replace(outcome, reply=reply)


def store(progress: TrainProgress) -> None:
    """Charge the round, then store: from here on the reply may be sent under this proposal."""
    site, checked, outcome = progress.site, progress.checked, progress.known_outcome
    request, proposal = checked.request, checked.proposal
    if checked.price is not None:
        round_ = request.round, request.work
        site.budget.charge(proposal.run.id, checked.price, *round_, site.audit.head)
    if request.trains and outcome.fresh:
        reply = replace(outcome.reply, request=request.work)
        checked.store.write(proposal.hash, request.round, reply, outcome.private)


# Masked, logged, sent -----------------------------------------------------------------------------------


def mask(progress: TrainProgress) -> None:
    """Set what leaves: the reply, or its masked vector."""
    checked, reply = progress.checked, progress.known_outcome.reply
    session, request = checked.session, checked.request
    progress.reply = reply
    if session is None:
        return
    with refusing_what_masks_refuse():
        if noised(request):
            vector = noised_vector(session.roster, request, reply)
        else:
            drawn = rounding(progress.site, checked)
            vector = encoded(session.roster, request, reply, progress.base, drawn)
        session, progress.reply = masked(session, request, vector, reply.metrics)
    progress.site.masks.keep(checked.proposal.hash, session)


def rounding(site: SiteState, checked: CheckedRequest) -> np.random.Generator:
    """The generator for rounding. It is no secret, and a repeated round rounds to the same numbers."""
    return numpy_generator(checked.worker.config.seed, "rounding", site.kit.name, checked.request.round)


def masked_entry(session: Session, request: TrainRequest, reply: Reply) -> dict[str, object]:
    """What the log records of a masked update: its arrays and metrics, the session and the roster."""
    roster = session.roster
    return {
        "session": session.terms.session,
        "roster": roster.digest.hex(),
        "cohort": list(roster.names),
        "neighbours": list(session.partners),
        "needed": roster.needed,
        "arrays": list(request.sent_names if noised(request) else reply.arrays),
        "figures": sorted(set(reply.metrics) & set(request.masking.figures if request.masking else ())),
    }


def write_log(progress: TrainProgress) -> None:
    site, checked, outcome = progress.site, progress.checked, progress.known_outcome
    request, price, reply = checked.request, checked.price, progress.known_reply
    epsilon, delta = site.budget.spent()
    own: dict[str, object] = {"layers": reply.chosen} if request.choosing else {}
    if checked.session is not None:
        own["masked"] = masked_entry(checked.session, request, outcome.reply)
    site.audit.write(
        "judged" if request.evaluate else "chose" if request.choosing else "sent",
        **progress.incoming.details,
        again=outcome.again,
        asked={"trained": len(request.plan.trained), "private": len(request.plan.private)},
        arrays={name: digest(tensor) for name, tensor in reply.arrays.items()},
        bytes=sum(tensor.numel() * tensor.element_size() for tensor in reply.arrays.values()),
        examples=reply.examples,
        metrics=reply.metrics,
        epsilon=price.epsilon if price else None,
        delta=price.delta if price else None,
        epsilon_all_runs=epsilon,
        delta_all_runs=delta,
        **own,
    )


def send(progress: TrainProgress) -> None:
    reply = replace(progress.known_reply, anchor=progress.site.audit.head)
    progress.answer = train_reply(progress.incoming.message, reply, local=False)


# The table ----------------------------------------------------------------------------------------------


def is_stored(progress: TrainProgress) -> bool:
    return progress.outcome is not None


def is_closed(progress: TrainProgress) -> bool:
    return opens_at(progress.incoming.policy.availability) is not None


def is_lacking(progress: TrainProgress) -> bool:
    return bool(progress.lacks)


TRANSITIONS: tuple[Transition[TrainProgress], ...] = (
    Transition(State.RECEIVED, State.CHECKED, check, train_guards.problem_of_ticket),
    Transition(State.CHECKED, State.APPROVED, approve, train_guards.problem_of_approval),
    Transition(State.APPROVED, State.ADMITTED, admit, train_guards.problem_of_admission),
    Transition(State.ADMITTED, State.RECALLED, recall, train_guards.problem_of_recall, when=is_stored),
    Transition(State.RECALLED, State.ASKED, ask_for_arrays, train_guards.problem_of_answer, when=is_lacking),
    Transition(State.RECALLED, State.NOISED, add_noise, train_guards.problem_of_noise),
    Transition(State.ADMITTED, State.POSTPONED, postpone, train_guards.problem_of_answer, when=is_closed),
    Transition(State.ADMITTED, State.PREPARED, prepare, train_guards.problem_of_preparation),
    Transition(State.PREPARED, State.ASKED, ask_for_arrays, train_guards.problem_of_answer, when=is_lacking),
    Transition(State.PREPARED, State.CHARGED, charge, train_guards.problem_of_charge),
    Transition(State.CHARGED, State.TRAINED, train, train_guards.problem_of_training),
    Transition(State.TRAINED, State.ASKED, ask_for_arrays, train_guards.problem_of_answer, when=is_lacking),
    Transition(State.TRAINED, State.NOISED, add_noise, train_guards.problem_of_noise),
    Transition(State.NOISED, State.STORED, store, train_guards.problem_of_storing),
    Transition(State.STORED, State.MASKED, mask, train_guards.problem_of_masks),
    Transition(State.MASKED, State.LOGGED, write_log, train_guards.problem_of_log),
    Transition(State.LOGGED, State.SENT, send, train_guards.problem_of_answer),
)
