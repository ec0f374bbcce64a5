"""What the request handlers of a site share: its kit, audit log, budget, approvals and masks, and the checks
that more than one kind of request needs."""

import logging
from dataclasses import dataclass, replace
from typing import Any

from flwr.app import Context, Message

from fedfrozen_app.config import device_of
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.exchange.messages import ticket_of
from fedfrozen_app.exchange.proposal import HASH, RUN_ID, Proposal
from fedfrozen_app.sites.accepted import Accepted, run_of_text
from fedfrozen_app.sites.approval import Approvals
from fedfrozen_app.sites.audit_log import AuditLog
from fedfrozen_app.sites.differencing import MaskedSum
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.masking import SiteMasks
from fedfrozen_app.sites.policy import Policy
from fedfrozen_app.sites.refusals import LimitReached, RequestRefused
from fedfrozen_app.sites.site_budget import Price, SiteBudget
from fedfrozen_app.sites.store import RunStore
from fedfrozen_app.sites.store_migration import migrate_state
from fedfrozen_app.sites.views import View

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Incoming:
    """A message, the policy at its arrival, and what the audit log will record of it."""

    message: Message
    context: Context
    policy: Policy
    details: dict[str, Any]  # handlers add to it as they learn more, so that a refusal records it too

    @property
    def bundle(self) -> str:
        return self.details["bundle"]


class SiteState:
    """One site, for as long as its executor runs."""

    def __init__(self, kit: Kit) -> None:
        self.kit = kit
        self.audit = AuditLog(kit.audit, kit.syslog)
        self.budget = SiteBudget(kit.var / "state" / "budget.json")
        self.budget.check(self.audit)
        self.approvals = Approvals(kit.approvals)
        self.masks = SiteMasks(kit.folder, kit.name)
        self.masked_sums: dict[str, MaskedSum] = {}  # by proposal: of its session
        self.device = device_of("auto").type
        migrate_state(kit.var / "state", self.audit, self.budget)
        Policy.read(kit.policy)  # report a bad policy at the start

    def store(self, proposal: Proposal) -> RunStore:
        return RunStore(self.kit.var / "state" / proposal.run.id, keep=proposal.run.keep_rounds)

    def view(self, name: str | None) -> View:
        """The view of this name; the only one, if there is one and no name."""
        view = self.kit.view(name)
        if view is None:
            raise RequestRefused("it names no view of this site's, or none where there are several")
        return view

    def accepted_proposal(self, incoming: Incoming) -> Proposal:
        """The proposal that a request belongs to, read from the site's own disk."""
        ticket = ticket_of(incoming.message)
        name, wanted = ticket.get("run", ""), ticket.get("proposal", "")
        if not RUN_ID.fullmatch(name) or not HASH.fullmatch(wanted):
            raise RequestRefused("the request names no run, or no proposal")
        incoming.details.update(run=name, proposal=wanted)
        proposal = RunStore(self.kit.var / "state" / name, keep=1).proposal()
        if proposal is None or proposal.run.id != name:
            raise RequestRefused("it has accepted no proposal of this run")
        if proposal.hash != wanted:
            raise RequestRefused("the request belongs to another proposal than the one that it accepted")
        return proposal

    def check_proposal(self, proposal: Proposal, incoming: Incoming) -> View:
        """Check a proposal against policy and budget; returns the view that it may use."""
        if self.approvals.has_left(proposal.run.id):
            raise RequestRefused("this site has left the run")
        view, policy = self.view(proposal.data.view), incoming.policy
        if problem := policy.problem_of_proposal(proposal, view, incoming.bundle):
            raise RequestRefused(problem)
        if (price := Price.of(proposal, view.unit)) is not None:
            limits = policy.max_epsilon, policy.max_delta
            if problem := self.budget.problem(proposal.run.id, price, *limits):
                raise RequestRefused(problem)
        return view

    def is_waiting(self, proposal_hash: str, mode: bool | str) -> bool:
        """Whether a person has yet to decide; a person's refusal counts under every policy. `mode` is the
        policy's `approval` or `census`."""
        decision = self.approvals.decision(proposal_hash)
        if decision is not None and not decision.approved:
            raise RequestRefused(f"a person refused it ({decision.by})")
        return decision is None and mode == "ask"

    def check_approved(self, proposal: Proposal, policy: Policy) -> None:
        if self.is_waiting(proposal.hash, policy.approval):
            raise RequestRefused("nobody has approved it")

    def run_of(self, proposal: Proposal, view: View, policy: Policy) -> Accepted:
        """The configuration to train with. Its subgroups come from the current policy."""
        try:
            run = run_of_text(proposal.text, view, self.kit.model_path, self.device)
        except (ValueError, UserError) as error:
            raise RequestRefused(f"the package installed here cannot do it: {error}") from None
        dataset = replace(
            run.config.dataset, subgroups=list(policy.subgroups), subgroup_floor=policy.census_floor
        )
        return replace(run, config=replace(run.config, dataset=dataset))

    def check_limit(self, what: str, most: int, *events: str) -> None:
        """`LimitReached` after `most` of these events in 24 hours."""
        if self.audit.today(*events) >= most:
            raise LimitReached(f"the day's {what} ({most}) are used up")

    def note(self, event: str, **details: object) -> None:
        """Write a line about something that was not sent, if the disk takes it."""
        try:
            self.audit.write(event, **details)
        except OSError:  # nothing left the site, so nothing must be on record
            log.exception("The audit log could not be written.")
