"""Masked sums over the parts of a simulated federation: every step of a masked round's protocol, with new
session keys for each sum.

Each part's rounding error of a number is at most `ERROR`; counts are exact.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fedfrozen_app.config import SecureAggregationConfig
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.exchange.strict import hash_of
from fedfrozen_app.secure import client, secagg_messages
from fedfrozen_app.secure.client import Session
from fedfrozen_app.secure.roster import Roster, Terms
from fedfrozen_app.secure.round_keys import OnSight, Simulated, new_seed
from fedfrozen_app.secure.sum_up import Collector, TooFew, new_session
from fedfrozen_app.secure.vector import Vector
from fedfrozen_app.study.masked_numbers import ERROR, numbers_of, vector_of

Numbers = npt.NDArray[np.float64]
Add = Callable[[Sequence[Numbers]], Numbers]  # the parts' numbers -> their sum


def plain_sum(parts: Sequence[Numbers]) -> Numbers:
    return np.asarray(np.stack(parts).sum(axis=0), dtype=np.float64)


@dataclass
class MaskedSum:
    """Adds the numbers of all these parts."""

    names: Sequence[str]
    settings: SecureAggregationConfig
    done: int = 0  # sums so far

    @property
    def rounding(self) -> float:
        """The largest rounding error of a sum."""
        return len(self.names) * ERROR

    @cached_property
    def _identities(self) -> Mapping[str, Simulated]:
        return {name: Simulated(new_seed()) for name in self.names}

    def __call__(self, parts: Sequence[Numbers]) -> Numbers:
        self.done += 1
        own = self.settings
        request = hash_of({"calibration": self.done, "numbers": len(parts[0])})
        terms = Terms(new_session(), request, self.done, own.threshold, own.neighbours)
        vectors = {
            name: vector_of(np.asarray(numbers, dtype=np.float64))
            for name, numbers in zip(self.names, parts, strict=True)
        }
        try:
            total = self._summed(vectors, Collector(terms, own.min_cohort))
        except TooFew as error:
            raise UserError(
                f"{error} (secure_aggregation.min_cohort={own.min_cohort}): calibrate with --rows server."
            ) from error
        return numbers_of(total)

    def _summed(self, vectors: Mapping[str, Vector], collector: Collector) -> Vector:
        trust, terms = OnSight(), collector.terms
        sessions: dict[str, Session] = {}

        def answers(names: Sequence[str], question: str) -> dict[str, str]:
            step, found = secagg_messages.read_question(question), {}
            for name in names:
                state = (sessions.get(name), self._identities[name], trust, self.settings.min_cohort)
                sessions[name], found[name] = secagg_messages.answer_step(step, name, *state)
            return found

        sent = answers(self.names, secagg_messages.ask_keys(terms))
        entries = {name: secagg_messages.read_entry(text, name, terms, trust) for name, text in sent.items()}
        roster = collector.take_keys(entries)
        sent = answers(roster.names, secagg_messages.ask_shares(roster))
        envelopes = collector.take_shares(
            {name: secagg_messages.read_envelopes(text) for name, text in sent.items()}
        )
        collector.expect(len(vectors[self.names[0]].head), 0)
        for name, own in envelopes.items():
            session = client.open_envelopes(sessions[name], own, collector.present(name))
            sessions[name] = client.mask(session, vectors[name])
            collector.take_vector(name, vectors[name])
        survivors = collector.close()
        self._unmask(collector, roster, answers, survivors)
        return collector.finish()

    @staticmethod
    def _unmask(
        collector: Collector,
        roster: Roster,
        answers: Callable[[Sequence[str], str], dict[str, str]],
        survivors: Sequence[str],
    ) -> None:
        session, trust = collector.terms.session, OnSight()
        sent = answers(survivors, secagg_messages.ask_confirmation(session, survivors))
        signatures = {
            name: secagg_messages.read_signature(text, name, roster, survivors, trust)
            for name, text in sent.items()
        }
        collector.take_confirmations(len(signatures))
        for name, text in answers(survivors, secagg_messages.ask_unmasking(session, signatures)).items():
            collector.take_unmasking(name, *secagg_messages.read_unmasking(text))
