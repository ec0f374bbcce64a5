"""A picture of predicted and true masks for the report."""

from pathlib import Path

import numpy as np
from PIL import Image

from fedfrozen_app.files.disk import whole_file
from fedfrozen_app.report.curves import MUTED

FILE = "samples.png"
SIDE = 160  # pixels at least of a shown picture
GAP = 6
OPACITY = 0.55


def mask_picture(pictures: np.ndarray, truth: np.ndarray, guess: np.ndarray, path: Path) -> None:
    """Write a PNG with one row per picture: unchanged, with its true mask, and with the predicted one.

    `pictures`: uint8 (pictures, channels, height, width); masks: class numbers (pictures, height, width).
    """
    rows = [
        [picture, overlaid(picture, real), overlaid(picture, own)]
        for picture, real, own in zip(_coloured(pictures), truth, guess, strict=True)
    ]
    height, width = rows[0][0].shape[:2]
    factor = max(1, -(-SIDE // max(height, width)))
    high, wide = height * factor + GAP, width * factor + GAP
    sheet = np.full((len(rows) * high - GAP, 3 * wide - GAP, 3), 255, dtype=np.uint8)
    for down, row in enumerate(rows):
        for right, shown in enumerate(row):
            large = shown.repeat(factor, axis=0).repeat(factor, axis=1)
            sheet[
                down * high : down * high + height * factor, right * wide : right * wide + width * factor
            ] = large
    with whole_file(path) as part:
        Image.fromarray(sheet).save(part, format="png")


def overlaid(picture: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """(height, width, 3): each class in its own colour over the picture, the background unchanged."""
    found = picture.astype(np.float64)
    for number in np.unique(mask[mask > 0]):
        inside = mask == number
        found[inside] = (1 - OPACITY) * found[inside] + OPACITY * _colour(int(number))
    return found.round().astype(np.uint8)


def _colour(number: int) -> np.ndarray:
    text = ("#EE3377", *MUTED)[(number - 1) % (len(MUTED) + 1)]
    return np.array([int(text[place : place + 2], 16) for place in (1, 3, 5)], dtype=np.float64)


def _coloured(pictures: np.ndarray) -> np.ndarray:
    """(pictures, height, width, 3)"""
    return np.broadcast_to(pictures, (len(pictures), 3, *pictures.shape[2:])).transpose(0, 2, 3, 1)
