"""What is asked of whatever builds a model: a built-in source, or one that an installed package brings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fedfrozen_app.data.table import InputShape

PRETRAINED = ("checkpoint", "hub")  # sources whose weights others can load by `path`


@dataclass(frozen=True)
class ModelSpec:
    """The settings of `model`, and what the data look like."""

    source: str  # the name in the registry
    shape: InputShape
    path: str | None = None
    model_type: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)  # the model's own settings
    dtype: str = "float32"
    seed: int = 0
    roles: str | None = None  # a file with the role table of the model
    checkpointing: bool = False  # whether activations are computed again when gradients need them
    weights: bool = True  # False: sizes alone matter, so nothing need be read or downloaded


# A source gives a classifier. Called with `pixel_values`, or with `input_ids` and `attention_mask`, this
# answers with `logits`. Torch is seeded before the source is called, and the parameters are cast afterwards.
Source = Callable[[ModelSpec], nn.Module]
