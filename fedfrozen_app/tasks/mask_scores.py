"""Segmentation metrics: Dice, intersection over union (IoU) and the 95 % Hausdorff distance.

Empty masks: an image in which neither mask has the class is left out of that class's mean. If only one mask
has it, Dice and IoU are 0, and the distance is the image's diagonal.
"""

from collections.abc import Iterable

import numpy as np

PERCENT = 95


def dice(truth: np.ndarray, guess: np.ndarray) -> float:
    """2 |A and B| / (|A| + |B|) of two boolean masks; NaN if both are empty."""
    total = int(truth.sum()) + int(guess.sum())
    return 2 * int((truth & guess).sum()) / total if total else float("nan")


def iou(truth: np.ndarray, guess: np.ndarray) -> float:
    """|A and B| / |A or B| of two boolean masks; NaN if both are empty."""
    union = int((truth | guess).sum())
    return int((truth & guess).sum()) / union if union else float("nan")


def hd95(truth: np.ndarray, guess: np.ndarray) -> float:
    """The larger of both directions' 95th percentile of distances from border to border, in pixels.

    A mask's border are its pixels with a neighbour (above, below, left, right) outside the mask or the image.
    """
    if not truth.any() and not guess.any():
        return float("nan")
    if not truth.any() or not guess.any():
        return float(np.hypot(*truth.shape))
    from scipy.ndimage import distance_transform_edt

    first, second = border(truth), border(guess)
    there, back = distance_transform_edt(~second)[first], distance_transform_edt(~first)[second]
    return float(max(np.percentile(there, PERCENT), np.percentile(back, PERCENT)))


def border(mask: np.ndarray) -> np.ndarray:
    """The border pixels of a mask (height, width)."""
    around = np.pad(mask, 1)
    inside = around[:-2, 1:-1] & around[2:, 1:-1] & around[1:-1, :-2] & around[1:-1, 2:]
    return mask & ~inside


def mean_scores(truth: np.ndarray, guess: np.ndarray, classes: Iterable[int]) -> dict[str, float]:
    """Metrics of masks of class numbers, (images, height, width): each class's mean over images, and the mean
    of classes. A metric that is undefined on all images is left out."""
    found: dict[str, list[float]] = {"dice": [], "iou": [], "hd95": []}
    for one in classes:
        pairs = [(real == one, own == one) for real, own in zip(truth, guess, strict=True)]
        pairs = [(real, own) for real, own in pairs if real.any() or own.any()]
        if pairs:
            for name, measure in (("dice", dice), ("iou", iou), ("hd95", hd95)):
                found[name].append(float(np.mean([measure(*pair) for pair in pairs])))
    return {name: float(np.mean(values)) for name, values in found.items() if values}
