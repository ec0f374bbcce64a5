"""A 2D U-Net (Ronneberger et al. 2015, arXiv 1505.04597) with group norm: one class per pixel.

Batch norm would keep running statistics of every site's images, and make an example's gradient depend on the
batch; group norm (Wu and He 2018, arXiv 1803.08494) does neither.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, max_pool2d

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.models.pixels import Output
from fedfrozen_app.models.spec import ModelSpec
from fedfrozen_app.models.table_models import settings_of

MOST_LEVELS = 6
GROUPS = 8


@dataclass(frozen=True)
class UnetConfig:
    model_type: str
    channels: int
    image_size: int
    num_labels: int
    width: int = 16  # channels of the first level; doubled at each further level
    levels: int = 4  # resolution levels; each halves the side


class Pair(nn.Module):
    """Two convolutions of 3x3, each with group norm and ReLU. No bias: the norm would cancel most of it."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, padding=1, bias=False)
        self.norm1 = group_norm(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = group_norm(after)

    def forward(self, features: Tensor) -> Tensor:
        features = self.norm1(self.conv1(features)).relu()
        return self.norm2(self.conv2(features)).relu()


class Up(Pair):
    """Doubles the side, and concatenates the skip connection of that level."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__(2 * after, after)
        self.rise = nn.Conv2d(before, after, 3, padding=1)

    def forward(self, features: Tensor, beside: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(torch.cat([beside, self.rise(twice(features))], dim=1))


class Unet(nn.Module):
    """Called like a transformers image classifier; logits are (batch, classes, height, width)."""

    def __init__(self, config: UnetConfig) -> None:
        super().__init__()
        self.config = config
        widths = [config.width * 2**level for level in range(config.levels)]
        self.down = nn.ModuleList(Pair(*sizes) for sizes in pairwise([config.channels, *widths]))
        self.up = nn.ModuleList(Up(*sizes) for sizes in pairwise(reversed(widths)))
        self.classifier = nn.Conv2d(config.width, config.num_labels, 1)

    def forward(self, pixel_values: Tensor) -> Output:
        features, beside = pixel_values, list[Tensor]()
        for level, pair in enumerate(self.down):
            features = pair(max_pool2d(features, 2) if level else features)
            beside.append(features)
        for up, other in zip(self.up, reversed(beside[:-1]), strict=True):
            features = up(features, other)
        return Output(self.classifier(features))


class GroupNorm(nn.GroupNorm):
    """Group norm as a layer norm of each group: torch's own has no `vmap` rule."""

    def forward(self, features: Tensor) -> Tensor:
        groups = features.unflatten(1, (self.num_groups, -1)).flatten(2)  # (batch, groups, values)
        scaled = layer_norm(groups, groups.shape[2:], eps=self.eps).view(features.shape)
        return torch.addcmul(self.bias[:, None, None], scaled, self.weight[:, None, None])


def group_norm(channels: int) -> GroupNorm:
    """Up to eight groups, of two channels at least."""
    fitting = (count for count in range(GROUPS, 1, -1) if channels % count == 0 and channels >= 2 * count)
    return GroupNorm(next(fitting, 1), channels)


def twice(pictures: Tensor) -> Tensor:
    """(..., height, width) -> (..., 2 height, 2 width): each pixel four times. Its gradient is a plain sum,
    the same in every run."""
    high, wide = pictures.shape[-2:]
    spread = pictures[..., :, None, :, None].expand(*pictures.shape[:-2], high, 2, wide, 2)
    return spread.reshape(*pictures.shape[:-2], 2 * high, 2 * wide)


def unet(spec: ModelSpec) -> Unet:
    """A U-Net for the size of the data's pictures."""
    own = settings_of("unet", spec.config, UnetConfig, ("width", "levels"))
    shape = spec.shape
    check_masks("unet", spec)
    config = UnetConfig("unet", shape.channels, shape.image_size, shape.outputs, **own)
    if config.levels > MOST_LEVELS:
        raise UserError(f"model.config.levels is {config.levels}, but must be {MOST_LEVELS} or less")
    if shape.image_size % 2 ** (config.levels - 1):
        step = 2 ** (config.levels - 1)
        raise UserError(
            f"a U-Net of {config.levels} levels halves a side {config.levels - 1} times, and these pictures "
            f"have {shape.image_size} pixels: set dataset.image_size to a multiple of {step}, or fewer "
            "model.config.levels"
        )
    return Unet(config)


def check_masks(name: str, spec: ModelSpec) -> None:
    if not spec.shape.over_pixels:
        raise UserError(
            f"the model '{name}' gives a class for each pixel: choose pictures with masks "
            "(dataset.task=segmentation), or another model"
        )
