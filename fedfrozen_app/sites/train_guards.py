"""The guards of a train request: why a state is not reached. They inspect what is on the site's disk, and
what is about to leave."""

import torch
from torch import Tensor

from fedfrozen_app.core.digests import digest
from fedfrozen_app.exchange.messages import Reply, ticket_of
from fedfrozen_app.privacy.steps import COUNT_NOISE, NOISE, SENSITIVITY, SLACK
from fedfrozen_app.secure.client import MASKED as SESSION_MASKED
from fedfrozen_app.secure.work import MASKED, noised, noised_name
from fedfrozen_app.sites.train_progress import TrainProgress


def problem_of_ticket(progress: TrainProgress) -> str | None:
    """The proposal is the one that the message names."""
    ticket, proposal = ticket_of(progress.incoming.message), progress.proposal
    if proposal is None or ticket != proposal.ticket:
        return "the request names another proposal"
    return None


def problem_of_approval(progress: TrainProgress) -> str | None:
    assert progress.proposal is not None
    waiting = progress.site.is_waiting(progress.proposal.hash, progress.incoming.policy.approval)
    return "nobody has approved it" if waiting else None


def problem_of_admission(progress: TrainProgress) -> str | None:
    """Request, session and worker are of this proposal."""
    checked, proposal = progress.checked, progress.proposal
    if proposal is None or checked.proposal.hash != proposal.hash:
        return "it was checked against another proposal"
    session = checked.session
    if (session is not None) != (checked.request.masking is not None):
        return "its masks have no session"
    if session is not None and session.terms.request != checked.request.digest:
        return "its session is for another request"
    return None


def problem_of_preparation(progress: TrainProgress) -> str | None:
    """No private step was taken: the client waits for its payment, or has ended without one."""
    client = progress.client
    if client is None or (progress.checked.price is not None and not (client.reply or client.payment)):
        return "its private steps are not announced"
    return None


def problem_of_charge(progress: TrainProgress) -> str | None:
    """The run's epsilon is on the disk, for this proposal."""
    checked, budget = progress.checked, progress.site.budget
    if checked.price is None or budget.is_charged(checked.proposal.run.id, checked.price):
        return None
    return "its epsilon is not in the record"


def problem_of_training(progress: TrainProgress) -> str | None:
    if progress.known_outcome.reply.request != progress.checked.request.digest:
        return "the client has answered another request"
    return problem_of_charge(progress)


def problem_of_recall(progress: TrainProgress) -> str | None:
    checked, outcome = progress.checked, progress.known_outcome
    if outcome.fresh or outcome.reply.request != checked.request.work:
        return "the stored reply is to another request"
    return None


def problem_of_noise(progress: TrainProgress) -> str | None:
    """The noise is the proposal's, and nothing reveals it."""
    checked, reply = progress.checked, progress.known_outcome.reply
    if not checked.request.trains:
        return None if checked.price is None else "a private run sends nothing but updates"
    if {NOISE, SENSITIVITY, COUNT_NOISE} & set(reply.metrics):
        return "it says how much noise it has"
    if checked.price is None:
        return None
    if noised(checked.request):
        own = checked.session is not None and set(reply.arrays) == {
            noised_name(checked.request, checked.session.roster)
        }
        return None if own else "its update is without its share of the noise"
    if not 0 <= reply.metrics.get("epsilon", -1.0) <= checked.price.epsilon * (1 + SLACK):
        return "its client does not say what its noise costs, or it costs more than the proposal says"
    return None


def problem_of_storing(progress: TrainProgress) -> str | None:
    """What is stored is what will be sent, and its round is paid for."""
    checked, site = progress.checked, progress.site
    request, proposal = checked.request, checked.proposal
    if not request.trains:
        return None
    round_ = request.round, request.work
    if checked.price is not None and not site.budget.is_round_charged(
        proposal.run.id, checked.price, *round_
    ):
        return "its round is not in the record of spent epsilon"
    stored = checked.store.reply_to(proposal.hash, *round_)
    if stored is None or not same_arrays(stored, progress.known_outcome.reply):
        return "the site has not stored what it would send"
    return None


def problem_of_masks(progress: TrainProgress) -> str | None:
    """The masks are the proposal's: a masked update is one vector, and its session cannot mask another."""
    checked, reply = progress.checked, progress.known_reply
    masked = checked.proposal.secure_aggregation.name == "on"
    if not checked.request.trains or not masked:
        return None if same_arrays(reply, progress.known_outcome.reply) else "it is not what the site stored"
    session = progress.site.masks.session(checked.proposal.hash)
    if session is None or checked.session is None or session.state != SESSION_MASKED:
        return "its session has masked nothing"
    if session.terms != checked.session.terms or set(reply.arrays) != {MASKED} or reply.examples:
        return "something else than its masked vector would leave"
    return None


def problem_of_log(progress: TrainProgress) -> str | None:
    """The last line of the audit log is about exactly these arrays."""
    line, reply = progress.site.audit.last, progress.known_reply
    proposal, request = progress.checked.proposal, progress.checked.request
    about = line.get("proposal"), line.get("order"), line.get("arrays")
    arrays = {name: digest(tensor) for name, tensor in reply.arrays.items()}
    return None if about == (proposal.hash, request.work, arrays) else "the audit log does not hold it"


def problem_of_answer(progress: TrainProgress) -> str | None:
    return "there is no answer" if progress.answer is None else None


def same_arrays(one: Reply, other: Reply) -> bool:
    if set(one.arrays) != set(other.arrays):
        return False
    return all(torch.equal(_bytes(one.arrays[name]), _bytes(other.arrays[name])) for name in one.arrays)


def _bytes(tensor: Tensor) -> Tensor:
    """The raw bytes, so that NaN equals itself."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
