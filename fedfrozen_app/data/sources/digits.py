"""scikit-learn's handwritten digits, which need no file."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

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
    (package,) = find_spec("sklearn").submodule_search_locations  # type: ignore[union-attr, misc]
    # Its file, and not its `load_digits`: to import scikit-learn takes as long as two rounds.
    rows = np.loadtxt(Path(package, "datasets", "data", "digits.csv.gz"), delimiter=",", dtype=np.int64)
    pixels, targets = (rows[:, :-1] * 255 // 16).astype(np.uint8).reshape(-1, 8, 8), rows[:, -1]
    pixels.flags.writeable = targets.flags.writeable = False
    return pixels, targets
