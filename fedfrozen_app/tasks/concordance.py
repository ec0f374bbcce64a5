"""Harrell's C-index."""

import numpy as np

ROWS = 2**22  # pairs at once


def harrell_c(time: np.ndarray, event: np.ndarray, risk: np.ndarray) -> float:
    """The share of comparable pairs whose order the risk predicts, ties in it counting 1/2; NaN without any
    pair.

    Two rows can be compared where the one with the shorter time had its event, or, at one time, where one of
    them had it: as lifelines' `concordance_index(time, -risk, event)`.
    """
    time, event, risk = np.asarray(time, float), np.asarray(event) > 0, np.asarray(risk, float)
    right, pairs = 0.0, 0
    had = np.flatnonzero(event)
    step = max(1, ROWS // max(len(time), 1))
    for start in range(0, len(had), step):
        rows = had[start : start + step]
        later = (time[rows, None] < time) | ((time[rows, None] == time) & ~event)
        above, same = risk[rows, None] > risk, risk[rows, None] == risk
        right += float((later & above).sum()) + 0.5 * float((later & same).sum())
        pairs += int(later.sum())
    return right / pairs if pairs else float("nan")
