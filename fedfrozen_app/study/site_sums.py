"""Validates a site's answer to a step before the server adds it up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from fedfrozen_app.exchange.strict import read_json
from fedfrozen_app.study.released_counts import STATUS
from fedfrozen_app.study.study_ask import COUNTS, FORMAT, Step, StudyAsk
from fedfrozen_app.survival.risk_sums import Likelihood, RiskSums

MOST, DEPTH, LONGEST = 50_000_000, 6, 200
MOST_COUNT, LARGEST = 2**53, 1e300
MOST_EVENTS = 1_000_000  # of a site: Efron's rule takes a step per event
HEAD = {"format", "step", "floor", "epsilon"}
SUMS = ("events", "event_covariates", "leaving", "tied")
STRATUM = ("value", "gradient", "information")


@dataclass(frozen=True)
class SiteCounts:
    floor: int
    people: int | None  # None if too few, or noised
    left_out: int | None
    tables: list[dict[str, dict[str, list[float]]]] | None  # by group; None if too few people
    moments: tuple[int, np.ndarray, np.ndarray] | None  # people, sums and sums of squares of the covariates


def read_answer(text: str, ask: StudyAsk, step: Step) -> SiteCounts | RiskSums | Likelihood:
    """Parse an answer; `ValueError` with a reason if it is malformed."""
    found = read_json(text, most=MOST, depth=DEPTH, longest=LONGEST)
    if not isinstance(found, dict) or not set(found) >= HEAD:
        raise ValueError("has other keys than an answer to a survival study")
    if found["format"] != FORMAT or found["step"] != step.name or found["epsilon"] != ask.epsilon:
        raise ValueError("answers another study, or is of another version")
    if type(found["floor"]) is not int or found["floor"] < 1:
        raise ValueError("does not say its floor")
    rest = {key: value for key, value in found.items() if key not in HEAD}
    if step.name == COUNTS:
        return _counts(rest, ask, found["floor"])
    size = len(ask.columns.covariates)
    if ask.strata == "site":
        shapes: Sequence[tuple[int, ...]] = ((), (size,), (size, size))
        return Likelihood(*_arrays(rest, STRATUM, shapes))
    times, width = len(step.times), 1 + size + size * (size + 1) // 2
    tied = times if ask.ties == "efron" else 0
    sums = RiskSums(*_arrays(rest, SUMS, ((times,), (size,), (times, width), (tied, width))))
    if (sums.events < 0).any() or (sums.leaving[:, 0] < 0).any():
        raise ValueError("has a sum below 0")
    if (sums.events != np.floor(sums.events)).any() or sums.events.sum() > MOST_EVENTS:
        raise ValueError("has events that are no count of people")
    return sums


def _counts(found: dict[str, Any], ask: StudyAsk, floor: int) -> SiteCounts:
    if set(found) != {"people", "left_out", "tables", "moments"}:
        raise ValueError("has other keys than counts")
    if not all(found[key] is None or _whole(found[key], 0) for key in ("people", "left_out")):
        raise ValueError("does not say how many people there are")
    tables, least = found["tables"], 0 if ask.epsilon is None else -MOST_COUNT
    if tables is not None and not (
        isinstance(tables, list)
        and len(tables) == len(ask.columns.levels)
        and all(isinstance(pair, dict) and set(pair) == set(STATUS) for pair in tables)
        and all(_table(table, ask, least) for pair in tables for table in pair.values())
    ):
        raise ValueError("has counts that are none")
    return SiteCounts(floor, found["people"], found["left_out"], tables, _moments(found["moments"], ask))


def _table(table: Any, ask: StudyAsk, least: int) -> bool:
    if not isinstance(table, dict) or set(table) != {"times", "people"}:
        return False
    times, people = table["times"], table["people"]
    if not (isinstance(times, list) and isinstance(people, list) and len(times) == len(people)):
        return False
    if (
        not all(map(_number, times))
        or any(low >= high for low, high in pairwise(times))
        or min(times, default=0) < 0
    ):
        return False
    if ask.edges is not None and not (set(times) <= set(ask.edges[1:]) and times[-1:] == [ask.edges[-1]]):
        return False
    return all(_whole(one, least) for one in people)


def _moments(found: Any, ask: StudyAsk) -> tuple[int, np.ndarray, np.ndarray] | None:
    if found is None:
        return None
    size = (len(ask.columns.covariates),)
    if not isinstance(found, dict) or not _whole(found.get("people"), 0):
        raise ValueError("has moments that are none")
    sums, squares = _arrays(
        {key: found[key] for key in found if key != "people"}, ("sums", "squares"), (size, size)
    )
    return found["people"], sums, squares


def _arrays(found: dict[str, Any], names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    if set(found) != set(names):
        raise ValueError("has other keys than the sums of this step")
    arrays = []
    for name, shape in zip(names, shapes, strict=True):
        try:
            array = np.array(found[name], dtype=float)
        except (TypeError, ValueError) as error:
            raise ValueError(f"has {name} that are no numbers") from error
        if shape and shape[0] == 0 and array.size == 0:
            array = array.reshape(shape)
        if array.shape != shape or not (np.abs(array) <= LARGEST).all():
            raise ValueError(f"has {name} of another shape, or not finite")
        arrays.append(array if shape else float(array))
    return arrays


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _whole(value: Any, least: int) -> bool:
    return type(value) is int and least <= value <= MOST_COUNT
