"""A round whose replies are masked: keys, shares, the order itself, and unmasking, over any grid.

Whoever does not answer a step is out of the round. With fewer left than the threshold the round changes
nothing: the server then holds masked numbers, which tell nothing.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
from torch import Tensor

from fedfrozen_app.exchange.count import Traffic
from fedfrozen_app.exchange.order import Order
from fedfrozen_app.secure import talk
from fedfrozen_app.secure.layout import Sums, decode, error_bound
from fedfrozen_app.secure.roster import Entry
from fedfrozen_app.secure.sum_up import Collector, TooFew
from fedfrozen_app.secure.vector import unpacked
from fedfrozen_app.secure.work import MASKED, layout_of, rules_of, terms_of
from fedfrozen_app.server.conversation import Conversation

log = logging.getLogger(__name__)
T = TypeVar("T")
Members = Sequence[tuple[str, int]]  # client, node


@dataclass
class MaskedRound:
    conversation: Conversation
    order: Order
    members: Members
    model: Mapping[str, Tensor]
    traffic: Traffic
    failures: dict[str, str] = field(default_factory=dict)  # client: why it is not in the sum
    spent: dict[str, tuple[float, float]] = field(default_factory=dict)  # client: epsilon and delta it told
    problem: str | None = None  # why there is no sum
    sums: Sums | None = None
    seconds: dict[str, float] = field(default_factory=dict)  # by step
    error: float = 0.0  # how far rounding can have moved a mean of the clients
    roster: int = 0

    def run(self) -> None:
        assert self.order.masking is not None
        settings = self.order.masking.settings
        self._layout = layout_of(self.order, self.model)
        collector = Collector(terms_of(self.order), settings["min_cohort"])
        try:
            self._run(collector)
        except TooFew as error:
            self.problem = f"{error}: no sum was unmasked"

    def _run(self, collector: Collector) -> None:
        assert self.order.masking is not None
        session = self.order.masking.session
        began = time.perf_counter()
        entries: dict[str, Entry] = {}
        for client, text in self._ask(self.members, talk.ask_keys(collector.terms)):
            self._take(client, text, partial(talk.read_entry, name=client), entries)
        roster = collector.take_keys(entries)
        self.roster = len(roster.entries)
        began = self._clock("keys", began)
        sent: dict[str, dict[str, bytes]] = {}
        for client, text in self._ask(self._left(entries), talk.ask_shares(roster)):
            self._take(client, text, talk.read_envelopes, sent)
        envelopes = collector.take_shares(sent)
        for client in set(sent) - set(envelopes):
            self.failures[client] = "sent shares to others than its neighbours"
        began = self._clock("shares", began)
        collector.expect(self._layout.head, self._layout.body)
        rules = rules_of(self.order, self.roster)
        texts = {client: talk.envelopes_text(session, own) for client, own in envelopes.items()}
        members = self._left(envelopes)
        for client, reply in self.conversation.round(
            self.order, members, self.model, self.traffic, envelopes=texts, layout=self._layout
        ):
            if isinstance(reply, str):
                self.failures[client] = reply
                continue
            if "epsilon" in reply.metrics:
                self.spent[client] = reply.metrics["epsilon"], reply.metrics["delta"]
            data = reply.arrays[MASKED].cpu().numpy()
            collector.take_vector(client, unpacked(np.ascontiguousarray(data), self._layout.head, rules.bits))
            reply.arrays = {}
        survivors = collector.close()
        began = self._clock("masked", began)
        signatures: dict[str, bytes] = {}
        question, failed = talk.ask_confirmation(session, survivors), dict(self.failures)
        for client, text in self._ask(self._left(survivors), question):
            self._take(client, text, talk.read_signature, signatures)
        collector.take_confirmations(len(signatures))
        gave: dict[str, tuple[dict[str, bytes], dict[str, bytes]]] = {}
        for client, text in self._ask(self._left(signatures), talk.ask_unmasking(session, signatures)):
            self._take(client, text, talk.read_unmasking, gave)
        for client, (own, keys) in gave.items():
            collector.take_unmasking(client, own, keys)
        total = collector.finish()
        late = {client: why for client, why in self.failures.items() if client not in failed}
        for client, why in late.items():  # its update is in the sum all the same
            log.warning("Round %d: client %s left before the end (%s).", self.order.round, client, why)
        self.failures = failed
        sums = decode(self._layout, rules, total)
        if sums.replies != len(survivors):
            raise TooFew("the unmasked numbers are no sum of updates: some client sent something else")
        self.sums = sums
        self.error = max(
            (
                error_bound(self._layout, rules, name, sums.replies, sums.weights[name])
                for name in self._layout.shapes
                if sums.weights[name]
            ),
            default=0.0,
        )
        self._clock("unmask", began)

    def _left(self, clients: Mapping[str, object] | Sequence[str]) -> Members:
        known = set(clients)
        return [(client, node) for client, node in self.members if client in known]

    def _ask(self, members: Members, text: str) -> list[tuple[str, str | ValueError]]:
        assert self.order.masking is not None
        patience = self.order.masking.settings["step_timeout"]
        return self.conversation.ask(self.order, members, text, self.traffic, patience)

    def _take(
        self, client: str, text: str | ValueError, read: Callable[[str], T], into: dict[str, T]
    ) -> None:
        try:
            if isinstance(text, ValueError):
                raise text
            into[client] = read(text)
        except ValueError as error:
            self.failures[client] = str(error)

    def _clock(self, step: str, began: float) -> float:
        now = time.perf_counter()
        self.seconds[step] = now - began
        return now
