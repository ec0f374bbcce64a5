"""The one answer of a site to a step of a study: in one process and on a real site."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedfrozen_app.census import floors
from fedfrozen_app.census.cells import Table, lines
from fedfrozen_app.census.measure import Measurements
from fedfrozen_app.census.memory import changed_people, release, who
from fedfrozen_app.census.noised import geometric
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.privacy.keystream import Keystream
from fedfrozen_app.study.study_ask import COUNTS, FORMAT, Step, StudyAsk
from fedfrozen_app.survival.counts import count
from fedfrozen_app.survival.people import ALL, Columns, People, read_people
from fedfrozen_app.survival.risk_sums import likelihood, risk_sums
from fedfrozen_app.survival.time_edges import interval_of, rounded_up

EXACT, BINNED, NONE = "exact", "binned", "none"
MODES = (NONE, BINNED, EXACT)
STATUS = ("events", "censored")
WIDEST = 40.0  # of the linear predictors of a site's people: beyond, a sum is one person's


@dataclass(frozen=True)
class Rules:
    """What may leave, independent of who asks."""

    mode: str
    floor: int
    edges: tuple[float, ...]  # between which all is counted; a study may take some of them, with both ends
    groups: Mapping[str, tuple[str, ...]]  # columns by which curves may be drawn, with all their levels
    columns: tuple[
        str, ...
    ]  # all that a study may name; a row that lacks one of them is left out of every study


def rules_of_simulation(ask: StudyAsk) -> Rules:
    """A site without a policy gives what is asked for."""
    groups = {} if ask.columns.group is None else {ask.columns.group: ask.columns.levels}
    mode = EXACT if ask.edges is None else BINNED
    return Rules(mode, ask.floor, ask.edges or (), groups, ask.columns.names)


@dataclass(frozen=True)
class SiteRows:
    """A site's rows, and whose each one is; the names stay at the site."""

    cells: Mapping[str, Sequence[Any]]
    names: Sequence[str]  # (rows,)


def problem(ask: StudyAsk, rules: Rules) -> str | None:
    """Why this study is not answered, as the rest of a sentence."""
    if rules.mode == NONE:
        return "it takes part in no survival study"
    if ask.edges is None and rules.mode != EXACT:
        return "the study asks for exact times, and the policy gives edges alone (survival: binned)"
    for name in ask.columns.names:
        if name not in rules.columns:
            return f"the study asks for the column {name}, which the policy does not name (survival_columns)"
    group = ask.columns.group
    if group is not None and tuple(rules.groups.get(group, ())) != ask.columns.levels:
        return f"the study compares other groups of the column {group} than the policy's (survival_groups)"
    own = rules.edges
    if ask.edges is None or (rules.mode == EXACT and not own):
        return None
    if not own or not set(ask.edges) <= set(own) or (ask.edges[0], ask.edges[-1]) != (own[0], own[-1]):
        return "the study counts between other edges than the policy's (survival_edges)"
    return None


def answer(ask: StudyAsk, step: Step, rows: SiteRows, rules: Rules, memory: dict[str, Any]) -> dict[str, Any]:
    """What leaves. `memory` holds what was released of the counts. `UserError` if the rows do not fit the
    study, or the step would reveal few people."""
    people = read_people(rows.cells, ask.columns, rules.columns)
    names = [rows.names[row] for row in people.kept]
    if len(set(names)) < len(names):
        raise UserError(
            "A person has several rows, and a study follows each person once: make one row of them."
        )
    found = {"format": FORMAT, "step": step.name, "floor": rules.floor, "epsilon": ask.epsilon}
    if ask.epsilon is not None:
        return found | _noisy(ask, people)
    changed = ask.edges is not None and _few_changed(rows, people, rules, memory)
    if step.name != COUNTS:
        if changed:
            raise UserError(
                "Rows of few people have changed since the last study: sums of now would reveal them."
            )
        return found | _cox(ask, step, people, rules)
    tables = _exact(ask, people) if ask.edges is None else _released(ask, rows, people, rules, memory)
    shown = tables is not None
    few = 0 < people.left_out < rules.floor and ask.edges is not None
    return found | {
        "people": None
        if tables is None
        else sum(sum(part["people"]) for line in tables for part in line.values()),
        "left_out": None if few else people.left_out,
        "tables": tables,
        "moments": _moments(people) if shown and ask.columns.covariates and not changed else None,
    }


def _moments(people: People) -> dict[str, Any]:
    """By which the server centres and scales the covariates."""
    return {
        "people": len(people),
        "sums": people.covariates.sum(axis=0).tolist(),
        "squares": (people.covariates**2).sum(axis=0).tolist(),
    }


def _exact(ask: StudyAsk, people: People) -> list[dict[str, Any]]:
    """By group: every time there is, with its events and its censored people."""
    found = count(people, np.unique(people.time), len(ask.columns.levels))
    return [
        {
            status: {"times": found.times[line > 0].tolist(), "people": [int(one) for one in line[line > 0]]}
            for status, line in zip(STATUS, pair, strict=True)
        }
        for pair in zip(found.events, found.censored, strict=True)
    ]


# Between edges ---------------------------------------------------------------------------------------------


def tables_of(columns: Columns, people: People, edges: tuple[float, ...]) -> list[dict[str, Table]]:
    """By group the people with the event, and those without, by interval; behind the last one those who are
    followed beyond it, who are all censored there."""
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


def _released(
    ask: StudyAsk, rows: SiteRows, people: People, rules: Rules, memory: dict[str, Any]
) -> list[dict[str, Any]] | None:
    """None where some group has too few people for its counts to leave.

    All that any study may ask for is counted, between the policy's edges, and intervals that must be joined
    for one group are joined for all: else one study's counts, subtracted from another's, would part them
    again.
    """
    edges = rules.edges or ask.edges or ()
    groupings = [replace(ask.columns, group=None, levels=(ALL,))]
    groupings += [replace(ask.columns, group=name, levels=levels) for name, levels in rules.groups.items()]
    counted = {
        columns.group: tables_of(columns, read_people(rows.cells, columns, rules.columns), edges)
        for columns in groupings
    }
    tables = tuple(table for pairs in counted.values() for pair in pairs for table in pair.values())
    names = [rows.names[row] for row in people.kept]
    measured = Measurements(len(people), len(people), tables, ())
    released = release(measured, names, rules.floor, memory)["tables"]
    published = [released[table.name] for table in tables]
    if any(one is None for one in published):
        return None
    # An empty table is released as one empty interval, which says the same as many.
    filled = [one for one in published if sum(_people(one))]
    shown = set.intersection(set(ask.edges or ()), *(set(one["edges"]) for one in filled))
    times = sorted(shown - {edges[0]})
    return [
        {status: _cells(released[table.name], times) for status, table in pair.items()}
        for pair in counted[ask.columns.group]
    ]


def _people(published: floors.Published) -> list[int]:
    """By interval; those beyond the last edge are censored at it."""
    people = [int(one) for one in published["people"]]
    if published["none"] is not None:
        people[-1] += published["none"]["people"]
    return people


def _cells(published: floors.Published, times: Sequence[float]) -> dict[str, Any]:
    """The people by the upper edge of their interval, intervals joined up to these edges."""
    people, ends = _people(published), [*published["edges"][1:-1], times[-1]]
    place = np.minimum(np.searchsorted(times, ends), len(times) - 1)
    held = np.bincount(place, weights=people, minlength=len(times))
    return {"times": [float(time) for time in times], "people": [int(one) for one in held]}


def _noisy(ask: StudyAsk, people: People, stream: Keystream | None = None) -> dict[str, Any]:
    """One histogram in which each person is in one cell: two-sided geometric noise of this epsilon on each
    cell makes it epsilon-private, with delta 0. Counts may be negative: the server mends their sum, which
    costs
    nothing."""
    stream, edges = stream or Keystream(), ask.edges or ()
    rounded, times = rounded_up(people, edges), np.array(edges[1:])
    found = count(rounded, times, len(ask.columns.levels))
    both = np.stack([found.events, found.censored], axis=1)
    noised = both + geometric(both.size, float(ask.epsilon or 0), stream).reshape(both.shape)
    tables = [
        {
            status: {"times": times.tolist(), "people": line.tolist()}
            for status, line in zip(STATUS, pair, strict=True)
        }
        for pair in noised
    ]
    return {"people": None, "left_out": None, "tables": tables, "moments": None}


# Cox regression --------------------------------------------------------------------------------------------


def _cox(ask: StudyAsk, step: Step, people: People, rules: Rules) -> dict[str, Any]:
    times, coefficients = np.array(step.times), np.array(step.coefficients)
    if ask.edges is not None:
        people = rounded_up(people, (ask.edges[0], *step.times))
        _check_cells(people, times, rules.floor)
    predicted = step.scale.of(people) @ coefficients
    if len(predicted) and np.ptp(predicted) > WIDEST:
        raise UserError("The coefficients part the people so far that a sum would be one person's.")
    sums = risk_sums(people, times, step.scale, coefficients, ask.ties)
    if ask.strata == "site":
        own = likelihood(sums, coefficients)
        return {
            "value": own.value,
            "gradient": own.gradient.tolist(),
            "information": own.information.tolist(),
        }
    names = ("events", "event_covariates", "leaving", "tied")
    return {name: part.tolist() for name, part in zip(names, sums.parts, strict=True)}


def _check_cells(people: People, times: np.ndarray, floor: int) -> None:
    """Sums over the people who leave at one time, with the event or without, are sums over `floor` people or
    none."""
    place = np.searchsorted(times, people.time)
    for chosen in (people.event, ~people.event):
        held = np.bincount(place[chosen], minlength=len(times))
        if ((held > 0) & (held < floor)).any():
            raise UserError(
                f"The step asks for sums over fewer than {floor} people: its times are too fine here."
            )


def _few_changed(rows: SiteRows, people: People, rules: Rules, memory: dict[str, Any]) -> bool:
    """Whether rows of some people, and of fewer than the floor, have changed since the last study."""
    key = memory.setdefault("rows_key", secrets.token_hex(32))
    now = {
        who(rows.names[row], key): who(repr([str(rows.cells[name][row]) for name in rules.columns]), key)
        for row in people.kept.tolist()
    }
    changed = changed_people(memory.get("rows", now), now)
    if 0 < changed < rules.floor:
        return True
    memory["rows"] = now
    return False
