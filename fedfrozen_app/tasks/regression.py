"""Regression: one number per row."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.tasks.target import Target

QUARTERS = ("lowest quarter", "second quarter", "third quarter", "highest quarter")


class Regression(Target):
    """Squared error of the standardised label; metrics: R², and mean absolute error in the label's units."""

    headline, title = "r2", "R²"
    metric_names = ("r2", "mae")
    has_classes = fair = False
    by_site = True

    def outputs(self, classes: Sequence[str]) -> int:
        return 1

    @property
    def _mean(self) -> float:
        return float(self.settings.get("mean", 0.0))

    @property
    def _scale(self) -> float:
        return float(self.settings.get("scale", 1.0))

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        wanted = ((labels - self._mean) / self._scale).to(logits)
        return (logits[..., 0] - wanted) ** 2

    def predictions(self, logits: Tensor) -> Tensor:
        """Predictions in the label's own units."""
        return logits[..., 0].double() * self._scale + self._mean

    def probabilities(self, logits: Tensor) -> Tensor:
        raise UserError("A regression model has no probabilities: it predicts a number.")

    def measure(self, predicted: Tensor, labels: Tensor, classes: tuple[str, ...]) -> dict[str, float]:
        truth = labels.to(predicted.device).double()
        error, spread = truth - predicted.double(), truth - truth.mean()
        found = {"mae": float(error.abs().mean())}
        if (total := float((spread**2).sum())) > 0:  # R² is undefined for constant labels
            found["r2"] = 1 - float((error**2).sum()) / total
        return found

    def names_in(self, label: Any) -> list[str]:
        return []

    def class_names(self, named: Any, *, in_order: bool) -> tuple[str, ...]:
        return ()

    def numbered(self, labels: Sequence[Any], places: Mapping[str, int]) -> Tensor:
        return torch.tensor(labels, dtype=torch.float64)

    def strata(self, labels: Sequence[Any]) -> list[str]:
        """Quartiles of the labels, from the training rows."""
        edges = self.settings.get("quarters") or _quarters(labels)
        return [QUARTERS[place] for place in np.searchsorted(edges, labels, side="right")]

    def stratum_names(self, classes: tuple[str, ...], found: Iterable[str]) -> tuple[str, ...]:
        return QUARTERS

    def read_label(self, cells: Sequence[Any], columns: Sequence[str], origin: str) -> float | None:
        return number(cells[0], columns[0], origin)

    def chosen(self, labels: Sequence[Any], dataset: Any) -> dict[str, Any]:
        count, total = len(labels), float(np.sum(labels))
        mean = total / count
        square = float(np.sum((np.asarray(labels) - mean) ** 2)) / count
        if square == 0:
            raise UserError(
                f"Every train row has {mean:g} as label: there is nothing to predict; check "
                "dataset.label_column."
            )
        return {"mean": mean, "scale": square**0.5, "quarters": _quarters(labels)}


def _quarters(labels: Sequence[Any]) -> list[float]:
    return [float(edge) for edge in np.quantile(labels, [0.25, 0.5, 0.75])]


def number(cell: Any, column: str, origin: str) -> float | None:
    """A cell as a finite number; None if it is empty or a word for a missing value."""
    if cell is None or (isinstance(cell, str) and cell.strip().casefold() in MISSING):
        return None
    try:
        found = float(cell)
    except (TypeError, ValueError):
        raise UserError(
            f"{cell!r} in {origin} is no number, and column {column!r} needs one: correct the cell."
        ) from None
    if not np.isfinite(found):
        if np.isnan(found):
            return None
        raise UserError(f"{cell!r} in {origin} is not finite, and column {column!r} needs a number.")
    return found


# Missing values as written by spreadsheets and pandas, in lower case.
MISSING = {
    "",
    "nan",
    "na",
    "n/a",
    "#n/a",
    "#na",
    "<na>",
    "null",
    "nil",
    "nat",
    "?",
    "none",
    "#value!",
    "#ref!",
}
