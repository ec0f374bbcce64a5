"""A round whose replies are masked: keys, shares, the order itself, and unmasking, over any grid.

A round has one cohort, or several that are added up apart: all of them take each step together. Whoever does
not answer a step is out of the round. A cohort with fewer left than the threshold gives no sum: the server
then holds masked numbers, which tell nothing.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TypeVar

import numpy as np
from torch import Tensor

from fedfrozen_app.exchange.count import Traffic
from fedfrozen_app.exchange.messages import Reply
from fedfrozen_app.exchange.order import Order
from fedfrozen_app.secure import talk
from fedfrozen_app.secure.layout import Layout, Sums, added, decode, error_bound
from fedfrozen_app.secure.roster import Entry
from fedfrozen_app.secure.sum_up import Collector, TooFew
from fedfrozen_app.secure.vector import unpacked
from fedfrozen_app.secure.work import MASKED, layout_of, rules_of, terms_of
from fedfrozen_app.server.conversation import Conversation, ToMask

log = logging.getLogger(__name__)
T = TypeVar("T")
Members = Sequence[tuple[str, int]]  # client, node
STEPS = ("keys", "shares", "masked", "unmask", "unmask")  # the clients sign before they unmask


@dataclass
class Cohort:
    """Those who are added up together, under an order of their own."""

    order: Order
    members: Members
    model: Mapping[str, Tensor]
    failures: dict[str, str] = field(default_factory=dict)  # client: why it is not in the sum
    spent: dict[str, tuple[float, float]] = field(default_factory=dict)  # client: epsilon and delta it told
    problem: str | None = None  # why there is no sum
    sums: Sums | None = None
    slack: dict[str, float] = field(default_factory=dict)  # array: how far rounding can have moved its sum
    roster: int = 0
    # Of the step that it is at: what each client is asked, or is to train; and the answers to the former.
    questions: dict[str, str] = field(default_factory=dict)
    orders: dict[str, ToMask] = field(default_factory=dict)
    answers: list[tuple[str, str | ValueError]] = field(default_factory=list)

    @cached_property
    def layout(self) -> Layout:
        return layout_of(self.order, self.model)

    @cached_property
    def _collector(self) -> Collector:
        assert self.order.masking is not None
        return Collector(terms_of(self.order), self.order.masking.settings["min_cohort"])

    @cached_property
    def _course(self) -> Iterator[None]:
        return self._steps()

    def advance(self) -> bool:
        """Take the answers of this step in, and come to the next; whether there is one."""
        try:
            next(self._course)
        except StopIteration:
            return False
        except TooFew as error:
            self.problem = f"{error}: no sum was unmasked"
            return False
        return True

    def _steps(self) -> Iterator[None]:
        """It stops wherever its clients must answer."""
        assert self.order.masking is not None
        session, collector = self.order.masking.session, self._collector
        self._ask([client for client, _ in self.members], talk.ask_keys(collector.terms))
        yield
        entries: dict[str, Entry] = {}
        for client, text in self.answers:
            self._take(client, text, partial(talk.read_entry, name=client), entries)
        roster = collector.take_keys(entries)
        self.roster = len(roster.entries)
        self._ask(entries, talk.ask_shares(roster))
        yield
        sent: dict[str, dict[str, bytes]] = {}
        for client, text in self.answers:
            self._take(client, text, talk.read_envelopes, sent)
        envelopes = collector.take_shares(sent)
        for client in set(sent) - set(envelopes):
            self.failures[client] = "sent shares to others than its neighbours"
        collector.expect(self.layout.head, self.layout.body)
        self.orders = {
            client: ToMask(self.order, talk.envelopes_text(session, own), self.layout)
            for client, own in envelopes.items()
        }
        yield  # and each reply is taken as it comes
        survivors, failed = collector.close(), dict(self.failures)
        self._ask(survivors, talk.ask_confirmation(session, survivors))
        yield
        signatures: dict[str, bytes] = {}
        for client, text in self.answers:
            self._take(client, text, talk.read_signature, signatures)
        collector.take_confirmations(len(signatures))
        self._ask(signatures, talk.ask_unmasking(session, signatures))
        yield
        gave: dict[str, tuple[dict[str, bytes], dict[str, bytes]]] = {}
        for client, text in self.answers:
            self._take(client, text, talk.read_unmasking, gave)
        for client, (own, keys) in gave.items():
            collector.take_unmasking(client, own, keys)
        total = collector.finish()
        late = {client: why for client, why in self.failures.items() if client not in failed}
        for client, why in late.items():  # its update is in the sum all the same
            log.warning("Round %d: client %s left before the end (%s).", self.order.round, client, why)
        self.failures = failed
        rules = rules_of(self.order, self.roster)
        sums = decode(self.layout, rules, total)
        if sums.replies != len(survivors):
            raise TooFew("the unmasked numbers are no sum of updates: some client sent something else")
        self.sums = sums
        self.slack = {
            name: error_bound(self.layout, rules, name, sums.replies, 1.0) for name in self.layout.shapes
        }

    def take_reply(self, client: str, reply: Reply | str) -> None:
        """A masked update, which may be forgotten then."""
        if isinstance(reply, str):
            self.failures[client] = reply
            return
        if "epsilon" in reply.metrics:
            self.spent[client] = reply.metrics["epsilon"], reply.metrics["delta"]
        data = np.ascontiguousarray(reply.arrays[MASKED].cpu().numpy())
        bits = rules_of(self.order, self.roster).bits
        self._collector.take_vector(client, unpacked(data, self.layout.head, bits))
        reply.arrays = {}

    def _ask(self, clients: Mapping[str, object] | Sequence[str], text: str) -> None:
        self.questions, self.answers = dict.fromkeys(clients, text), []

    def _take(
        self, client: str, text: str | ValueError, read: Callable[[str], T], into: dict[str, T]
    ) -> None:
        try:
            if isinstance(text, ValueError):
                raise text
            into[client] = read(text)
        except ValueError as error:
            self.failures[client] = str(error)


@dataclass
class MaskedRound:
    conversation: Conversation
    cohorts: Sequence[Cohort]
    model: Mapping[str, Tensor]
    traffic: Traffic
    patience: float  # seconds for a step that carries no update
    apart: bool = False  # cohorts by what clients chose: which are there is told
    failures: dict[str, str] = field(default_factory=dict)  # client: why it is not in the sum
    problem: str | None = None  # why there is no sum at all
    sums: Sums | None = None
    seconds: dict[str, float] = field(default_factory=dict)  # by step
    error: float = 0.0  # how far rounding can have moved a mean of the clients

    def run(self) -> None:
        cohort_of = {client: cohort for cohort in self.cohorts for client, _ in cohort.members}
        going = [cohort for cohort in self.cohorts if cohort.advance()]
        for step in STEPS:
            began = time.perf_counter()
            if step == "masked":
                self._train(going, cohort_of)
            else:
                self._ask(going, cohort_of)
            going = [cohort for cohort in going if cohort.advance()]
            self.seconds[step] = self.seconds.get(step, 0.0) + time.perf_counter() - began
        self._close()

    def _ask(self, going: Sequence[Cohort], cohort_of: Mapping[str, Cohort]) -> None:
        if not going:
            return
        texts = {client: text for cohort in going for client, text in cohort.questions.items()}
        members = [member for cohort in going for member in cohort.members if member[0] in texts]
        number = going[0].order.round
        for client, answer in self.conversation.ask(number, members, texts, self.traffic, self.patience):
            cohort_of[client].answers.append((client, answer))

    def _train(self, going: Sequence[Cohort], cohort_of: Mapping[str, Cohort]) -> None:
        if not going:
            return
        masked = {client: own for cohort in going for client, own in cohort.orders.items()}
        members = [member for cohort in going for member in cohort.members if member[0] in masked]
        for client, reply in self.conversation.round(
            going[0].order, members, self.model, self.traffic, masked=masked
        ):
            cohort_of[client].take_reply(client, reply)

    def _close(self) -> None:
        """One cohort without a sum does not spoil the others'."""
        whole = [cohort for cohort in self.cohorts if cohort.sums is not None]
        for cohort in self.cohorts:
            self.failures |= cohort.failures
            if cohort.problem is not None and whole:
                why = f"was in a group without a sum ({cohort.problem})"
                self.failures |= {
                    client: why for client, _ in cohort.members if client not in cohort.failures
                }
        if not whole:
            problems = [cohort.problem for cohort in self.cohorts if cohort.problem]
            self.problem = "; ".join(problems) or "no client told its choice of layers"
            return
        self.sums = added([cohort.sums for cohort in whole if cohort.sums is not None])
        slack: dict[str, float] = {}
        for cohort in whole:
            for name, part in cohort.slack.items():
                slack[name] = slack.get(name, 0.0) + part
        weights = self.sums.weights
        self.error = max((slack[name] / weights[name] for name in slack if weights[name]), default=0.0)

    @property
    def spent(self) -> dict[str, tuple[float, float]]:
        return {client: own for cohort in self.cohorts for client, own in cohort.spent.items()}

    @property
    def known(self) -> dict[str, tuple[str, ...]]:
        """What each client in the sum has sent, where the server knows."""
        return {
            client: cohort.order.plan.shared
            for cohort in self.cohorts
            for client, _ in cohort.members
            if self.apart and client not in self.failures and cohort.sums is not None
        }

    @property
    def groups(self) -> list[dict[str, int]]:
        """Of each cohort how many began, and how many are in its sum."""
        sums = ((cohort.roster, cohort.sums.replies if cohort.sums else 0) for cohort in self.cohorts)
        return [{"cohort": began, "summed": summed} for began, summed in sums]

    @property
    def roster(self) -> int:
        return sum(cohort.roster for cohort in self.cohorts)
