"""Prediction sets and intervals by a threshold, and their coverage by group."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from scipy.special import log_softmax, softmax

from fedfrozen_app.census.fairness_scores import wilson

Array = npt.NDArray[Any]
BINS = 15  # of the expected calibration error


@dataclass(frozen=True)
class Rule:
    """`threshold`: the largest score in the set. A class's score is 1 - p, a number's is the absolute
    error."""

    coverage: float
    threshold: float
    temperature: float | None = None  # None for regression

    def scores(self, logits: Array, labels: Array) -> Array:
        """The score of each row's true class or number."""
        if self.temperature is None:
            return np.abs(labels - logits)
        return 1 - self.shares(logits)[np.arange(len(labels)), labels]

    def covered(self, logits: Array, labels: Array) -> Array:
        return np.asarray(self.scores(logits, labels) <= self.threshold)

    def shares(self, logits: Array) -> Array:
        return np.asarray(softmax(logits / self.temperature, axis=1))

    def sizes(self, logits: Array) -> Array:
        """The number of classes in each row's set, or the width of its interval."""
        if self.temperature is None:
            return np.full(len(logits), 2 * self.threshold)
        return (1 - self.shares(logits) <= self.threshold).sum(axis=1)


class Covering(Protocol):
    """A rule for any kind of target."""

    def covered(self, logits: Array, labels: Array) -> Array: ...

    def sizes(self, logits: Array) -> Array: ...


def groups(
    rule: Covering, logits: Array, labels: Array, columns: Mapping[str, Array], floor: int
) -> dict[str, dict[str, Any]]:
    """Rows, coverage with its 95 % interval, and mean size, by column and value. Omits small groups."""
    covered = rule.covered(logits, labels)
    sizes = rule.sizes(logits)
    found: dict[str, dict[str, Any]] = {"all": {"all": _group(covered, sizes)}}
    for name, values in columns.items():
        words = values.astype(str)
        chosen = {word: words == word for word in sorted(set(words.tolist()), key=lambda w: (len(w), w))}
        found[name] = {
            word: _group(covered[rows], sizes[rows]) for word, rows in chosen.items() if rows.sum() >= floor
        }
    return found


def _group(covered: Array, sizes: Array) -> dict[str, Any]:
    share, count = float(covered.mean()), len(covered)
    low, high = wilson(share, count)
    found = {"rows": count, "coverage": share, "low": low, "high": high}
    return found | {"size": float(sizes.mean()) if math.isfinite(float(sizes.mean())) else None}


def reliability(logits: Array, labels: Array, temperature: float) -> dict[str, float]:
    """Mean negative log-likelihood, and expected calibration error over 15 bins."""
    logs = log_softmax(logits / temperature, axis=1)
    shares = np.exp(logs)
    sure, right = shares.max(axis=1), shares.argmax(axis=1) == labels
    place = np.minimum((sure * BINS).astype(int), BINS - 1)
    error = 0.0
    for number in set(place.tolist()):
        own = place == number
        error += abs(float(sure[own].sum()) - float(right[own].sum()))
    loss = -float(logs[np.arange(len(labels)), labels].mean())
    return {"loss": loss, "ece": error / max(len(labels), 1)}


def not_exchangeable(found: Mapping[str, Mapping[str, Any]], coverage: float) -> list[str]:
    """A sentence for each group that is covered significantly less often than stated."""
    sentences = []
    for column, values in found.items():
        for value, one in values.items():
            if column != "all" and one["high"] < coverage:
                sentences.append(
                    f"{column} {value}: {one['coverage']:.0%} of {one['rows']} rows are covered, and "
                    f"{coverage:.0%} were stated. Its rows are not exchangeable with the calibration rows: "
                    "do not rely on the stated coverage there."
                )
    return sentences
