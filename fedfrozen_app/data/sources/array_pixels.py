"""Pictures given as arrays, tensors or PIL images: each becomes 8-bit pixels, as a file's."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.sources.images import eight_bits

KINDS = (np.ndarray, torch.Tensor, Image.Image, bytes)
CHANNELS = (1, 3)


def as_pixels(values: Any, name: str) -> list[Any]:
    """For each row uint8 of (height, width) or (height, width, 3); None where it has none.

    Encoded pictures (bytes) stay as they are.
    """
    rows = [_picture(one, name) for one in values]
    rows = [one * np.uint8(255) if isinstance(one, np.ndarray) and one.dtype == bool else one for one in rows]
    others = [one for one in rows if isinstance(one, np.ndarray) and one.dtype != np.uint8]
    if not others:
        return rows
    low, high = min(float(one.min()) for one in others), max(float(one.max()) for one in others)
    factor = _factor(low, high, name, fractions=any(one.dtype.kind == "f" for one in others))
    return [
        (one * factor).round().astype(np.uint8)
        if isinstance(one, np.ndarray) and one.dtype != np.uint8
        else one
        for one in rows
    ]


def _picture(value: Any, name: str) -> Any:
    if value is None or isinstance(value, bytes) or (isinstance(value, float) and value != value):
        return value if isinstance(value, bytes) else None
    if isinstance(value, Image.Image):
        image = eight_bits(value, f"in column {name!r}")
        return np.asarray(image if image.mode == "L" else image.convert("RGB"))
    if not isinstance(value, (np.ndarray, torch.Tensor)):
        raise UserError(
            f"The column {name!r} holds pictures and a {type(value).__name__}: give pictures alone."
        )
    array = value.numpy(force=True) if isinstance(value, torch.Tensor) else value
    return _channels_last(array, name, first=isinstance(value, torch.Tensor))


def _channels_last(array: np.ndarray, name: str, *, first: bool) -> np.ndarray:
    """`first`: where both ends could be the channels, as torch has them."""
    if array.dtype.kind not in "uifb":
        raise UserError(f"The column {name!r} has pictures of {array.dtype}: give numbers.")
    if array.ndim == 3:
        ends = (0, 2) if first else (2, 0)
        place = next((end for end in ends if array.shape[end] in CHANNELS), None)
        if place is not None:
            array = np.moveaxis(array, place, 2)
            return array[:, :, 0] if array.shape[2] == 1 else array
    elif array.ndim == 2:
        return array
    raise UserError(
        f"The column {name!r} has pictures of shape {tuple(array.shape)}: give (height, width), or 1 or 3 "
        "channels first or last."
    )


def _factor(low: float, high: float, name: str, *, fractions: bool) -> float:
    """What makes 0 to 255 of these values."""
    range_text = f"The column {name!r} has pixels from {low:g} to {high:g}: "
    if low < 0 or low != low or high != high:
        raise UserError(
            f"{range_text}give 0 to 255, or 0 to 1 with fractions, and leave normalisation out: fedfrozen "
            "standardises pictures by itself."
        )
    if not fractions and high <= 255:
        return 1.0
    if fractions and high <= 1:
        return 255.0
    raise UserError(f"{range_text}divide them by {high:g}, or give whole numbers from 0 to 255 (uint8).")
