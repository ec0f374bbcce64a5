"""The answers of a site: every message is a request, and what it may have is decided here.

A hello brings a proposal: it is read, judged and, where the policy says so, put before a person. What was
accepted lies on the site's disk; an order names it by its hash and is judged against it. Whatever is refused
or goes wrong, the server gets one and the same sentence, and the site's log the reason.
"""

import hashlib
import logging
from dataclasses import replace
from functools import lru_cache
from typing import cast

import huggingface_hub.constants
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MessageType
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode  # internal
from torch import Tensor

from fedfrozen_app import client_app
from fedfrozen_app.census.ask import Ask, read_ask
from fedfrozen_app.census.memory import read_memory, rows_digest, write_memory
from fedfrozen_app.census.site import Rules, answer
from fedfrozen_app.census.site import problem as problem_of_ask
from fedfrozen_app.census.whose import records_of_folder, tokens_of_model
from fedfrozen_app.config import DatasetConfig, device_of
from fedfrozen_app.digests import digest
from fedfrozen_app.errors import UserError
from fedfrozen_app.exchange.arrays import to_record, to_tensors
from fedfrozen_app.exchange.messages import (
    ALIVE,
    CENSUS,
    MASKING,
    REFUSED,
    WAITING,
    CensusReply,
    Hello,
    Reply,
    alive_reply,
    census_reply,
    census_text,
    envelopes_of,
    hello_reply,
    masking_reply,
    masking_text,
    order_text,
    proposal_text,
    read_reply,
    read_train,
    ticket_of,
    train_reply,
)
from fedfrozen_app.exchange.names import parameter_of
from fedfrozen_app.exchange.order import Order
from fedfrozen_app.exchange.proposal import HASH, RUN_ID, Proposal, read_proposal
from fedfrozen_app.exchange.strict import canonical, hash_of
from fedfrozen_app.local.private import units_of
from fedfrozen_app.local.resident import Resident, Told, disk_cache, resident_for, tell
from fedfrozen_app.local.sequential import drawn_rows
from fedfrozen_app.secure import talk
from fedfrozen_app.secure.client import CONFIRMED, DONE, Session
from fedfrozen_app.secure.client import SHARES as SHARED
from fedfrozen_app.secure.roster import Refused as Unfit
from fedfrozen_app.secure.work import NOISE, SENSITIVITY, masked_reply
from fedfrozen_app.seeds import numpy_generator
from fedfrozen_app.sites.accepted import Accepted, accepted_run
from fedfrozen_app.sites.approval import Approvals
from fedfrozen_app.sites.audit_log import AuditLog
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.masking import SiteMasks
from fedfrozen_app.sites.orders import read_strict_order
from fedfrozen_app.sites.policy import Policy
from fedfrozen_app.sites.store import UPDATES, Budget, Price, RunStore
from fedfrozen_app.sites.views import View, rounded
from fedfrozen_app.words import counted

log = logging.getLogger(__name__)
# Figures that come from the site's settings and not from its rows; the last two never leave it.
ACCOUNT = ("epsilon", "delta", NOISE, SENSITIVITY)


class Refused(Exception):
    """Its text is the reason, for the site's own log."""

    event = "refused"


class Declined(Refused):
    """The client itself would not."""

    event = "declined"


class Limited(Refused):
    """So often today that it is not even written down."""


class Executor:
    """Answers messages for one site."""

    def __init__(self, kit: Kit, app: ClientApp | None = None) -> None:
        self.kit = kit
        self.app = app if app is not None else client_app.app
        self.audit = AuditLog(kit.audit, kit.syslog)
        self.budget = Budget(kit.var / "state" / "budget.json")
        self.budget.check(self.audit)
        self.approvals = Approvals(kit.approvals)
        self.masks = SiteMasks(kit.folder, kit.name)
        self.masked_rounds: dict[str, tuple[str, int]] = {}  # run: its session, and the round that it is of
        self.device = device_of("auto").type
        Policy.read(kit.policy)  # a bad policy is better said at the start

    def answer(self, message: Message, context: Context, bundle: str) -> Message:
        """The reply; whatever goes wrong here stays here, and the server gets a fixed sentence."""
        kind = message.metadata.message_type
        if kind == ALIVE:  # nothing is looked at, done or told
            return alive_reply(message)
        details = {"message": kind, "flower_run": context.run_id, "bundle": bundle}
        try:
            self.budget.check(self.audit)
            policy = Policy.read(self.kit.policy)
            self._check_limit("refusals", policy.refusals_per_day, "refused", "failed", "declined")
            huggingface_hub.constants.HF_HUB_OFFLINE = not policy.downloads
            if kind == MessageType.QUERY:
                return self._hello(message, context, policy, details)
            if kind == CENSUS:
                return self._census(message, policy, details)
            if kind == MessageType.TRAIN:
                return self._train(message, context, policy, details)
            if kind == MASKING:
                return self._mask_step(message, policy, details)
            raise Refused(f"it knows no {kind} messages")
        except Limited as refusal:
            log.warning("Refused: %s.", refusal)
        except Refused as refusal:
            log.warning("Refused: %s.", refusal)
            self._note(refusal.event, **details, reason=str(refusal))
        except Exception as error:  # of whatever kind: its text may hold a path or a value of the site's
            log.exception("A message could not be answered.")
            self._note("failed", **details, error=type(error).__name__)
        return self._no(message)

    # What is proposed ------------------------------------------------------------------------------------

    def _hello(self, message: Message, context: Context, policy: Policy, details: dict) -> Message:
        try:
            proposal = read_proposal(proposal_text(message))
        except ValueError as error:
            raise Refused(f"what was proposed cannot be read: {error}") from None
        details |= {"run": proposal.run.id, "proposal": proposal.hash}
        view = self._judge(proposal, policy, details["bundle"])
        self._run_of(proposal, view, policy)  # what cannot be done here needs nobody's approval
        if (waits := self._waits(proposal, policy)) and self.approvals.has(proposal.hash):
            return self._answer_hello(message, WAITING, [])  # asked before: nothing new is told or written
        self._check_limit("hellos", policy.hellos_per_day, "hello", "pending")
        known = {"strategy": proposal.strategy["name"], "view": view.name, "epsilon_asked": proposal.epsilon}
        if waits:
            self.approvals.ask(proposal)
            self.audit.write("pending", **details, **known)
            return self._answer_hello(message, WAITING, [])
        decision = self.approvals.decision(proposal.hash)
        self._store(proposal).accept(proposal)
        self.audit.write("hello", **details, **known, approved_by=decision.by if decision else "the policy")
        context.node_config = self.kit.node_config() | {"executor": True}
        return self._answer_hello(message, "", list(disk_cache(context).held()))

    def _judge(self, proposal: Proposal, policy: Policy, bundle: str) -> View:
        """The view that it may use."""
        view = self.kit.view(proposal.data.view)
        if view is None:
            raise Refused("it names no view of this site's, or none where there are several")
        if problem := policy.problem_of_proposal(proposal, view, bundle):
            raise Refused(problem)
        if (price := Price.of(proposal, view.unit)) is not None:
            limits = policy.max_epsilon, policy.max_delta
            if problem := self.budget.problem(proposal.run.id, price, *limits):
                raise Refused(problem)
        return view

    def _run_of(self, proposal: Proposal, view: View, policy: Policy) -> Accepted:
        try:
            made = _made(proposal.text, view, self.kit.model_path, self.device)
            dataset = replace(
                made.config.dataset, subgroups=list(policy.subgroups), subgroup_floor=policy.census_floor
            )
            return replace(made, config=replace(made.config, dataset=dataset))
        except (ValueError, UserError) as error:
            raise Refused(f"the package installed here cannot do it: {error}") from None

    def _waits(self, proposal: Proposal, policy: Policy) -> bool:
        """Whether a person has yet to answer; a person's no counts under every policy."""
        decision = self.approvals.decision(proposal.hash)
        if decision is not None and not decision.approved:
            raise Refused(f"a person refused it ({decision.by})")
        return decision is None and policy.approval == "ask"

    # What is counted -------------------------------------------------------------------------------------

    def _census(self, message: Message, policy: Policy, details: dict) -> Message:
        """What the site tells of its rows, of what it has decided to tell."""
        try:
            ask = read_ask(census_text(message))
        except ValueError as error:
            raise Refused(f"the census cannot be read: {error}") from None
        details |= {"run": ask.id, "proposal": ask.hash}
        view = self.kit.view(ask.view)
        if view is None:
            raise Refused("it names no view of this site's, or none where there are several")
        rules = policy.census_rules(self.kit.match_key)
        if problem := policy.problem_of_census(ask, view, details["bundle"]) or problem_of_ask(ask, rules):
            raise Refused(problem)
        if self._census_waits(ask, policy):
            if not self.approvals.has(ask.hash):
                self._check_limit("hellos", policy.hellos_per_day, "hello", "pending")
                self.approvals.ask(ask)
                self.audit.write("pending", **details, view=view.name, epsilon_asked=ask.epsilon)
            return self._tell(message, WAITING)
        self._check_limit("censuses", policy.censuses_per_day, "census")
        text, charged = self._count(ask, view, rules, policy)
        epsilon, delta = self.budget.spent()
        self.audit.write(
            "census",
            **details,
            view=view.name,
            columns=sorted(ask.columns),
            floor=rules.floor,
            hashes=ask.matches,
            bytes=len(text.encode()),
            answer=hashlib.sha256(text.encode()).hexdigest(),
            epsilon=ask.epsilon,
            charged=charged,
            epsilon_all_runs=epsilon,
            delta_all_runs=delta,
        )
        return self._tell(message, "", text)

    def _census_waits(self, ask: Ask, policy: Policy) -> bool:
        decision = self.approvals.decision(ask.hash)
        if decision is not None and not decision.approved:
            raise Refused(f"a person refused it ({decision.by})")
        return decision is None and policy.census == "ask"

    def _count(self, ask: Ask, view: View, rules: Rules, policy: Policy) -> tuple[str, str | None]:
        """The answer's text, and under which name its epsilon is in the budget."""
        records = records_of_folder(self._dataset(view), None, view.classes or ())
        place = self.kit.var / "census" / f"{view.name}.json"
        memory = read_memory(place)
        tokens = None if self.kit.model_path is None else tokens_of_model(self.kit.model_path)
        if ask.epsilon is None:
            found = answer(ask, records, rules, memory, tokens)
            write_memory(place, memory)
            return canonical(found), None
        # With noise: the same rows get the same answer again, at no cost; what is new is paid for first.
        of_rows = rows_digest(records)
        charged = f"census-{hash_of([view.name, of_rows, ask.plain | {'id': ''}])[:32]}"
        kept = memory.setdefault("noised", {})
        if charged not in kept:
            price = Price(ask.epsilon, 0.0, view.unit, ask.hash)
            if problem := self.budget.problem(charged, price, policy.max_epsilon, policy.max_delta):
                raise Refused(problem)
            kept[charged] = canonical(answer(ask, records, rules, {}, tokens))
            self.budget.charge(charged, price, 1, ask.hash, self.audit.head)
            write_memory(place, memory)
        return kept[charged], charged

    def _dataset(self, view: View) -> DatasetConfig:
        """With the column that says whose a row is: a reader may know another, or none."""
        return replace(view.dataset(), unit_column=view.column)

    def _tell(self, message: Message, state: str, text: str = "") -> Message:
        return census_reply(message, CensusReply(self.kit.name, state, text, self.audit.head))

    # What is ordered -------------------------------------------------------------------------------------

    def _train(self, message: Message, context: Context, policy: Policy, details: dict) -> Message:
        proposal = self._accepted(message, details)
        view = self._judge(proposal, policy, details["bundle"])
        if self._waits(proposal, policy):
            raise Refused("nobody has approved it")
        run = self._run_of(proposal, view, policy)
        try:
            order = read_strict_order(order_text(message))
        except ValueError as error:
            raise Refused(f"the order cannot be read: {error}") from None
        details |= {"round": order.round, "order": order.work}
        store = self._store(proposal)
        resident = self._resident(context, run, store)
        counts = [self._counts(resident, view, rows) for rows in self._rows(resident, order)]
        if problem := policy.problem_of_order(order, run, resident.roles, *fewest(counts)):
            raise Refused(problem)
        session = self._opened(message, order, proposal)
        if order.judge:
            self._check_limit("judgements", policy.judgements_per_day, "judged")
        if order.choosing:
            self._check_limit("choices", UPDATES * policy.rounds_per_day, "chose")
        reply = store.reply_to(order.round, order.work) if order.trains else None
        again = reply is not None and self.audit.has_sent(proposal.run.id, order.work)
        price = Price.of(proposal, view.unit)
        if again:  # it costs nothing but a line in the log, and these have an end too
            self._check_limit("answers given again", policy.rounds_per_day, "again")
        if problem := self._used_up(order, proposal, price, policy, again):
            raise Refused(problem)
        trained = reply is None
        if reply is None:
            if price is not None:  # a record of the run that is lost, or older than this, is no fresh start
                context.state["privacy"] = ConfigRecord({"rounds": self.budget.rounds(proposal.run.id)})
            answer = self._carry_out(message, context, order, store)
            reply = read_reply(answer)
            if reply.lacks:
                self._check_limit("orders with arrays that are not here", policy.rounds_per_day, "lacks")
                self.audit.write("lacks", **details, names=len(reply.lacks))
                return train_reply(message, replace(reply, anchor=self.audit.head), local=False)
            if reply.declined:
                raise Declined(reply.declined)
        reply = self._outgoing(reply, order, policy, view)
        masked: dict[str, object] = {}
        if session is not None:
            sent = {} if trained else read_train(message)[1]  # training has put them into the cache
            base, lacks = resident.cache.complete(order.base, sent, verify=True)
            if lacks:  # what was sent before is here, and what it began from is not
                return train_reply(message, Reply(order.digest, lacks=lacks), local=False)
            masked = {"masked": masked_entry(session, order, reply)}
            # Rounding is no secret: a round that is asked for again rounds to the same numbers.
            drawn = numpy_generator(resident.config.seed, "rounding", self.kit.name, order.round)
            try:
                session, reply = masked_reply(session, order, reply, base, drawn)
            except Unfit as no:
                raise Refused(str(no)) from None
            self.masks.keep(proposal.run.id, session)
        if price is not None:
            self.budget.charge(proposal.run.id, price, order.round, order.work, self.audit.head)
        epsilon, delta = self.budget.spent()
        self.audit.write(
            "judged" if order.judge else "chose" if order.choosing else "sent",
            **details,
            again=again,
            asked={"trained": len(order.plan.trained), "private": len(order.plan.private)},
            arrays={name: digest(tensor) for name, tensor in reply.arrays.items()},
            bytes=sum(tensor.numel() * tensor.element_size() for tensor in reply.arrays.values()),
            examples=reply.examples,
            metrics=reply.metrics,
            epsilon=price.epsilon if price else None,
            delta=price.delta if price else None,
            epsilon_all_runs=epsilon,
            delta_all_runs=delta,
            **masked,
            **({"layers": reply.chosen} if order.choosing else {}),
        )
        return train_reply(message, replace(reply, anchor=self.audit.head), local=False)

    def _accepted(self, message: Message, details: dict) -> Proposal:
        """The proposal that this order belongs to, as it lies on the site's own disk."""
        ticket = ticket_of(message)
        name, wanted = ticket.get("run", ""), ticket.get("proposal", "")
        if not RUN_ID.fullmatch(name) or not HASH.fullmatch(wanted):
            raise Refused("the order names no run, or no proposal")
        details |= {"run": name, "proposal": wanted}
        proposal = RunStore(self.kit.var / "state" / name, keep=1).proposal()
        if proposal is None or proposal.run.id != name:
            raise Refused("it has accepted no proposal of this run")
        if proposal.hash != wanted:
            raise Refused("the order belongs to another proposal than the one that it accepted")
        return proposal

    def _resident(self, context: Context, run: Accepted, store: RunStore) -> Resident:
        """The model and the data, loaded; made from the accepted object and nothing else."""
        proposal, view = run.proposal, run.view
        tell(Told(self.kit.name, proposal.hash, run.config, proposal.card))
        # One privacy record a run, so that each keeps to its own epsilon; the budget adds them up.
        context.node_config = self.kit.node_config() | {
            "executor": True,
            "proposal": proposal.hash,
            "privacy-dir": str(store.folder / "privacy"),
        }
        resident = resident_for(context)
        resident.config = run.config  # which groups are judged apart is the policy's word of now
        if proposal.privacy.name != "none":
            declared = view.told(len(units_of(resident, self.kit.name)))
            context.node_config["declared-examples"] = declared
        return resident

    def _rows(self, resident: Resident, order: Order) -> list[Tensor]:
        """The rows of each phase of the round: some only, where its steps do not get through all of them."""
        rows, client, seed = resident.rows(self.kit.name).train, resident.config.client, resident.config.seed
        some = client.local_steps is not None and client.local_steps * client.batch_size < len(rows)
        if not some or resident.config.privacy.name != "none":  # a private step draws from all
            return [rows]
        who = self.kit.name, order.round
        return [drawn_rows(rows, client, seed, *who, phase, 1)[0] for phase, _ in enumerate(order.plan.steps)]

    def _counts(self, resident: Resident, view: View, rows: Tensor) -> tuple[int, int | None]:
        """(rows that would train, people that they are of; None where the view does not tell)."""
        if view.unit == "example":  # the steward says that every row stands for itself
            return len(rows), len(rows)
        if view.unit != "patient" or view.column not in resident.corpus.columns:
            return len(rows), None
        return len(rows), len(set(resident.corpus.columns[view.column][rows.numpy()]))

    def _used_up(
        self, order: Order, proposal: Proposal, price: Price | None, policy: Policy, again: bool
    ) -> str | None:
        """Why the site has given all it gives; sending the same update again costs nothing."""
        if not again and order.trains and self.audit.today("sent") >= policy.rounds_per_day:
            given = counted(policy.rounds_per_day, "update")
            return f"it has sent {given} in 24 hours, and that is all it gives"
        most = UPDATES * proposal.run.num_rounds
        if not again and order.trains and self.audit.updates(proposal.run.id, proposal.hash) >= most:
            return f"it has sent {counted(most, 'update')} of this run, and that is all it gives"
        if price is not None:
            return self.budget.problem_of_round(proposal.run.id, order.round, order.work)
        return None

    def _carry_out(self, message: Message, context: Context, order: Order, store: RunStore) -> Message:
        """Run the ClientApp on what this site's disk says it kept, and keep what comes out."""
        context.state.pop("private", None)
        has_state = order.plan.private or order.method.stays
        if has_state and (kept := store.private_before(order.round)) is not None:
            context.state["private"] = to_record(kept, local=False)
        answer = self.app(message, context)
        private = context.state.pop("private", None)  # not for the SuperNode, which would hold it in memory
        reply = read_reply(answer)
        if order.trains and not (reply.lacks or reply.declined):
            own = to_tensors(cast(ArrayRecord, private)) if private else {}
            store.write(order.round, replace(reply, order=order.work), own)
        return answer

    def _outgoing(self, reply: Reply, order: Order, policy: Policy, view: View) -> Reply:
        """The reply less what the policy keeps: its figures, and the true numbers of rows."""
        if order.choosing:
            return Reply(reply.order, chosen=reply.chosen)
        known = {*order.plan.shared, *(order.coder.extra_names if order.coder else ())}
        if strange := sorted(name for name in reply.arrays if parameter_of(name) not in known):
            raise Refused(f"{strange[0]} was about to leave, which the order does not share")
        if policy.metrics and not policy.privacy_required:
            metrics = dict(reply.metrics)
            if order.judge:
                metrics["train_rows"] = view.told(int(metrics["train_rows"]))
                metrics["test_rows"] = rounded(int(metrics["test_rows"])) if metrics["test_rows"] else 0
                for key in [key for key in metrics if key.endswith(("/rows", "/people"))]:
                    metrics[key] = rounded(int(metrics[key]))
        else:
            metrics = {key: value for key, value in reply.metrics.items() if key in ACCOUNT}
        return replace(reply, metrics=metrics, examples=view.told(reply.examples))

    # Masked rounds ---------------------------------------------------------------------------------------

    def _mask_step(self, message: Message, policy: Policy, details: dict) -> Message:
        """Keys, shares and unmasking: what leaves is on record before it leaves."""
        proposal = self._accepted(message, details)
        self._judge(proposal, policy, details["bundle"])
        if self._waits(proposal, policy):
            raise Refused("nobody has approved it")
        asked, run = proposal.secure_aggregation, proposal.run.id
        if asked.name != "on":
            raise Refused("the run has no masks")
        fewest = max(policy.min_cohort, asked.min_cohort)
        try:
            question = talk.read_question(masking_text(message))
            details["step"] = question["step"]
            session, text = self.masks.answer(run, question, asked, fewest)
        except Unfit as no:
            raise Refused(str(no)) from None
        except ValueError as no:
            raise Refused(f"the step cannot be read: {no}") from None
        known = {**details, "session": session.terms.session}
        if session.state == SHARED:
            self._check_limit("rosters", UPDATES * policy.rounds_per_day, "roster")
            roster = session.roster
            self.audit.write("roster", **known, roster=roster.digest.hex(), cohort=list(roster.names))
        elif session.state == CONFIRMED:
            self._confirm(session, known, once=asked.noise == "sum")
        elif session.state == DONE:
            self.audit.write("unmasked", **known)
        self.masks.keep(run, session)
        return masking_reply(message, text)

    def _confirm(self, session: Session, known: dict, *, once: bool) -> None:
        """One list of survivors for each round of a run, ever: of two sums over almost the same sites the
        difference would be one site's update. A round that is asked for again has the same, or none: the
        latter where each sum has noise of its own (`once`), for two of them have less together."""
        begun, number = self.masked_rounds[known["run"]]
        assert begun == session.terms.session  # a run has one session at a time
        before = self.audit.confirmed(known["run"], number)
        if before is not None and (once or before != list(session.survivors)):
            raise Refused(f"round {number} was summed over other sites before")
        self.audit.write("confirmed", **known, round=number, survivors=list(session.survivors))

    def _opened(self, message: Message, order: Order, proposal: Proposal) -> Session | None:
        """The round that this order belongs to, with its neighbours' shares; None where nothing is masked."""
        if order.masking is None:
            return None
        try:
            session = self.masks.opened(proposal.run.id, envelopes_of(message), order.digest)
        except Unfit as no:
            raise Refused(str(no)) from None
        self.masked_rounds[proposal.run.id] = session.terms.session, order.round
        return session

    # Answers ---------------------------------------------------------------------------------------------

    def _store(self, proposal: Proposal) -> RunStore:
        return RunStore(self.kit.var / "state" / proposal.run.id, keep=proposal.run.keep_rounds)

    def _check_limit(self, what: str, most: int, *events: str) -> None:
        if self.audit.today(*events) >= most:
            raise Limited(f"the day's {what} ({most}) are used up")

    def _note(self, event: str, **details: object) -> None:
        try:
            self.audit.write(event, **details)
        except OSError:  # nothing was sent, so there is nothing that must be on record
            log.exception("The audit log could not be written.")

    def _answer_hello(self, message: Message, state: str, held: list[str]) -> Message:
        return hello_reply(message, Hello(self.kit.name, held=held, state=state, anchor=self.audit.head))

    def _no(self, message: Message) -> Message:
        """The one refusal."""
        kind = message.metadata.message_type
        if kind == MessageType.QUERY:
            return self._answer_hello(message, REFUSED, [])
        if kind == CENSUS:
            return self._tell(message, REFUSED)
        if kind == MessageType.TRAIN:
            reply = Reply("", declined=f"failed: {client_app.FAILED}", anchor=self.audit.head)
            return train_reply(message, reply, local=False)
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, client_app.FAILED), reply_to=message)


def masked_entry(session: Session, order: Order, reply: Reply) -> dict[str, object]:
    """What the log tells of an update that leaves masked: what is in it, for whom, with which roster."""
    roster = session.roster
    return {
        "session": session.terms.session,
        "roster": roster.digest.hex(),
        "cohort": list(roster.names),
        "neighbours": sorted(name for name in session.held if name != session.name),
        "needed": roster.needed,
        "arrays": list(reply.arrays),
        "figures": sorted(set(reply.metrics) & set(order.masking.figures if order.masking else ())),
    }


def fewest(counts: list[tuple[int, int | None]]) -> tuple[int, int | None]:
    """Of a round's phases: each is a training of its own."""
    people = [found for _, found in counts if found is not None]
    return min(rows for rows, _ in counts), min(people) if people else None


@lru_cache(maxsize=8)  # what was accepted is made into a configuration once
def _made(text: str, view: View, model_path: str | None, device: str) -> Accepted:
    return accepted_run(read_proposal(text), view, model_path, device)
