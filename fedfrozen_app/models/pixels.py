"""Two models of our own that are not Transformers, called like a transformers image classifier.

Logistic regression is the floor that a Transformer should beat. The convolutional network is that of
pfl-research's CIFAR-10 benchmark, to be measured beside it: convolutions of 3x3 to 32 and 64 channels, a 2x2
maximum, dropout ¼, 128 hidden units, dropout ½; `model.config.dropout=false` leaves both out.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional

from fedfrozen_app.errors import UserError
from fedfrozen_app.models.spec import ModelSpec


@dataclass(frozen=True)
class PixelConfig:
    model_type: str
    channels: int
    image_size: int
    num_labels: int
    dropout: bool = False


class Output(NamedTuple):
    """As transformers' outputs are read, at a fraction of what one of them costs to make."""

    logits: Tensor


class LinearClassifier(nn.Module):
    """Logistic regression on raw pixels, called like a transformers image classifier."""

    def __init__(self, config: PixelConfig) -> None:
        super().__init__()
        self.config = config
        pixels = config.channels * config.image_size**2
        self.classifier = nn.Linear(pixels, config.num_labels)

    def forward(self, pixel_values: Tensor) -> Output:
        # (batch, channels, size, size) -> (batch, pixels) -> (batch, classes)
        return Output(self.classifier(pixel_values.flatten(1)))


class SimpleCnn(nn.Module):
    """Called like a transformers image classifier."""

    def __init__(self, config: PixelConfig) -> None:
        super().__init__()
        self.config = config
        side = (config.image_size - 4) // 2
        self.conv1 = nn.Conv2d(config.channels, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.hidden = nn.Linear(64 * side * side, 128)
        self.classifier = nn.Linear(128, config.num_labels)
        self.dropout = (0.25, 0.5) if config.dropout else (0.0, 0.0)

    def forward(self, pixel_values: Tensor) -> Output:
        # (batch, channels, s, s) -> (batch, 64, s - 4, s - 4) -> (batch, 16 (s - 4)²) -> (batch, classes)
        seen = self.conv2(self.conv1(pixel_values).relu()).relu()
        early, late = self.dropout
        seen = functional.max_pool2d(seen, 2)
        seen = functional.dropout(seen, early, self.training) if early else seen
        seen = self.hidden(seen.flatten(1)).relu()
        return Output(self.classifier(functional.dropout(seen, late, self.training) if late else seen))


def linear(spec: ModelSpec) -> LinearClassifier:
    return LinearClassifier(_sizes("linear", spec))


def cnn(spec: ModelSpec) -> SimpleCnn:
    dropout = spec.config.get("dropout", True)
    if not isinstance(dropout, bool):
        raise UserError(f"model.config.dropout is {dropout!r}, but must be true or false")
    return SimpleCnn(replace(_sizes("simple_cnn", spec, "dropout"), dropout=dropout))


def _sizes(name: str, spec: ModelSpec, *settings: str) -> PixelConfig:
    """Read from the data: these models have no sizes of their own to set."""
    shape = spec.shape
    if shape.task != "image":
        raise UserError(f"the {name} model reads pixels: choose another model for text data")
    if unknown := sorted(spec.config.keys() - set(settings)):
        known = f"no settings but {', '.join(settings)}" if settings else "no settings"
        raise UserError(f"the {name} model has {known}: remove {', '.join(unknown)}")
    return PixelConfig(name, shape.channels, shape.image_size, len(shape.classes))
