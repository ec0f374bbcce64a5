"""Binned counts that may leave a site: no count of few people, and none that can be derived from others.

Everything that any study may request is counted, between the policy's edges, and intervals that must be
joined for one group are joined for all: otherwise the difference of two studies' counts would separate them
again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedfrozen_app.census import floors
from fedfrozen_app.census.cells import Table, lines
from fedfrozen_app.census.measure import Measurements
from fedfrozen_app.census.memory import release
from fedfrozen_app.census.overlap import problem_of_overlap
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.study.site_rules import Rules, SiteRows
from fedfrozen_app.study.study_ask import StudyAsk
from fedfrozen_app.survival.people import ALL, Columns, People, read_people
from fedfrozen_app.survival.time_edges import interval_of

STATUS = ("events", "censored")
Memories = Mapping[str, Mapping[str, Any]]  # records of what was released about the site's other views


@dataclass(frozen=True)
class Released:
    """The released part of each table, and the upper edges that all tables show."""

    tables: Mapping[str, floors.Published]
    by_group: Mapping[str | None, Sequence[Mapping[str, Table]]]
    times: tuple[float, ...]

    def counts_of(self, ask: StudyAsk) -> list[dict[str, Any]]:
        """By group, the people by time, for the edges that the study requests."""
        times = [time for time in self.times if time in (ask.edges or self.times)]
        return [
            {status: _cells(self.tables[table.name], times) for status, table in pair.items()}
            for pair in self.by_group[ask.columns.group]
        ]


def tables_of(columns: Columns, people: People, edges: tuple[float, ...]) -> list[dict[str, Table]]:
    """By group, the people with and without the event by interval; after the last interval, those followed
    beyond it, who are censored there."""
    cell = interval_of(people.time, edges)
    happened = people.event & (cell < len(edges) - 1)
    found = []
    for number, level in enumerate(columns.levels):
        pair = {}
        for status, chosen in zip(STATUS, (happened, ~happened), strict=True):
            own = np.flatnonzero(chosen & (people.group == number))
            name = "/".join([columns.time, columns.event, str(columns.group), level, status])
            pair[status] = Table(name, *lines(own, cell[own]), edges=edges, by_person=True)
        found.append(pair)
    return found


def released_counts(
    ask: StudyAsk, rows: SiteRows, people: People, rules: Rules, memory: dict[str, Any], others: Memories
) -> Released | None:
    """The released counts; None if some group has too few people. `UserError` if the site's other views have
    released counts of nearly the same people."""
    edges = rules.edges or ask.edges or ()
    groupings = [replace(ask.columns, group=None, levels=(ALL,))]
    groupings += [replace(ask.columns, group=name, levels=levels) for name, levels in rules.groups.items()]
    counted = {
        columns.group: tables_of(columns, read_people(rows.cells, columns, rules.complete), edges)
        for columns in groupings
    }
    tables = tuple(table for pairs in counted.values() for pair in pairs for table in pair.values())
    names = [rows.names[row] for row in people.kept]
    measured = Measurements(len(people), len(people), tables, ())
    before: dict[str, Any] = {key: memory[key] for key in ("key", "tables", "moments") if key in memory}
    before = deepcopy(before)
    released = release(measured, names, rules.floor, memory)["tables"]
    if reason := problem_of_overlap(before, memory, names, others, rules.floor):
        raise UserError(reason)
    if any(released[table.name] is None for table in tables):
        return None
    # An empty table is released as one empty interval, which carries the same information as many.
    filled = [one for table in tables if sum(_people(one := released[table.name]))]
    shown = set.intersection(set(edges), *(set(one["edges"]) for one in filled))
    return Released(released, counted, tuple(sorted(shown - {edges[0]})))


def _people(published: floors.Published) -> list[int]:
    """People by interval; those beyond the last edge are censored at it."""
    people = [int(one) for one in published["people"]]
    if published["none"] is not None:
        people[-1] += published["none"]["people"]
    return people


def _cells(published: floors.Published, times: Sequence[float]) -> dict[str, Any]:
    """The people by the upper edge of their interval, with intervals joined up to these edges."""
    people, ends = _people(published), [*published["edges"][1:-1], times[-1]]
    place = np.minimum(np.searchsorted(times, ends), len(times) - 1)
    held = np.bincount(place, weights=people, minlength=len(times))
    return {"times": [float(time) for time in times], "people": [int(one) for one in held]}
