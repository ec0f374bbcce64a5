"""Models for table rows: linear, and a multilayer perceptron.

Both read a row's numbers and its categories, one-hot encoded without the first level (the reference). One
linear layer is logistic, linear or Cox regression, by the kind of target.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.models.pixels import Output
from fedfrozen_app.models.pixels import linear as linear_on_pixels
from fedfrozen_app.models.spec import ModelSpec
from fedfrozen_app.tasks.target import target_of

MOST_LAYERS = 16


@dataclass(frozen=True)
class TableConfig:
    model_type: str
    numbers: int
    levels: tuple[int, ...]
    num_labels: int
    intercept: bool = True
    hidden_size: int = 64
    num_hidden_layers: int = 2
    dropout: float = 0.0
    reference: bool = False  # whether the first class has logit 0 and no weights

    @property
    def inputs(self) -> int:
        return self.numbers + sum(count - 1 for count in self.levels)


class TableInputs(nn.Module):
    """(batch, numbers) and (batch, columns) of level indices -> one numeric row each."""

    def __init__(self, config: TableConfig) -> None:
        super().__init__()
        self.levels = config.levels

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        parts = [numbers]
        for column, count in enumerate(self.levels):
            others = torch.arange(1, count, device=categories.device)
            parts.append((categories[:, column, None] == others).to(numbers))
        return torch.cat(parts, dim=1) if len(parts) > 1 else numbers


class TableLinear(nn.Module):
    """One linear layer. With a reference class and two classes it is logistic regression with one logit."""

    def __init__(self, config: TableConfig) -> None:
        super().__init__()
        self.config, self.inputs = config, TableInputs(config)
        outputs = config.num_labels - config.reference
        self.classifier = nn.Linear(config.inputs, outputs, bias=config.intercept)

    def forward(self, numbers: Tensor, categories: Tensor) -> Output:
        logits = self.classifier(self.inputs(numbers, categories))
        if self.config.reference:  # (batch, classes - 1) -> (batch, classes)
            logits = torch.cat([torch.zeros_like(logits[:, :1]), logits], dim=1)
        return Output(logits)


class TableMlp(nn.Module):
    """Hidden layers with ReLU, and dropout after each."""

    def __init__(self, config: TableConfig) -> None:
        super().__init__()
        self.config, self.inputs = config, TableInputs(config)
        widths = [config.inputs] + [config.hidden_size] * config.num_hidden_layers
        self.hidden = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(widths))
        self.classifier = nn.Linear(widths[-1], config.num_labels, bias=config.intercept)

    def forward(self, numbers: Tensor, categories: Tensor) -> Output:
        found = self.inputs(numbers, categories)
        for layer in self.hidden:
            found = layer(found).relu()
            if self.config.dropout:
                found = nn.functional.dropout(found, self.config.dropout, self.training)
        return Output(self.classifier(found))


def linear(spec: ModelSpec) -> nn.Module:
    """One linear layer: on a table row, or on an image's pixels."""
    if not spec.shape.is_table:
        return linear_on_pixels(spec)
    reference = spec.config.get("reference", False)
    if not isinstance(reference, bool):
        raise UserError(f"model.config.reference is {reference!r}, but must be true or false")
    kind = target_of(spec.shape.task, spec.shape.settings)
    if reference and not (kind.has_classes and kind.label_shape(1, 1) == ()):
        raise UserError(
            "model.config.reference=true needs one class for each row: leave it out for this task"
        )
    return TableLinear(TableConfig("linear", *table_sizes("linear", spec, "reference"), reference=reference))


def mlp(spec: ModelSpec) -> TableMlp:
    """A multilayer perceptron."""
    own = settings_of("mlp", spec.config, TableConfig, ("hidden_size", "num_hidden_layers", "dropout"))
    return TableMlp(TableConfig("mlp", *table_sizes("mlp", spec, *own), **own))


def table_sizes(name: str, spec: ModelSpec, *known: str) -> tuple[int, tuple[int, ...], int, bool]:
    """(numbers, levels, outputs, whether there is an intercept), from the data."""
    shape = spec.shape
    if not shape.is_table:
        raise UserError(f"the {name} model reads the rows of a table: choose dataset=table, or another model")
    if unknown := sorted(spec.config.keys() - set(known)):
        raise UserError(f"the {name} model has no setting {unknown[0]}: remove it from model.config")
    return shape.numbers, shape.levels, shape.outputs, shape.intercept


def settings_of(name: str, given: Mapping[str, Any], kind: type, keys: tuple[str, ...]) -> dict[str, Any]:
    """The model's own settings among these, checked; `dropout` is a share, all others are counts."""
    found = {}
    for key, value in given.items():
        if key not in keys:
            raise UserError(f"'{key}' is no setting of the model '{name}': choose of {', '.join(keys)}")
        share = "dropout" in key
        fits = 0 <= value < 1 if share and type(value) in (int, float) else type(value) is int and value >= 1
        if not fits or (key == "num_hidden_layers" and value > MOST_LAYERS):
            wanted = "a share below 1" if share else "a whole number of 1 or more"
            raise UserError(f"model.config.{key} is {value!r}, but must be {wanted}")
        found[key] = value
    return found
