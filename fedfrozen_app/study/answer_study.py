"""A site's answer to a step of a study, shared by simulations and real sites."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedfrozen_app.census.noised import geometric
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.privacy.keystream import Keystream
from fedfrozen_app.study.released_counts import STATUS, Memories, released_counts
from fedfrozen_app.study.released_sums import SummedPeople
from fedfrozen_app.study.site_rules import Rules, SiteRows
from fedfrozen_app.study.study_ask import COUNTS, FORMAT, Step, StudyAsk
from fedfrozen_app.survival.counts import count
from fedfrozen_app.survival.people import People, read_people
from fedfrozen_app.survival.risk_sums import likelihood, risk_sums
from fedfrozen_app.survival.time_edges import rounded_up


def answer(
    ask: StudyAsk,
    step: Step,
    rows: SiteRows,
    rules: Rules,
    memory: dict[str, Any],
    others: Memories | None = None,
) -> dict[str, Any]:
    """The answer that leaves. `memory` records what was released about this view, `others` about other views.
    `UserError` if the rows do not fit the study, or the step would reveal few people."""
    people = read_people(rows.cells, ask.columns, rules.complete)
    names = [rows.names[row] for row in people.kept]
    if len(set(names)) < len(names):
        raise UserError(
            "A person has several rows, and a study follows each person once: make one row of them."
        )
    found = {"format": FORMAT, "step": step.name, "floor": rules.floor, "epsilon": ask.epsilon}
    if ask.epsilon is not None:
        return found | _noisy(ask, people)
    if ask.edges is None:
        return found | (_exact(ask, people) if step.name == COUNTS else _sums(ask, step, people))
    return found | _between_edges(ask, step, rows, rules, people, memory, others or {})


# Exact times -----------------------------------------------------------------------------------------------


def _exact(ask: StudyAsk, people: People) -> dict[str, Any]:
    """By group: every distinct time, with its numbers of events and censored people."""
    found = count(people, np.unique(people.time), len(ask.columns.levels))
    tables = [
        {
            status: {"times": found.times[line > 0].tolist(), "people": [int(one) for one in line[line > 0]]}
            for status, line in zip(STATUS, pair, strict=True)
        }
        for pair in zip(found.events, found.censored, strict=True)
    ]
    moments = _moments(people) if ask.columns.covariates else None
    return {"people": len(people), "left_out": people.left_out, "tables": tables, "moments": moments}


def _moments(people: People) -> dict[str, Any]:
    """Sums with which the server centres and scales the covariates."""
    return {
        "people": len(people),
        "sums": people.covariates.sum(axis=0).tolist(),
        "squares": (people.covariates**2).sum(axis=0).tolist(),
    }


# Between edges ---------------------------------------------------------------------------------------------


def _between_edges(
    ask: StudyAsk,
    step: Step,
    rows: SiteRows,
    rules: Rules,
    people: People,
    memory: dict[str, Any],
    others: Memories,
) -> dict[str, Any]:
    released = released_counts(ask, rows, people, rules, memory, others)
    edges = ask.edges or ()
    summed, changed = None, False
    if released is not None and ask.columns.covariates:
        summed = SummedPeople.of(rows, people, rules, edges[0], released.times)
        changed = summed.has_few_changes(memory, others, rules.floor)
    if step.name != COUNTS:
        if summed is None or released is None:
            raise UserError("Too few people for counts are too few for sums.")
        if changed:
            raise UserError(
                "Rows of few people have changed since the last sums, or differ from those of another view's "
                "sums: those of now would reveal them."
            )
        if not set(step.times) <= set(released.times):
            raise UserError("The step has other times than those that the counts show.")
        summed.check_floor(rules.floor)
        summed.check_weights(step.scale.of(people) @ np.array(step.coefficients), step)
        summed.remember(memory)
        return _sums(ask, step, rounded_up(people, (edges[0], *step.times)))
    moments = None
    if summed is not None and not changed:
        moments = _moments(people)
        summed.remember(memory)
    tables = None if released is None else released.counts_of(ask)
    return {
        "people": None
        if tables is None
        else sum(sum(part["people"]) for pair in tables for part in pair.values()),
        "left_out": _left_out(people.left_out, rules.floor, memory),
        "tables": tables,
        "moments": moments,
    }


def _left_out(count: int, floor: int, memory: dict[str, Any]) -> int | None:
    """The published number of rows left out: unchanged until it differs by the floor; None if few people."""
    published = int(memory.get("left_out", 0))
    if abs(count - published) >= floor or "left_out" not in memory:
        memory["left_out"] = published = count
    return None if 0 < published < floor else published


def _noisy(ask: StudyAsk, people: People, stream: Keystream | None = None) -> dict[str, Any]:
    """One histogram in which each person is in one cell: two-sided geometric noise of this epsilon on each
    cell makes it epsilon-private, with delta 0. Counts may be negative: the server projects their sum, at no
    cost."""
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


def _sums(ask: StudyAsk, step: Step, people: People) -> dict[str, Any]:
    times, coefficients = np.array(step.times), np.array(step.coefficients)
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
