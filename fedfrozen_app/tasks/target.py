"""`Target`: the base class of all kinds of targets, and their lookup by name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedfrozen_app.core import registry
from fedfrozen_app.core.errors import UserError

NOTHING: Mapping[str, Any] = {}
ALWAYS = ("loss",)  # measured for every kind of target


class Target:
    """A prediction target: computes loss and metrics from labels and the model's logits.

    The default is one class per row; subclasses override the differences. `settings` are part of the data
    spec: plain values that all clients share, such as the edges of time intervals.
    """

    # The metric by which rounds are compared; a row may have others.
    headline: ClassVar[str] = "accuracy"
    lower_is_better: ClassVar[bool] = False
    title: ClassVar[str] = "accuracy"  # of the headline metric, in charts and tables
    metric_names: ClassVar[tuple[str, ...]] = ("accuracy",)  # besides the loss
    has_classes: ClassVar[bool] = True  # whether a label names classes
    per_example: ClassVar[bool] = True  # whether an example's loss depends on that example alone
    intercept: ClassVar[bool] = True  # whether adding a constant to all logits changes the loss
    exact_scores: ClassVar[bool] = False  # whether bfloat16 has too few digits for its loss
    over_tokens: ClassVar[bool] = False  # whether a row has a prediction for each of its tokens
    fair: ClassVar[bool] = True  # whether predictions are evaluated by class and subgroup
    reads_pictures: ClassVar[bool] = False  # whether rows of this kind are images, unless of a table
    over_pixels: ClassVar[bool] = False  # whether an image has a prediction for each of its pixels
    by_site: ClassVar[bool] = False  # whether the report has metrics per site's test rows
    needs_reference: ClassVar[bool] = False  # whether `site_scores` compares with other rows
    time_to_event: ClassVar[bool] = False  # whether a label is (time, event observed)

    def __init__(self, settings: Mapping[str, Any] = NOTHING) -> None:
        self.settings = settings

    # The model's output -------------------------------------------------------------------------------

    def outputs(self, classes: Sequence[str]) -> int:
        """How many logits the model has for a row, or for each token."""
        return len(classes)

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """(examples,): each example's loss, independent of the rest of the batch."""
        raise NotImplementedError

    def weights(self, labels: Tensor, dtype: torch.dtype) -> Tensor | None:
        """(examples,): the weight of each in a mean; None: equal weights."""
        return None

    def batch_loss(
        self, logits: Tensor, labels: Tensor, class_weights: Tensor | None, mask: Tensor | None
    ) -> Tensor:
        """The mean loss of a batch, of which `mask` marks the real examples; 0 for padding alone."""
        each = self.losses(logits, labels)
        weight, own = mask, self.weights(labels, logits.dtype)
        if own is not None:
            weight = own if weight is None else weight * own
        if weight is None:
            return each.mean()
        if class_weights is not None and self.has_classes and labels.ndim == 1:
            weight = weight * class_weights[labels]
        return (each * weight).sum() / weight.sum().clamp(min=torch.finfo(logits.dtype).tiny)

    def predictions(self, logits: Tensor) -> Tensor:
        """The predictions from these logits, the input of `measure`."""
        return logits.argmax(dim=-1)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Probabilities of the classes, in the logits' shape."""
        return logits.softmax(dim=-1)

    def measure(self, predicted: Tensor, labels: Tensor, classes: tuple[str, ...]) -> dict[str, float]:
        """Metrics by name, without those that are undefined on these rows."""
        raise NotImplementedError

    def of_loss(self, loss: float) -> dict[str, float]:
        """Metrics that follow from the mean loss."""
        return {}

    def reference(self, logits: Tensor | None, labels: Tensor) -> Any:
        """The reference for `site_scores` of all sites, such as the censoring of training rows; `logits` are
        the model's on these rows, if available. None if there are too few rows."""
        return None

    def site_scores(self, logits: Tensor, labels: Tensor, reference: Any) -> dict[str, float]:
        """Additional metrics of one site's test rows."""
        return {}

    # Labels --------------------------------------------------------------------------------------------

    def names_in(self, label: Any) -> list[str]:
        """The classes that a row's label names."""
        return [label]

    def restricted(self, label: Any, kept: Sequence[str]) -> Any:
        """The label with these classes alone; None if the row has none of them."""
        return label if label in kept else None

    def class_names(self, named: Iterable[str], *, in_order: bool) -> tuple[str, ...]:
        """The classes, from the names in labels; `in_order`: in the given order."""
        if in_order:
            return tuple(named)
        names = set(named)
        numeric = all(re.fullmatch(r"-?\d+", name) for name in names)  # numeric order: "10" after "9"
        return tuple(sorted(names, key=int) if numeric else sorted(names))

    def numbered(self, labels: Sequence[Any], places: Mapping[str, int]) -> Any:
        """The labels as stored in the table."""
        return torch.tensor([places[str(label)] for label in labels], dtype=torch.int64)

    def label_shape(self, classes: int, tokens: int, side: int = 0) -> tuple[int, ...]:
        """The shape of one row's label; `side`: of an image, in pixels."""
        return (tokens,) if self.over_tokens else ()

    def strata(self, labels: Sequence[Any]) -> list[str]:
        """One name per row, for stratified partitions and test splits."""
        return [str(label) for label in labels]

    def mixes(self, labels: Sequence[Any]) -> list[Counter[str]]:
        """The same as counts: rows of one person are assigned together, by their most frequent name."""
        return [Counter([name]) for name in self.strata(labels)]

    def stratum_names(self, classes: tuple[str, ...], found: Iterable[str]) -> tuple[str, ...]:
        """All names of `strata`; `found`: those of the existing rows."""
        return classes

    def trivial(self, labels: Tensor) -> dict[str, float]:
        """Metrics of a constant prediction, such as the most frequent class."""
        return {}

    # From the columns of a table -----------------------------------------------------------------------

    def label_columns(self, dataset: Any) -> tuple[str, ...]:
        """The label's columns, from the settings of `dataset`."""
        if dataset.label_column is None:
            raise UserError("dataset.label_column is missing: name the column that is to be predicted.")
        return (dataset.label_column,)

    def read_label(self, cells: Sequence[Any], columns: Sequence[str], origin: str) -> Any:
        """A row's label from these cells; None where it is missing."""
        return word(cells[0])

    def chosen(self, labels: Sequence[Any], dataset: Any) -> dict[str, Any]:
        """The settings computed from training labels, such as the edges of time intervals."""
        return {}


def word(cell: Any) -> str | None:
    """A cell as the name of a class; None if it is empty."""
    cell = cell.strip() if isinstance(cell, str) else cell
    if cell is None or cell != cell or cell == "":  # NaN, a missing number, does not equal itself
        return None
    return str(int(cell)) if isinstance(cell, float) and cell.is_integer() else str(cell)


@lru_cache(maxsize=64)
def _plain(name: str) -> Target:
    found: Target = registry.find("tasks", name)()
    return found


def target_of(name: str, settings: Mapping[str, Any] = NOTHING) -> Target:
    """The kind of target of that name; a `UserError` if there is none."""
    if not settings:
        return _plain(name)
    found: Target = registry.find("tasks", name)(settings)
    return found


def metric_names() -> tuple[str, ...]:
    """The metrics of all kinds of targets, including those of installed packages."""
    measured = [metric for name in registry.names("tasks") for metric in target_of(name).metric_names]
    return tuple(dict.fromkeys([*ALWAYS, *measured]))
