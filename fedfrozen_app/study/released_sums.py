"""Binned sums of covariates that may leave a site: over people who leave in whole intervals.

The intervals are those that the counts show, whatever times a step names, so that the difference of two
steps' sums is over whole intervals too. New sums are compared with earlier ones of this view and of the
site's others: in each interval no person differs, or at least `floor` people do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedfrozen_app.census.floors import DOMINANT
from fedfrozen_app.census.memory import who
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.study.released_counts import Memories
from fedfrozen_app.study.site_rules import Rules, SiteRows
from fedfrozen_app.study.study_ask import Step
from fedfrozen_app.survival.people import People
from fedfrozen_app.survival.time_edges import rounded_up

SUMS = "sums"  # in a view's memory: the people of the last sums
WIDEST = 40.0  # range of the people's coefficients · x: beyond it, a float holds only the largest terms
Place = tuple[bool, float, str]  # (event, upper edge of its interval, digest of the row)


@dataclass(frozen=True)
class SummedPeople:
    """The people over whom sums may leave."""

    names: list[str]
    rows: list[str]  # everything that studies may read of each person's row
    people: People  # with times rounded up to `times`
    times: tuple[float, ...]  # upper edges of the intervals

    @classmethod
    def of(
        cls, rows: SiteRows, people: People, rules: Rules, first: float, times: tuple[float, ...]
    ) -> SummedPeople:
        kept = people.kept.tolist()
        texts = [repr([str(rows.cells[name][row]) for name in rules.complete]) for row in kept]
        names = [rows.names[row] for row in kept]
        return cls(names, texts, rounded_up(people, (first, *times)), times)

    def places(self, key: str) -> dict[str, Place]:
        """Each person's place, by the person's keyed hash."""
        cells = zip(self.people.event.tolist(), self.people.time.tolist(), self.rows, strict=True)
        return {
            who(name, key): (event, time, who(row, key))
            for name, (event, time, row) in zip(self.names, cells, strict=True)
        }

    def check_floor(self, floor: int) -> None:
        """`UserError` unless each time has no people or at least `floor`, with and without the event."""
        for held in self.counts():
            if ((held > 0) & (held < floor)).any():
                raise UserError(
                    f"There would be sums over fewer than {floor} people: too few leave between two edges."
                )

    def check_weights(self, predicted: np.ndarray, step: Step) -> None:
        """`UserError` if a sum of this step is mostly one person's. `predicted`: coefficients · x."""
        part = "The coefficients part the people so far that a sum would be one person's."
        if len(predicted) and np.ptp(predicted) > WIDEST:
            raise UserError(part)
        weights = np.exp(predicted - predicted.max(initial=0.0))
        place = np.searchsorted(step.times, np.minimum(self.people.time, step.times[-1]))
        inside = self.people.event & (self.people.time <= step.times[-1])
        for chosen in (inside, ~inside):
            total = np.bincount(place[chosen], weights[chosen], minlength=len(step.times))
            largest = np.zeros(len(step.times))
            np.maximum.at(largest, place[chosen], weights[chosen])
            if (largest > DOMINANT * total).any():
                raise UserError(part)

    def counts(self) -> list[np.ndarray]:
        place = np.searchsorted(self.times, self.people.time)
        chosen = (self.people.event, ~self.people.event)
        return [np.bincount(place[one], minlength=len(self.times)) for one in chosen]

    def has_few_changes(self, memory: Mapping[str, Any], others: Memories, floor: int) -> bool:
        """Whether in some interval only a few people differ from the last sums of this view or another."""
        for earlier in (memory, *others.values()):
            if SUMS not in earlier:
                continue
            common = sorted(set(self.times) & set(earlier[SUMS]["times"]))
            most = max(floor, int(earlier.get("floor", floor)))
            if few_differ(earlier[SUMS]["people"], self.places(earlier["key"]), common, most):
                return True
        return False

    def remember(self, memory: dict[str, Any]) -> None:
        memory[SUMS] = {"times": list(self.times), "people": self.places(memory["key"])}


def few_differ(before: Mapping[str, Any], now: Mapping[str, Any], times: list[float], floor: int) -> bool:
    """Whether fewer than `floor` people differ in some interval between these times."""

    def seen(place: Any) -> tuple[bool, int, str] | None:
        return None if place is None else (place[0], int(np.searchsorted(times, place[1])), place[2])

    touched: dict[tuple[bool, int], int] = {}
    for person in before.keys() | now.keys():
        old, new = seen(before.get(person)), seen(now.get(person))
        if old == new:
            continue
        for cell in {one[:2] for one in (old, new) if one is not None}:
            touched[cell] = touched.get(cell, 0) + 1
    return any(count < floor for count in touched.values())
