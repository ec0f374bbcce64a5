"""Multi-label classification: any number of labels per row."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fedfrozen_app.tasks.classification import f1
from fedfrozen_app.tasks.target import Target, word


class Multilabel(Target):
    """Multi-label targets, 0 or 1, (examples, classes), measured by micro and macro F1."""

    headline, title = "f1", "F1"
    metric_names = ("f1", "f1_macro")

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        every = functional.binary_cross_entropy_with_logits(logits, labels.to(logits), reduction="none")
        return every.mean(dim=1)

    def predictions(self, logits: Tensor) -> Tensor:
        return logits > 0

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()

    def measure(self, predicted: Tensor, labels: Tensor, classes: tuple[str, ...]) -> dict[str, float]:
        return {"f1": f1(predicted, labels, "micro"), "f1_macro": f1(predicted, labels, "macro")}

    def names_in(self, label: Any) -> list[str]:
        return list(label)

    def restricted(self, label: Any, kept: Sequence[str]) -> Any:
        return [one for one in label if one in kept] or None

    def numbered(self, labels: Sequence[Any], places: Mapping[str, int]) -> Any:
        table = torch.zeros(len(labels), len(places), dtype=torch.int64)
        for row, found in enumerate(labels):
            table[row, [places[label] for label in found]] = 1
        return table

    def label_shape(self, classes: int, tokens: int, side: int = 0) -> tuple[int, ...]:
        return (classes,)

    def strata(self, labels: Sequence[Any]) -> list[str]:
        """The primary label, which comes first."""
        return [str(label[0]) for label in labels]

    def trivial(self, labels: Tensor) -> dict[str, float]:
        if not len(labels):
            return {}
        each, total = int(labels.sum(dim=0).max()), int(labels.sum())
        return {"majority_f1": 2 * each / max(len(labels) + total, 1)}

    def read_label(self, cells: Sequence[Any], columns: Sequence[str], origin: str) -> Any:
        """Names separated by ";", or a list. The first is the primary label."""
        items = cells[0] if isinstance(cells[0], list) else str(cells[0] or "").split(";")
        return list(dict.fromkeys(name for item in items if (name := word(item)) is not None)) or None
