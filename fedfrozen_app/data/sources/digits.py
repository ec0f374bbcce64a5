"""scikit-learn's handwritten digits, which need no file."""

from __future__ import annotations

from functools import cache

import numpy as np

from fedfrozen_app.data.sources.raw_rows import DatasetSpec, Found, Rows, reads

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@reads("classification", path=False)
def read_digits(spec: DatasetSpec) -> Found:
    """scikit-learn's 1797 digits."""
    pixels, targets = _digits()
    labels: list[str | None] = [str(target) for target in targets]
    origins = [f"digit {row}" for row in range(len(labels))]
    if spec.kind == "digit_words":  # for models that read the class names
        labels = [WORDS[target] for target in targets]
        return Found("image", Rows(list(pixels), labels, {}, origins), None, WORDS)
    return Found("image", Rows(list(pixels), labels, {}, origins), None)


@cache  # of the runs of a sweep each asks for them
def _digits() -> tuple[np.ndarray, np.ndarray]:
    """Pictures and what they show. Their 0..16 become 0..255 as value * 255 // 16."""
    from sklearn.datasets import load_digits  # lazy: only this reader needs scikit-learn

    images, targets = load_digits(return_X_y=True)
    pixels = (images.astype(np.int64) * 255 // 16).astype(np.uint8).reshape(-1, 8, 8)
    pixels.flags.writeable = targets.flags.writeable = False
    return pixels, targets
