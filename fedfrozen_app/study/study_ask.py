"""A study's request to a site: JSON with a closed schema, like a census.

It names a view, the columns, the groups and the edges of the time, and nothing else: never a path or a filter
of rows. One ask has several steps: the counts by time, and for a Cox regression repeated sums at given
coefficients. People at a site approve the ask; every step is checked against it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.exchange.proposal import NAME, RUN_ID
from fedfrozen_app.exchange.strict import Spelled, canonical, read_json
from fedfrozen_app.survival.cox import TIES
from fedfrozen_app.survival.people import ALL, Columns
from fedfrozen_app.survival.risk_sums import Scale
from fedfrozen_app.survival.time_edges import check_edges

FORMAT = 1
KIND = "survival"
MOST, DEPTH, LONGEST = 5_000_000, 4, 200
MOST_LEVELS, MOST_COVARIATES, MOST_TIMES = 20, 60, 20_000
STRATA = ("none", "site")
COUNTS, COX = "counts", "cox"
MASKS = "masks"
LARGEST = 1e6  # of a coefficient or a scale: beyond it, a sum would be one person's


@dataclass(frozen=True)
class Masks:
    """The masking terms of a study's sums, as in a masked round of training."""

    min_cohort: int
    threshold: float
    neighbours: int | None

    @property
    def plain(self) -> dict[str, Any]:
        return {"min_cohort": self.min_cohort, "threshold": self.threshold, "neighbours": self.neighbours}


@dataclass(frozen=True)
class StudyAsk(Spelled):
    id: str
    columns: Columns
    view: str | None = None
    edges: tuple[float, ...] | None = None  # None: exact times
    ties: str = "efron"
    strata: str = "none"
    epsilon: float | None = None  # of the noise on every count; None: exact counts
    floor: int = 10  # for simulated sites; a real site uses its policy's
    masks: Masks | None = None

    @cached_property
    def plain(self) -> dict[str, Any]:
        columns = self.columns
        return {
            "format": FORMAT,
            "kind": KIND,
            "id": self.id,
            "view": self.view,
            "time": columns.time,
            "event": columns.event,
            "group": columns.group,
            "levels": list(columns.levels),
            "covariates": list(columns.covariates),
            "edges": None if self.edges is None else list(self.edges),
            "ties": self.ties,
            "strata": self.strata,
            "epsilon": self.epsilon,
            "floor": self.floor,
            **({} if self.masks is None else {MASKS: self.masks.plain}),  # older sites do not support masks
        }


KEYS = set(StudyAsk("x", Columns("time", "event")).plain)


def read_study(text: str) -> StudyAsk:
    """Parse an ask; if it is malformed, a `ValueError` that completes a sentence in the site's own log."""
    found = read_json(text, most=MOST, depth=DEPTH, longest=LONGEST)
    if not isinstance(found, dict) or set(found) - {MASKS} != KEYS:
        raise ValueError("it has other keys than a survival study")
    if type(found["format"]) is not int or found["format"] != FORMAT or found["kind"] != KIND:
        raise ValueError("it is of another version's format")
    if not isinstance(found["id"], str) or not RUN_ID.fullmatch(found["id"]):
        raise ValueError("id is none: small letters, digits and - make one")
    if found["view"] is not None and not (isinstance(found["view"], str) and NAME.fullmatch(found["view"])):
        raise ValueError("view is no name of a view")
    epsilon = found["epsilon"]
    if epsilon is not None and not (type(epsilon) in (int, float) and 0 < epsilon <= 1000):
        raise ValueError("epsilon is out of bounds")
    if type(found["floor"]) is not int or not 1 <= found["floor"] <= 10_000:
        raise ValueError("floor is out of bounds")
    if found["ties"] not in TIES or found["strata"] not in STRATA:
        raise ValueError(f"ties are one of {', '.join(TIES)}, strata one of {', '.join(STRATA)}")
    columns, edges = _columns(found), _edges(found["edges"])
    if epsilon is not None and (columns.covariates or edges is None):
        raise ValueError(
            "noise (epsilon) is for counts between edges: it hides neither exact times nor the sums of "
            "a Cox regression"
        )
    masks = _masks(found[MASKS]) if MASKS in found else None
    if masks is not None and edges is None:
        raise ValueError("masks are for counts between edges: exact times would name each person's time")
    how = (found["ties"], found["strata"], epsilon, found["floor"], masks)
    return StudyAsk(found["id"], columns, found["view"], edges, *how)


def _masks(found: Any) -> Masks:
    if not isinstance(found, dict) or set(found) != {"min_cohort", "threshold", "neighbours"}:
        raise ValueError("its masks have other keys")
    least, threshold, neighbours = found["min_cohort"], found["threshold"], found["neighbours"]
    if type(least) is not int or not 2 <= least <= 100_000:
        raise ValueError("the smallest cohort of its masks is none")
    if type(threshold) not in (int, float) or not 0.5 <= threshold <= 1:
        raise ValueError("the threshold of its masks is none")
    if neighbours is not None and (type(neighbours) is not int or neighbours < 2):
        raise ValueError("the neighbours of its masks are none")
    return Masks(least, float(threshold), neighbours)


def _columns(found: dict[str, Any]) -> Columns:
    levels, covariates, group = found["levels"], found["covariates"], found["group"]
    for name, items, most in (("levels", levels, MOST_LEVELS), ("covariates", covariates, MOST_COVARIATES)):
        if not isinstance(items, list) or len(items) > most or not all(map(_is_name, items)):
            raise ValueError(f"{name} are no list of names, {most} at most")
        if len(set(items)) < len(items):
            raise ValueError(f"{name} are not distinct")
    names = [found["time"], found["event"], *([group] if group is not None else []), *covariates]
    if not all(map(_is_name, names)):
        raise ValueError("a column has a name that is none")
    if group is None and levels != [ALL]:
        raise ValueError("levels need a group column")
    if group is not None and len(levels) < 2:
        raise ValueError(f"the group column {group} has one level alone: a comparison needs two")
    if len({found["time"], found["event"], *covariates}) < 2 + len(covariates):
        raise ValueError("the time, the event and each covariate are columns of their own")
    return Columns(found["time"], found["event"], group, tuple(levels), tuple(covariates))


def _is_name(item: Any) -> bool:
    return isinstance(item, str) and 0 < len(item) <= LONGEST and item.isprintable() and item == item.strip()


def _edges(found: Any) -> tuple[float, ...] | None:
    if found is None:
        return None
    if not isinstance(found, list) or not all(type(edge) in (int, float) for edge in found):
        raise ValueError("edges are no list of numbers")
    try:
        return check_edges(found)
    except UserError as error:
        raise ValueError(str(error)) from error


@dataclass(frozen=True)
class Step:
    """One step of a study. A step for counts has no other fields."""

    name: str = COUNTS
    times: tuple[float, ...] = ()
    centre: tuple[float, ...] = ()
    width: tuple[float, ...] = ()
    coefficients: tuple[float, ...] = ()

    @property
    def text(self) -> str:
        if self.name == COUNTS:
            return canonical({"step": COUNTS})
        lists = {key: list(getattr(self, key)) for key in ("times", "centre", "width", "coefficients")}
        return canonical({"step": COX, **lists})

    @property
    def scale(self) -> Scale:
        return Scale(np.array(self.centre), np.array(self.width))


def read_step(text: str, ask: StudyAsk) -> Step:
    """Parse a step; if it is not one of this study, a `ValueError` that completes a sentence."""
    found = read_json(text, most=MOST, depth=3, longest=20)
    if found == {"step": COUNTS}:
        return Step()
    if not isinstance(found, dict) or set(found) != {"step", "times", "centre", "width", "coefficients"}:
        raise ValueError("the step has other keys than one of a study")
    parts = {key: found[key] for key in ("times", "centre", "width", "coefficients")}
    sizes = {len(ask.columns.covariates)} if ask.columns.covariates else set()
    for key, items in parts.items():
        if not isinstance(items, list) or not all(
            type(one) in (int, float) and math.isfinite(one) for one in items
        ):
            raise ValueError(f"{key} are no list of numbers")
        if key != "times" and ({len(items)} != sizes or max(map(abs, items)) > LARGEST):
            raise ValueError(f"{key} do not fit the covariates")
    times = parts["times"]
    if found["step"] != COX or not 1 <= len(times) <= MOST_TIMES or any(np.diff(times) <= 0) or times[0] < 0:
        raise ValueError("the times of the step do not increase")
    if min(parts["width"]) <= 0:
        raise ValueError("a width is not above 0")
    if ask.edges is not None and not {float(time) for time in times} <= set(ask.edges[1:]):
        raise ValueError("the step counts at other times than the study's edges")
    return Step(
        COX,
        *(tuple(float(one) for one in parts[key]) for key in ("times", "centre", "width", "coefficients")),
    )
