"""Metrics of predictions: accuracy, F1, AUROC, calibration, and intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

BINS = 10  # of confidence, in the reliability diagram
SURE = 1.959963984540054  # of a normal distribution: 95 %


@dataclass(frozen=True)
class Predictions:
    """Predictions and labels. With several labels per row both are (rows, classes), the labels as 0 and 1."""

    probabilities: np.ndarray  # (rows, classes)
    labels: np.ndarray  # (rows,) or (rows, classes)
    people: np.ndarray  # (rows,)

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: np.ndarray) -> Predictions:
        return Predictions(self.probabilities[rows], self.labels[rows], self.people[rows])

    @property
    def several(self) -> bool:
        return self.labels.ndim > 1

    @property
    def truth(self) -> np.ndarray:
        """(rows, classes) of 0 and 1."""
        if self.several:
            return self.labels.astype(bool)
        return self.labels[:, None] == np.arange(self.probabilities.shape[1])[None]

    @property
    def predicted(self) -> np.ndarray:
        """(rows, classes) of 0 and 1: what the model predicts."""
        if self.several:
            return self.probabilities > 0.5
        return self.probabilities.argmax(axis=1)[:, None] == np.arange(self.probabilities.shape[1])[None]

    @property
    def right(self) -> np.ndarray:
        """(rows,): whether all predictions for a row are right."""
        return (self.truth == self.predicted).all(axis=1)


def compute_metrics(predictions: Predictions) -> dict[str, float]:
    """Metrics by name; undefined ones are left out. Within one class accuracy is recall: macro F1, AUROC and
    calibration need rows of several classes."""
    found = {
        "rows": len(predictions),
        "people": len(np.unique(predictions.people)),
        "accuracy": float(predictions.right.mean()),
    }
    if not predictions.several and len(np.unique(predictions.labels)) < 2:
        return found
    found |= {"f1": macro_f1(predictions), "ece": calibration_error(predictions)}
    area = auroc(predictions)
    return found if area is None else found | {"auroc": area}


def macro_f1(predictions: Predictions) -> float:
    """The mean over the classes that occur in labels or predictions."""
    truth, predicted = predictions.truth, predictions.predicted
    hits = (truth & predicted).sum(axis=0)
    both = truth.sum(axis=0) + predicted.sum(axis=0)
    present = both > 0
    return float((2 * hits[present] / both[present]).mean()) if present.any() else 0.0


def auroc(predictions: Predictions) -> float | None:
    """One-vs-rest AUROC, averaged over the classes with positive and negative rows (Mann and Whitney)."""
    from scipy.stats import rankdata

    areas = []
    for scores, truth in zip(predictions.probabilities.T, predictions.truth.T, strict=True):
        positive, negative = int(truth.sum()), int((~truth).sum())
        if positive and negative:
            ranks = rankdata(scores)[truth].sum()
            areas.append((ranks - positive * (positive + 1) / 2) / (positive * negative))
    return float(np.mean(areas)) if areas else None


def reliability(predictions: Predictions, bins: int = BINS) -> list[dict[str, float]]:
    """Per confidence bin: rows, mean confidence, and accuracy."""
    if predictions.several:
        confidence = np.maximum(predictions.probabilities, 1 - predictions.probabilities).reshape(-1)
        right = (predictions.truth == predictions.predicted).reshape(-1)
    else:
        confidence, right = predictions.probabilities.max(axis=1), predictions.right
    place = np.clip((confidence * bins).astype(int), 0, bins - 1)
    rows = np.bincount(place, minlength=bins)
    return [
        {
            "from": number / bins,
            "rows": int(rows[number]),
            "confidence": float(confidence[place == number].mean()),
            "right": float(right[place == number].mean()),
        }
        for number in range(bins)
        if rows[number]
    ]


def calibration_error(predictions: Predictions, bins: int = BINS) -> float:
    """Expected calibration error (Guo et al. 2017): the mean gap between confidence and accuracy."""
    found = reliability(predictions, bins)
    total = sum(part["rows"] for part in found)
    return sum(part["rows"] * abs(part["right"] - part["confidence"]) for part in found) / max(total, 1)


# How sure -------------------------------------------------------------------------------------------------


def wilson(share: float, count: float) -> tuple[float, float]:
    """The 95 % interval of a proportion of `count` rows (Wilson 1927)."""
    if not count:
        return 0.0, 1.0
    square = SURE**2
    middle = (share + square / (2 * count)) / (1 + square / count)
    half = SURE * math.sqrt(share * (1 - share) / count + square / (4 * count**2)) / (1 + square / count)
    return max(0.0, middle - half), min(1.0, middle + half)


def newcombe(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    """The 95 % interval of the difference of two proportions, each (share, count) (Newcombe 1998, method
    10)."""
    (low1, high1), (low2, high2) = wilson(*one), wilson(*other)
    gap = one[0] - other[0]
    below = math.sqrt((one[0] - low1) ** 2 + (high2 - other[0]) ** 2)
    above = math.sqrt((high1 - one[0]) ** 2 + (other[0] - low2) ** 2)
    return gap - below, gap + above


def bootstrap(predictions: Predictions, times: int, seed: int = 0) -> dict[str, tuple[float, float]]:
    """95 % bootstrap intervals of all metrics; people are resampled, each with all of their rows."""
    rng = np.random.default_rng(seed)
    order = np.argsort(predictions.people, kind="stable")
    starts = np.unique(predictions.people[order], return_index=True)[1]
    rows = np.split(order, starts[1:])
    drawn: dict[str, list[float]] = {}
    for _ in range(times):
        chosen = rng.integers(len(rows), size=len(rows))
        for name, value in compute_metrics(
            predictions.take(np.concatenate([rows[one] for one in chosen]))
        ).items():
            drawn.setdefault(name, []).append(value)
    return {
        name: (float(np.quantile(values, 0.025)), float(np.quantile(values, 0.975)))
        for name, values in drawn.items()
        if name not in ("rows", "people")
    }
