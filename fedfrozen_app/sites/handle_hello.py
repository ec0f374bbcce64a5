"""Hello requests: read and check a proposal, and ask a person if the policy requires it. An accepted proposal
is written to the site's disk, and every later request of the run is checked against it."""

from collections.abc import Sequence

from flwr.app import Message

from fedfrozen_app.core.logs import learn
from fedfrozen_app.exchange.hello_messages import WAITING, Hello, hello_reply, proposal_text
from fedfrozen_app.exchange.proposal import read_proposal
from fedfrozen_app.local.worker_for import disk_cache
from fedfrozen_app.sites.refusals import RequestRefused
from fedfrozen_app.sites.site_state import Incoming, SiteState


def handle_hello(site: SiteState, incoming: Incoming) -> Message:
    message, context, policy, details = incoming.message, incoming.context, incoming.policy, incoming.details
    try:
        proposal = read_proposal(proposal_text(message))
    except ValueError as error:
        raise RequestRefused(f"what was proposed cannot be read: {error}") from None
    details |= {"run": proposal.run.id, "proposal": proposal.hash}
    learn(run=proposal.run.id)
    view = site.check_proposal(proposal, incoming)
    site.run_of(proposal, view, policy)  # refuse what this package cannot run before a person is asked
    waiting = site.is_waiting(proposal.hash, policy.approval)
    if waiting and site.approvals.has(proposal.hash):
        return hello_answer(site, message, WAITING)  # asked before: nothing new is written
    site.check_limit("hellos", policy.hellos_per_day, "hello", "pending")
    about = {"strategy": proposal.strategy["name"], "view": view.name, "epsilon_asked": proposal.epsilon}
    if waiting:
        site.approvals.ask(proposal)
        site.audit.write("pending", **details, **about)
        return hello_answer(site, message, WAITING)
    decision = site.approvals.decision(proposal.hash)
    site.store(proposal).accept(proposal)
    site.audit.write("hello", **details, **about, approved_by=decision.by if decision else "the policy")
    context.node_config = site.kit.node_config() | {"executor": True}
    return hello_answer(site, message, "", list(disk_cache(context).held()))


def hello_answer(site: SiteState, message: Message, state: str, held: Sequence[str] = ()) -> Message:
    """`held`: the digests of arrays that need not be sent."""
    return hello_reply(message, Hello(site.kit.name, held=list(held), state=state, anchor=site.audit.head))
