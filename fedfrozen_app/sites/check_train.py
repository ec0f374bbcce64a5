"""The checks of a train request, before anything trains: against its proposal, the policy and the limits."""

from dataclasses import dataclass

from flwr.app import Context

from fedfrozen_app.core.formatting import counted
from fedfrozen_app.exchange.masking_messages import envelopes_of
from fedfrozen_app.exchange.messages import train_request_text
from fedfrozen_app.exchange.proposal import Proposal
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.local.private_units import units_of
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.local.worker_for import AcceptedRun, set_accepted_run, worker_for
from fedfrozen_app.secure.client import Session
from fedfrozen_app.sites.accepted import Accepted
from fedfrozen_app.sites.differencing import MaskedSum
from fedfrozen_app.sites.policy import Policy
from fedfrozen_app.sites.refusals import RequestRefused, refusing_what_masks_refuse
from fedfrozen_app.sites.request_rules import problem_of_request
from fedfrozen_app.sites.row_counts import count_rows, fewest, rows_by_phase
from fedfrozen_app.sites.site_budget import Price
from fedfrozen_app.sites.site_state import Incoming, SiteState
from fedfrozen_app.sites.store import UPDATES, RunStore
from fedfrozen_app.sites.strict_request import read_strict_train_request


@dataclass(frozen=True)
class CheckedRequest:
    """A request that proposal and policy allow, and what it needs."""

    run: Accepted
    request: TrainRequest
    store: RunStore
    worker: Worker
    session: Session | None  # of a masked round, with the neighbours' shares
    price: Price | None  # of the whole run, if it is private

    @property
    def proposal(self) -> Proposal:
        return self.run.proposal


def check_request(site: SiteState, incoming: Incoming, run: Accepted) -> CheckedRequest:
    """Read the request, load model and data, and check the request against proposal and policy."""
    proposal = run.proposal
    try:
        request = read_strict_train_request(train_request_text(incoming.message))
    except ValueError as error:
        raise RequestRefused(f"the request cannot be read: {error}") from None
    incoming.details.update(round=request.round, order=request.work)
    store = site.store(proposal)
    worker = load_worker(site, incoming.context, run, store)
    counts = [count_rows(worker, run.view, rows) for rows in rows_by_phase(worker, site.kit.name, request)]
    if problem := problem_of_request(incoming.policy, request, run, worker.roles, *fewest(counts)):
        raise RequestRefused(problem)
    session = open_session(site, incoming, request, run)
    return CheckedRequest(run, request, store, worker, session, Price.of(proposal, run.view.unit))


def load_worker(site: SiteState, context: Context, run: Accepted, store: RunStore) -> Worker:
    """Load model and data, from the accepted proposal alone."""
    proposal, view = run.proposal, run.view
    set_accepted_run(AcceptedRun(site.kit.name, proposal.hash, run.config, proposal.data_spec))
    # One privacy record per run, so that each keeps to its own epsilon; the budget adds them up.
    context.node_config = site.kit.node_config() | {
        "executor": True,
        "proposal": proposal.hash,
        "privacy-dir": str(store.of(proposal.hash) / "privacy"),
    }
    worker = worker_for(context)
    worker.config = run.config  # with subgroups from the current policy
    if proposal.privacy.name != "none":
        declared = view.public_count(len(units_of(worker, site.kit.name)))
        context.node_config["declared-examples"] = declared
    return worker


def open_session(site: SiteState, incoming: Incoming, request: TrainRequest, run: Accepted) -> Session | None:
    """The masked round that this request belongs to, with the neighbours' shares; None without masks."""
    if request.masking is None:
        return None
    proposal, policy = run.proposal, incoming.policy
    with refusing_what_masks_refuse():
        session = site.masks.opened(proposal.hash, envelopes_of(incoming.message), request)
    asked = MaskedSum(
        *(session.terms.session, request.round, request.model, run.view.name),
        private=proposal.epsilon is not None,
    )
    fewest = proposal.secure_aggregation.min_cohort
    site.audit.sums.check(asked, session.roster.names, policy.differencing, fewest)
    site.masked_sums[proposal.hash] = asked
    return session


def check_limits(site: SiteState, incoming: Incoming, checked: CheckedRequest, *, again: bool) -> None:
    """Check the limits per day and per run, and the round's epsilon."""
    policy, request = incoming.policy, checked.request
    if request.evaluate:
        site.check_limit("judgements", policy.judgements_per_day, "judged")
    if request.choosing:
        site.check_limit("choices", UPDATES * policy.rounds_per_day, "chose")
    if again:  # it costs only a line in the log, and those are limited too
        site.check_limit("answers given again", policy.rounds_per_day, "again")
    if problem := problem_of_limits(site, request, checked.proposal, checked.price, policy, again=again):
        raise RequestRefused(problem)


def problem_of_limits(
    site: SiteState,
    request: TrainRequest,
    proposal: Proposal,
    price: Price | None,
    policy: Policy,
    *,
    again: bool,
) -> str | None:
    """Why the site sends no further update; sending the same one again costs nothing."""
    if not again and request.trains:
        if site.audit.today("sent") >= policy.rounds_per_day:
            given = counted(policy.rounds_per_day, "update")
            return f"it has sent {given} in 24 hours, and that is all it gives"
        most = UPDATES * proposal.run.num_rounds
        if site.audit.updates(proposal.run.id, proposal.hash) >= most:
            return f"it has sent {counted(most, 'update')} of this run, and that is all it gives"
    if price is not None:
        return site.budget.problem_of_round(proposal.run.id, request.round, request.work)
    return None
