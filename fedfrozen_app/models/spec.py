"""The input of model sources: of built-in ones, or of those from installed packages."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fedfrozen_app.data.table import InputShape

PRETRAINED = ("checkpoint", "hub")  # sources whose weights others can load by `path`


@dataclass(frozen=True)
class ModelSpec:
    """The settings of `model`, and the shape of the data."""

    source: str  # the name in the registry
    shape: InputShape
    path: str | None = None
    model_type: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)  # the model's own settings
    dtype: str = "float32"
    seed: int = 0
    roles: str | None = None  # a file with the role table of the model
    checkpointing: bool = False  # whether activations are recomputed for gradients
    weights: bool = True  # False: only sizes matter, so no weights need be read or downloaded


# A source returns a classifier that maps `pixel_values`, or `input_ids` and `attention_mask`, to `logits`.
# Torch is seeded before the source is called, and the parameters are cast afterwards.
Source = Callable[[ModelSpec], nn.Module]
