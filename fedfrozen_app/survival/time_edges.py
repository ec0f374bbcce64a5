"""The times of a study: exact, or rounded up to edges that all sites agree on before they count.

With edges, an event or a censoring in (low, high] counts at `high`, the first interval with its lower edge.
Those followed beyond the last edge are censored there. So a study on edges equals exactly one on the pooled
rows with times rounded up in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.survival.people import People

MOST_EDGES = 1000


def check_edges(edges: Sequence[float]) -> tuple[float, ...]:
    """`UserError` unless they are numbers from 0 on that increase."""
    found = tuple(float(edge) for edge in edges)
    if not 2 <= len(found) <= MOST_EDGES:
        raise UserError(f"A study counts between 2 to {MOST_EDGES} edges, and these are {len(found)}.")
    if not all(np.isfinite(found)) or found[0] < 0:
        raise UserError("The edges of the time must be numbers from 0 on.")
    for low, high in pairwise(found):
        if low >= high:
            raise UserError(f"The edges of the time must increase, and {high:g} comes after {low:g}.")
    return found


def edges_every(step: float, until: float) -> tuple[float, ...]:
    """0, step, 2·step, ... `until`."""
    if not (np.isfinite(step) and np.isfinite(until) and 0 < step <= until):
        raise UserError(
            f"--every {step:g} --until {until:g}: give a step above 0 and an end that is not below it."
        )
    if until / step > MOST_EDGES - 1:
        raise UserError(
            f"--every {step:g} --until {until:g} are more than {MOST_EDGES} edges: take a longer step."
        )
    inner = step * np.arange(int(np.ceil(until / step - 1e-9)))
    return check_edges([*inner.tolist(), until])


def read_edges(path: Path) -> tuple[float, ...]:
    """Read edges from a file: numbers separated by commas, spaces or line ends."""
    try:
        words = path.read_text(encoding="utf-8").replace(",", " ").split()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The edges in {path} cannot be read: {error}.") from error
    try:
        return check_edges([float(word) for word in words])
    except ValueError as error:
        raise UserError(
            f"{path} holds something that is no number: write the edges as 0 90 180 365."
        ) from error


def interval_of(time: np.ndarray, edges: Sequence[float]) -> np.ndarray:
    """(people,) the number of the interval (low, high] of each time; len(edges) - 1 for those beyond the
    end."""
    return np.clip(np.searchsorted(np.asarray(edges), time, side="left") - 1, 0, len(edges) - 1)


def rounded_up(people: People, edges: Sequence[float]) -> People:
    """The people with times as a study with these edges counts them."""
    cell, last = interval_of(people.time, edges), len(edges) - 1
    time = np.asarray(edges)[np.minimum(cell + 1, last)]
    return People(
        time, people.event & (cell < last), people.group, people.covariates, people.kept, people.left_out
    )
