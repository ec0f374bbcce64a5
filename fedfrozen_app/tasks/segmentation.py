"""Semantic segmentation: one class per pixel."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.tasks.mask_scores import mean_scores
from fedfrozen_app.tasks.target import Target

SMOOTH = 1.0  # smoothing of the Dice loss: a class missing in an image costs little


@dataclass(frozen=True, eq=False)
class Mask:
    """An image's label: each pixel's class value, uint8 (height, width)."""

    pixels: np.ndarray
    counts: Mapping[str, int]  # pixels of each value

    def __iter__(self) -> Iterator[str]:
        return iter(self.counts)


def mask_of(pixels: np.ndarray) -> Mask:
    values, counts = np.unique(pixels, return_counts=True)
    return Mask(pixels, {str(value): int(count) for value, count in zip(values, counts, strict=True)})


class Segmentation(Target):
    """Pixelwise cross-entropy plus 1 - soft Dice, per image; measured by Dice, IoU and HD95 (mask_scores.py).

    Labels are uint8 (rows, height, width), logits (rows, classes, height, width). Class 0, of the smallest
    value in the masks, is the background: the Dice loss and the metrics leave it out.
    """

    headline, title = "dice", "Dice"
    metric_names = ("dice", "iou", "hd95")
    fair = False
    by_site = True
    reads_pictures = over_pixels = True

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        wanted = labels.long()
        pixels = functional.cross_entropy(logits, wanted, reduction="none").mean(dim=(-2, -1))
        return pixels + 1 - self._soft_dice(logits, wanted).mean(dim=-1)

    def _soft_dice(self, logits: Tensor, wanted: Tensor) -> Tensor:
        """(examples, classes without the background)"""
        shares = logits.softmax(dim=-3)[..., 1:, :, :]
        numbers = torch.arange(1, logits.shape[-3], device=logits.device)[:, None, None]
        truth = (wanted.unsqueeze(-3) == numbers).to(shares)
        both = (shares * truth).sum(dim=(-2, -1))
        return (2 * both + SMOOTH) / (shares.sum(dim=(-2, -1)) + truth.sum(dim=(-2, -1)) + SMOOTH)

    def predictions(self, logits: Tensor) -> Tensor:
        return logits.argmax(dim=-3).to(torch.uint8)

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.softmax(dim=-3)

    def measure(self, predicted: Tensor, labels: Tensor, classes: tuple[str, ...]) -> dict[str, float]:
        count = len(classes) or 1 + max(int(predicted.max()), int(labels.max()))
        return mean_scores(labels.cpu().numpy(), predicted.cpu().numpy(), range(1, count))

    def names_in(self, label: Any) -> list[str]:
        return list(label)

    def restricted(self, label: Any, kept: Sequence[str]) -> Any:
        """The unchanged label, or an error: single pixels cannot be left out."""
        if strange := [name for name in label if name not in kept]:
            raise UserError(
                f"dataset.keep_classes leaves out the mask value {strange[0]}, and a pixel has to be of some "
                "class: leave dataset.keep_classes out, or list every value."
            )
        return label

    def numbered(self, labels: Sequence[Any], places: Mapping[str, int]) -> Tensor:
        table = np.zeros(256, dtype=np.uint8)
        for name, place in places.items():
            table[int(name)] = place
        sizes = {label.pixels.shape for label in labels}
        if len(sizes) > 1:
            first, other = sorted(sizes)[:2]
            raise UserError(
                f"Some masks have {first[1]}x{first[0]} pixels, and others {other[1]}x{other[0]}: set "
                "dataset.image_size to bring all pictures and masks to one size."
            )
        if not labels:
            return torch.zeros(0, 1, 1, dtype=torch.uint8)
        return torch.from_numpy(np.stack([table[label.pixels] for label in labels]))

    def label_shape(self, classes: int, tokens: int, side: int = 0) -> tuple[int, ...]:
        return (side, side)

    def strata(self, labels: Sequence[Any]) -> list[str]:
        """The most frequent class of each image's pixels, without the background."""
        return [_most_frequent(mix) for mix in self.mixes(labels)]

    def mixes(self, labels: Sequence[Any]) -> list[Counter[str]]:
        background = min((name for label in labels for name in label), key=int, default="")
        found = [
            {name: count for name, count in label.counts.items() if name != background} for label in labels
        ]
        return [Counter(own or {background: 1}) for own in found]

    def trivial(self, labels: Tensor) -> dict[str, float]:
        """Metrics of a constant mask, of the class that gives the best result."""
        if not len(labels):
            return {}
        each = [(labels == one).double().mean(dim=(1, 2)) for one in range(1, 1 + int(labels.max()))]
        whole = [float((2 * own / (1 + own)).mean()) for own in each if own.any()]
        return {"majority_dice": max(whole) / len(whole)} if whole else {}


def _most_frequent(mix: Counter[str]) -> str:
    """The most frequent value; ties by value."""
    return min(mix, key=lambda name: (-mix[name], int(name)))
