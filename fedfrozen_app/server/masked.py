"""A round with masked replies: key exchange, shares, training and unmasking, over any grid.

A round has one cohort, or several that are summed separately: all of them take each step together. A client
that does not answer a step leaves the round. A cohort with fewer clients than the threshold has no sum: the
server then has only masked numbers, which reveal nothing.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TypeVar

import numpy as np
from torch import Tensor

from fedfrozen_app.core.formatting import quoted
from fedfrozen_app.exchange.count import Traffic
from fedfrozen_app.exchange.messages import Reply
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.secure import secagg_messages
from fedfrozen_app.secure.certified import Shown
from fedfrozen_app.secure.layout import SumLayout, Sums, added, decode, error_bound
from fedfrozen_app.secure.roster import Entry, Roster, repeated_keys
from fedfrozen_app.secure.round_keys import Trust
from fedfrozen_app.secure.sum_up import Collector, TooFew
from fedfrozen_app.secure.vector import Vector, unpacked
from fedfrozen_app.secure.work import MASKED, carriers_of, layout_of, noised, rules_of, survivors_of, terms_of
from fedfrozen_app.server.connection import Connection
from fedfrozen_app.server.masked_result import MaskedResult
from fedfrozen_app.server.masking_exchange import exchange_texts
from fedfrozen_app.server.request_messages import ToMask
from fedfrozen_app.server.round_trip import Members, RoundTrip

log = logging.getLogger(__name__)
T = TypeVar("T")
STEPS = ("keys", "shares", "masked", "unmask", "unmask")  # the clients sign before they unmask


@dataclass
class StepMessages:
    """The messages of a cohort's current step: each client's text or training request, and the answers."""

    questions: dict[str, str] = field(default_factory=dict)
    requests: dict[str, ToMask] = field(default_factory=dict)
    answers: list[tuple[str, str | ValueError]] = field(default_factory=list)


@dataclass
class Cohort:
    """Clients whose updates are summed together, under one request."""

    request: TrainRequest
    members: Members
    model: Mapping[str, Tensor]
    failures: dict[str, str] = field(default_factory=dict)  # client: why it is not in the sum
    spent: dict[str, tuple[float, float]] = field(default_factory=dict)  # client: its epsilon and delta
    problem: str | None = None  # why there is no sum
    sums: Sums | None = None
    roster: int = 0
    whole: bool = False  # no sum unless all members are in it
    trust: Trust = field(default_factory=Shown)  # verifies clients' keys before others get them
    on_survivors: Callable[[Sequence[str]], None] = lambda names: None  # called before they agree
    step: StepMessages = field(default_factory=StepMessages)

    @cached_property
    def layout(self) -> SumLayout:
        return layout_of(self.request, self.model)

    @cached_property
    def _collector(self) -> Collector:
        assert self.request.masking is not None
        return Collector(terms_of(self.request), self.request.masking.settings["min_cohort"])

    @cached_property
    def _running_steps(self) -> Iterator[None]:
        return self._steps()

    @property
    def spoilt_by(self) -> dict[str, str]:
        """The client whose exclusion may give the next round a sum, and why."""
        return self._collector.false

    @property
    def slack(self) -> dict[str, float]:
        """By array: the largest rounding error of its sum."""
        if self.sums is None:
            return {}
        rules, replies = rules_of(self.request, self.roster), self.sums.replies
        return {name: error_bound(self.layout, rules, name, replies, 1.0) for name in self.layout.shapes}

    @property
    def carriers(self) -> int:
        """How many clients carry the noise of its sum."""
        return carriers_of(self.request, self._collector.roster)

    @property
    def noise(self) -> dict[str, int]:
        """With noise in the sum: the fewest survivors, and the most colluders, for which it suffices."""
        if not self.roster or not noised(self.request):
            return {}
        roster = self._collector.roster
        return {"survivors": survivors_of(self.request, roster), "colluders": roster.colluders}

    def advance(self) -> bool:
        """Process the answers of this step and continue to the next; returns whether there is one."""
        try:
            next(self._running_steps)
        except StopIteration:
            return False
        except TooFew as error:
            self.problem = f"{error}: no sum was unmasked"
            return False
        return True

    def _steps(self) -> Iterator[None]:
        """Yield at each step that clients must answer."""
        assert self.request.masking is not None
        session, collector = self.request.masking.session, self._collector
        self._ask([client for client, _ in self.members], secagg_messages.ask_keys(collector.terms))
        yield
        roster = collector.take_keys(self._entries())
        self.roster = len(roster.entries)
        self._ask(roster.names, secagg_messages.ask_shares(roster))
        yield
        sent: dict[str, dict[str, bytes]] = {}
        for client, text in self.step.answers:
            self._take(client, text, secagg_messages.read_envelopes, sent)
        envelopes = collector.take_shares(sent)
        for client in set(sent) - set(envelopes):
            self.failures[client] = "sent shares to strangers, or not to as many as the round's neighbours"
        rules = rules_of(self.request, self.roster)
        if rules.problem:
            raise TooFew(rules.problem)
        collector.expect(self.layout.head, self.layout.body, rules.bits)
        self.step.requests = {
            client: ToMask(
                self.request,
                secagg_messages.envelopes_text(session, own, collector.present(client)),
                self.layout,
            )
            for client, own in envelopes.items()
        }
        yield  # `take_reply` adds each reply as it arrives
        survivors, failed = collector.close(), dict(self.failures)
        if self.whole and len(survivors) < len(self.members):
            raise TooFew(f"{len(survivors)} of the {len(self.members)} clients of a batch sent an update")
        self.on_survivors(survivors)
        self._ask(survivors, secagg_messages.ask_confirmation(session, survivors))
        yield
        signatures = self._signatures(roster, survivors)
        collector.take_confirmations(len(signatures))
        self._ask(signatures, secagg_messages.ask_unmasking(session, signatures))
        yield
        gave: dict[str, tuple[dict[str, bytes], dict[str, bytes]]] = {}
        for client, text in self.step.answers:
            self._take(client, text, secagg_messages.read_unmasking, gave)
        for client, (own, keys) in gave.items():
            collector.take_unmasking(client, own, keys)
        try:
            total = collector.finish()
        finally:
            self.failures |= collector.false
        self._log_late(failed)
        self.failures = failed
        self._decode(total, len(survivors))

    def _entries(self) -> dict[str, Entry]:
        """The keys that clients have sent and that others will accept."""
        terms, entries = self._collector.terms, dict[str, Entry]()
        for client, text in self.step.answers:
            read = partial(secagg_messages.read_entry, name=client, terms=terms, trust=self.trust)
            self._take(client, text, read, entries)
        for entry in repeated_keys(entries.values()):
            self.failures[entry.name] = "sent a key that another sent, or one key twice"
            del entries[entry.name]
        return entries

    def _signatures(self, roster: Roster, survivors: Sequence[str]) -> dict[str, bytes]:
        """The signatures of this list of survivors."""
        found: dict[str, bytes] = {}
        for client, text in self.step.answers:
            signed = partial(
                secagg_messages.read_signature,
                name=client,
                roster=roster,
                survivors=survivors,
                trust=self.trust,
            )
            self._take(client, text, signed, found)
        return found

    def _decode(self, total: Vector, replies: int) -> None:
        rules = rules_of(self.request, self.roster)
        sums = decode(self.layout, rules, total)
        if sums.replies != replies:
            raise TooFew("the unmasked numbers are no sum of updates: some client sent something else")
        self.sums = sums

    def _log_late(self, failed: Mapping[str, str]) -> None:
        """Log the clients that left after their update was in the sum."""
        number = self.request.round
        for client, why in self.failures.items():
            if client not in failed:
                log.warning("Round %d: client %s left before the end (%s).", number, client, quoted(why))

    def take_reply(self, client: str, reply: Reply | str) -> None:
        """Add a masked update, and free it."""
        if isinstance(reply, str):
            self.failures[client] = reply
            return
        if "epsilon" in reply.metrics:
            self.spent[client] = reply.metrics["epsilon"], reply.metrics["delta"]
        data = np.ascontiguousarray(reply.arrays[MASKED].cpu().numpy())
        bits = rules_of(self.request, self.roster).bits
        self._collector.take_vector(client, unpacked(data, self.layout.head, bits))
        reply.arrays = {}

    def _ask(self, clients: Mapping[str, object] | Sequence[str], text: str) -> None:
        self.step.questions, self.step.answers = dict.fromkeys(clients, text), []

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
    connection: Connection
    cohorts: Sequence[Cohort]
    model: Mapping[str, Tensor]
    traffic: Traffic
    patience: float  # seconds for a step without updates
    apart: bool = False  # one cohort per choice of layers: the server knows each client's layers
    without_cohorts: str = "no client sent its choice of layers"  # why there is no cohort
    failures: dict[str, str] = field(default_factory=dict)  # client: why it is not in the sum
    problem: str | None = None  # why there is no sum of any cohort
    sums: Sums | None = None
    seconds: dict[str, float] = field(default_factory=dict)  # by step
    error: float = 0.0  # largest rounding error of a mean over clients

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
        texts = {client: text for cohort in going for client, text in cohort.step.questions.items()}
        members = [member for cohort in going for member in cohort.members if member[0] in texts]
        number = going[0].request.round
        given = (number, members, texts, self.traffic, self.patience)
        for client, answer in exchange_texts(self.connection, *given):
            cohort_of[client].step.answers.append((client, answer))

    def _train(self, going: Sequence[Cohort], cohort_of: Mapping[str, Cohort]) -> None:
        if not going:
            return
        masked = {client: own for cohort in going for client, own in cohort.step.requests.items()}
        members = [member for cohort in going for member in cohort.members if member[0] in masked]
        request = going[0].request
        trip = RoundTrip(self.connection, request, self.model, self.traffic, masked=masked)
        for client, reply in trip.replies(members):
            cohort_of[client].take_reply(client, reply)

    def _close(self) -> None:
        """A cohort without a sum does not affect the others."""
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
            self.problem = "; ".join(problems) or self.without_cohorts
            return
        self.sums = added([cohort.sums for cohort in whole if cohort.sums is not None])
        slack: dict[str, float] = {}
        for cohort in whole:
            for name, part in cohort.slack.items():
                slack[name] = slack.get(name, 0.0) + part
        weights = self.sums.weights
        self.error = max((slack[name] / weights[name] for name in slack if weights[name]), default=0.0)

    @property
    def result(self) -> MaskedResult:
        groups = self.groups if self.apart else ()
        known = self.sums, self.problem, self.failures, self.roster, self.error
        return MaskedResult(*known, self.spent, self.seconds, self.noise, groups)

    @property
    def spent(self) -> dict[str, tuple[float, float]]:
        return {client: own for cohort in self.cohorts for client, own in cohort.spent.items()}

    @property
    def known(self) -> dict[str, tuple[str, ...]]:
        """The names that each client in the sum has sent, if the server knows them."""
        return {
            client: cohort.request.plan.shared
            for cohort in self.cohorts
            for client, _ in cohort.members
            if self.apart and client not in self.failures and cohort.sums is not None
        }

    @property
    def groups(self) -> list[dict[str, int]]:
        """For each cohort: how many clients started, and how many are in its sum."""
        sums = ((cohort.roster, cohort.sums.replies if cohort.sums else 0) for cohort in self.cohorts)
        return [{"cohort": began, "summed": summed} for began, summed in sums]

    @property
    def noise(self) -> dict[str, int]:
        """As `Cohort.noise`: with noise in the sum there is one cohort."""
        return self.cohorts[0].noise if len(self.cohorts) == 1 else {}

    @property
    def spoilt_by(self) -> dict[str, str]:
        return {client: why for cohort in self.cohorts for client, why in cohort.spoilt_by.items()}

    @property
    def roster(self) -> int:
        return sum(cohort.roster for cohort in self.cohorts)
