"""The server's side of a masked study: it learns sums over the sites, and each site's shown edges."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np

from fedfrozen_app.core.errors import RunFailed, UserError
from fedfrozen_app.core.formatting import counted
from fedfrozen_app.secure import secagg_messages
from fedfrozen_app.secure.certified import Shown as AsShown
from fedfrozen_app.secure.roster import Terms, repeated_keys
from fedfrozen_app.secure.round_keys import Trust
from fedfrozen_app.secure.sum_up import Collector, TooFew, new_session
from fedfrozen_app.secure.vector import Vector
from fedfrozen_app.study.masked_numbers import counts_of, numbers_of, size_of, sums_of
from fedfrozen_app.study.masked_steps import (
    Shown,
    digest_of,
    edges_text,
    masked_text,
    question_text,
    read_shown,
    read_vector,
)
from fedfrozen_app.study.site_sums import SiteCounts
from fedfrozen_app.study.study_ask import COUNTS, Step, StudyAsk

T = TypeVar("T")
Answers = tuple[Mapping[str, str], Mapping[str, str]]  # texts by site, and the reasons of sites without one
# Sends each site its text, or all sites the text under ""; returns the answers.
Exchange = Callable[[Mapping[str, str]], Answers]
ALL_SITES, SUM = "", "sum"
NO_SUM = "The unmasked numbers are no sum of counts: some site sent something else."


@dataclass
class MaskedSites:
    """Sends a masked study's requests to the sites; call `edges` first."""

    ask: StudyAsk
    exchange: Exchange
    trust: Trust = field(default_factory=AsShown)
    sites: list[str] = field(default_factory=list)  # in the sums
    refused: dict[str, str] = field(default_factory=dict)
    number: int = 0  # sums so far

    def edges(self) -> dict[str, Shown]:
        """The shown edges by site; sites that give no counts are left out of the sums."""
        found, refused = self._read(
            self.exchange({ALL_SITES: edges_text()}), partial(read_shown, ask=self.ask)
        )
        if not found:
            reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
            raise RunFailed(f"No site answered the study: {reasons}.")
        self.refused |= refused
        self.sites = sorted(name for name, shown in found.items() if self._counts(shown))
        if not self.sites:
            raise RunFailed(
                "Every site has too few people for its counts to leave it: take wider edges or fewer groups."
            )
        assert self.ask.masks is not None
        if len(self.sites) < (least := self.ask.masks.min_cohort):
            raise UserError(
                f"{counted(len(self.sites), 'site')} would be in the sum, and it must be {least} "
                "(secure_aggregation.min_cohort): ask more sites, or take wider edges or fewer groups."
            )
        return found

    def _counts(self, shown: Shown) -> bool:
        return shown.times is not None and (shown.regression or not self.ask.columns.covariates)

    def counts(self, shown: Mapping[str, Shown]) -> SiteCounts:
        """The sum over the sites, at the edges that all of them show."""
        common = set.intersection(*(set(shown[name].times or ()) for name in self.sites))
        step = Step(COUNTS, tuple(sorted(common)))
        found = counts_of(self.sum(step), self.ask, step.times)
        cells = [one for pair in found.tables or () for table in pair.values() for one in table["people"]]
        if self.ask.epsilon is None and min(cells, default=0) < 0:
            raise RunFailed(NO_SUM)
        return found

    def regression(self, step: Step) -> Any:
        """One regression step. A missing site ends the regression: a sum over fewer sites would be another
        study."""
        before = list(self.sites)
        try:
            numbers = self.sum(step)
        except RunFailed as error:  # the curves are kept
            raise UserError(str(error)) from error
        if lost := sorted(set(before) - set(self.sites)):
            raise UserError(
                f"{lost[0]} is in the counts and not in the regression: {self.refused.get(lost[0])}."
            )
        return sums_of(numbers, self.ask, step)

    def sum(self, step: Step) -> np.ndarray:
        """The sum of the sites' numbers; sites that dropped out are excluded from then on."""
        assert self.ask.masks is not None
        masks, self.number = self.ask.masks, self.number + 1
        terms = (new_session(), digest_of(self.ask, step), self.number, masks.threshold, masks.neighbours)
        collector = Collector(Terms(*terms), masks.min_cohort)
        try:
            return numbers_of(self._summed(step, collector))
        except TooFew as error:
            reasons = "".join(f" {name}: {why}." for name, why in sorted(self.refused.items()))
            raise RunFailed(
                f"{str(error)[:1].upper()}{str(error)[1:]}: no sum was unmasked.{reasons}"
            ) from error

    def _summed(self, step: Step, collector: Collector) -> Vector:
        terms = collector.terms
        sent = self._ask(self.sites, secagg_messages.ask_keys(terms))
        entries = self._kept(
            sent, lambda name, text: secagg_messages.read_entry(text, name, terms, self.trust)
        )
        for entry in repeated_keys(entries.values()):
            self.refused[entry.name] = "sent a key that another sent, or one key twice"
            del entries[entry.name]
        roster = collector.take_keys(entries)
        sent = self._ask(roster.names, secagg_messages.ask_shares(roster))
        shares = self._kept(sent, lambda name, text: secagg_messages.read_envelopes(text))
        envelopes = collector.take_shares(shares)
        for name in set(shares) - set(envelopes):
            self.refused[name] = "sent shares to strangers, or not to as many as the sum's neighbours"
        size = size_of(self.ask, step)
        collector.expect(2 * size, 0)
        texts = {
            name: masked_text(step, terms.session, own, collector.present(name))
            for name, own in envelopes.items()
        }
        vectors = self._kept(self.exchange(texts), lambda name, text: read_vector(text, size))
        for name, vector in vectors.items():
            collector.take_vector(name, vector)
        survivors = collector.close()
        sent = self._ask(survivors, secagg_messages.ask_confirmation(terms.session, survivors))
        signatures = self._kept(
            sent,
            lambda name, text: secagg_messages.read_signature(text, name, roster, survivors, self.trust),
        )
        collector.take_confirmations(len(signatures))
        sent = self._ask(list(signatures), secagg_messages.ask_unmasking(terms.session, signatures))
        for name, revealed in self._kept(
            sent, lambda name, text: secagg_messages.read_unmasking(text)
        ).items():
            collector.take_unmasking(name, *revealed)
        total = collector.finish()
        self.refused |= collector.false
        self.sites = survivors
        return total

    def _ask(self, names: Sequence[str], question: str) -> Answers:
        return self.exchange(dict.fromkeys(names, question_text(question)))

    def _kept(self, answers: Answers, read: Callable[[str, str], T]) -> dict[str, T]:
        """The answers that could be parsed; records the reason for all others."""
        found: dict[str, T] = {}
        texts, refused = answers
        self.refused |= refused
        for name, text in sorted(texts.items()):
            try:
                found[name] = read(name, text)
            except ValueError as error:
                self.refused[name] = str(error)
        return found

    def _read(self, answers: Answers, read: Callable[[str], T]) -> tuple[dict[str, T], dict[str, str]]:
        found = self._kept(answers, lambda name, text: read(text))
        return found, dict(self.refused)
