"""Built-in models other than Transformers, called like a transformers image classifier.

Logistic regression is the baseline that a Transformer should beat. The convolutional networks are those of
published CIFAR-10 benchmarks, for comparison. `model.config.dropout=false` trains without dropout.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.models.spec import ModelSpec


@dataclass(frozen=True)
class PixelConfig:
    model_type: str
    channels: int
    image_size: int
    num_labels: int
    dropout: bool = False


class Output(NamedTuple):
    """A model output with transformers' attributes, at a fraction of the cost of creating one."""

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
    """The CNN of pfl-research: convolutions of 3x3 to 32 and 64 channels, a 2x2 maximum, dropout ¼, 128
    hidden units, dropout ½."""

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


class LeNet(nn.Module):
    """The CNN of NIID-Bench and of Flower's baseline of it: convolutions of 5x5 to 6 and 16 channels, each
    with a 2x2 maximum, 120 and 84 hidden units."""

    def __init__(self, config: PixelConfig) -> None:
        super().__init__()
        self.config = config
        side = ((config.image_size - 4) // 2 - 4) // 2
        self.conv1 = nn.Conv2d(config.channels, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.hidden1 = nn.Linear(16 * side * side, 120)
        self.hidden2 = nn.Linear(120, 84)
        self.classifier = nn.Linear(84, config.num_labels)

    def forward(self, pixel_values: Tensor) -> Output:
        # (batch, channels, 32, 32) -> (batch, 6, 14, 14) -> (batch, 16, 5, 5) -> (batch, classes)
        seen = functional.max_pool2d(self.conv1(pixel_values).relu(), 2)
        seen = functional.max_pool2d(self.conv2(seen).relu(), 2)
        return Output(self.classifier(self.hidden2(self.hidden1(seen.flatten(1)).relu()).relu()))


class ModerateCnn(nn.Module):
    """The CNN of NVFLARE's CIFAR-10 examples: three pairs of 3x3 convolutions, each with a 2x2 maximum, twice
    512 hidden units; dropout of whole channels after the second pair, and of units around the hidden ones."""

    def __init__(self, config: PixelConfig) -> None:
        super().__init__()
        self.config = config
        widths = (config.channels, 32, 64, 128, 128, 256, 256)
        for number, (before, after) in enumerate(pairwise(widths), start=1):
            self.add_module(f"conv{number}", nn.Conv2d(before, after, 3, padding=1))
        self.hidden1 = nn.Linear(256 * (config.image_size // 8) ** 2, 512)
        self.hidden2 = nn.Linear(512, 512)
        self.classifier = nn.Linear(512, config.num_labels)
        self.dropout = (0.05, 0.1) if config.dropout else (0.0, 0.0)

    def forward(self, pixel_values: Tensor) -> Output:
        # (batch, channels, 32, 32) -> (batch, 64, 16, 16) -> (batch, 128, 8, 8) -> (batch, 256, 4, 4)
        seen, (early, late) = pixel_values, self.dropout
        for first in (1, 3, 5):
            for number in (first, first + 1):
                seen = self.get_submodule(f"conv{number}")(seen).relu()
            seen = functional.max_pool2d(seen, 2)
            if first == 3 and early:
                seen = functional.dropout2d(seen, early, self.training)
        seen = seen.flatten(1)
        seen = functional.dropout(seen, late, self.training) if late else seen
        seen = self.hidden2(self.hidden1(seen).relu()).relu()
        return Output(self.classifier(functional.dropout(seen, late, self.training) if late else seen))


def linear(spec: ModelSpec) -> LinearClassifier:
    return LinearClassifier(_sizes("linear", spec))


def cnn(spec: ModelSpec) -> SimpleCnn:
    return SimpleCnn(_with_dropout("simple_cnn", spec))


def lenet(spec: ModelSpec) -> LeNet:
    return LeNet(_sizes("lenet", spec, smallest=16))


def moderate_cnn(spec: ModelSpec) -> ModerateCnn:
    return ModerateCnn(_with_dropout("moderate_cnn", spec, smallest=8))


def _with_dropout(name: str, spec: ModelSpec, smallest: int = 1) -> PixelConfig:
    dropout = spec.config.get("dropout", True)
    if not isinstance(dropout, bool):
        raise UserError(f"model.config.dropout is {dropout!r}, but must be true or false")
    return replace(_sizes(name, spec, "dropout", smallest=smallest), dropout=dropout)


def _sizes(name: str, spec: ModelSpec, *settings: str, smallest: int = 1) -> PixelConfig:
    """Sizes from the data: these models have no size settings."""
    shape = spec.shape
    if shape.over_pixels:
        raise UserError(
            f"the {name} model gives one answer for a picture, and no mask: choose model=unet or "
            "model=vit_segmenter"
        )
    if not shape.is_pictures:
        raise UserError(f"the {name} model reads pixels: choose another model for text data")
    if unknown := sorted(spec.config.keys() - set(settings)):
        known = f"no settings but {', '.join(settings)}" if settings else "no settings"
        raise UserError(f"the {name} model has {known}: remove {', '.join(unknown)}")
    if shape.image_size < smallest:
        raise UserError(
            f"the {name} model needs pictures of {smallest} pixels a side, and these have {shape.image_size}"
            f": set dataset.image_size={smallest} or more"
        )
    return PixelConfig(name, shape.channels, shape.image_size, len(shape.classes))
