"""Random crops and flips of training pictures (`dataset.augment`), decided where rows are drawn.

A drawn example is a number: its row plus `code` times as many rows as there are. Code 0 is the picture as it
is, so that a plain row number means what it always meant. The draw alone decides what a picture looks
like, and all runners, which are given the same numbers, see the same pixels.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.table import Corpus

SHIFT = 4  # pixels each way
PLACES = 2 * SHIFT + 1
CODES = 2 * PLACES * PLACES  # a shift down, a shift to the right, and whether the picture is flipped
PICTURES = "pixel_values"


def with_codes(rows: Tensor, total: int, generator: torch.Generator) -> Tensor:
    """Row numbers of a table of `total` rows, each with a shift and a flip of its own."""
    return rows + total * torch.randint(CODES, rows.shape, generator=generator)


def taken(
    inputs: Mapping[str, Tensor], labels: Tensor, numbers: Tensor, *, augmented: bool
) -> tuple[dict[str, Tensor], Tensor]:
    """The examples with these numbers: plain rows, or where `augmented` what `with_codes` gave."""
    if not augmented:
        return {key: value[numbers] for key, value in inputs.items()}, labels[numbers]
    rows, codes = numbers % len(labels), numbers // len(labels)
    found = {key: value[rows] for key, value in inputs.items() if key != PICTURES}
    found[PICTURES] = _pictures(inputs[PICTURES], rows, codes)
    if labels.ndim == 3:  # masks move with their pictures
        return found, _pictures(labels[:, None], rows, codes)[:, 0]
    return found, labels[rows]


def _pictures(pictures: Tensor, rows: Tensor, codes: Tensor) -> Tensor:
    """(n, c, h, w), (batch,), (batch,) -> (batch, c, h, w): every pixel is read from where it comes from."""
    channels, height, width = pictures.shape[1:]
    flipped, down, right = codes // PLACES**2, codes // PLACES % PLACES, codes % PLACES
    # (batch, 1): 0 to SHIFT, then -SHIFT to -1, so that code 0 is no shift
    dy, dx = (((shift + SHIFT) % PLACES - SHIFT)[:, None] for shift in (down, right))
    y, x = (torch.arange(side, device=pictures.device)[None] for side in (height, width))
    x = torch.where(flipped[:, None] > 0, width - 1 - x, x)
    y, x = _reflected(y + dy, height), _reflected(x + dx, width)  # (batch, h), (batch, w)
    channel = torch.arange(channels, device=pictures.device)[None, :, None, None]
    return pictures[rows[:, None, None, None], channel, y[:, None, :, None], x[:, None, None, :]]


def _reflected(places: Tensor, side: int) -> Tensor:
    """What lies beyond a border mirrors what lies within; the border itself is not repeated."""
    return (side - 1) - ((side - 1) - places.abs()).abs()


def check_pictures(corpus: Corpus, augment: str) -> None:
    """A `UserError` for data that cannot be shifted and flipped."""
    if augment == "none":
        return
    if PICTURES not in corpus.train.inputs:
        raise UserError(
            f"dataset.augment={augment} shifts and flips pictures, and these data are none: set "
            "dataset.augment=none."
        )
    height, width = corpus.train.inputs[PICTURES].shape[2:]
    if min(height, width) <= SHIFT:
        raise UserError(
            f"dataset.augment={augment} shifts by up to {SHIFT} pixels, and these pictures are "
            f"{height}x{width}: set dataset.augment=none, or a larger dataset.image_size."
        )
