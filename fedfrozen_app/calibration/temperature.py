"""Temperature scaling (Guo et al. 2017) from sums: each part computes two derivatives of its rows' loss.

With β = 1/T the negative log-likelihood of softmax(β·logits) is convex, so Newton's method finds its only
minimum; no row leaves its part.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from scipy.special import softmax

from fedfrozen_app.calibration.masked_sum import Add, plain_sum

Logits = npt.NDArray[np.float64]  # (rows, classes)
Labels = npt.NDArray[np.int64]
Sums = npt.NDArray[np.float64]  # first and second derivative of the loss with respect to β
Part = Callable[[float], Sums]
COLDEST, HOTTEST = 0.05, 20.0  # temperatures; if all rows are predicted correctly, the optimum would be 0
STEPS = 100


def part_of(logits: Logits, labels: Labels) -> Part:
    def sums(beta: float) -> Sums:
        scaled = beta * logits
        shares = softmax(scaled, axis=1)
        chosen = logits[np.arange(len(labels)), labels]
        mean = (shares * logits).sum(axis=1)
        variance = (shares * (logits - mean[:, None]) ** 2).sum(axis=1)
        return np.array([(mean - chosen).sum(), variance.sum()])

    return sums


def fit_temperature(parts: Sequence[Part], add: Add = plain_sum, rounding: float = 0.0) -> float:
    """The maximum-likelihood temperature of all rows together; `rounding`: the error of a sum."""
    low, high = 1 / HOTTEST, 1 / COLDEST
    beta = 1.0
    for _ in range(STEPS):
        gradient, curvature = add([part(beta) for part in parts])
        if gradient > 0:
            high = min(high, beta)  # the minimum lies below
        else:
            low = max(low, beta)
        if abs(gradient) <= rounding or high <= low:
            break
        step = beta - gradient / curvature if curvature > 0 else -1.0
        following = step if low < step < high else (low + high) / 2
        if abs(following - beta) <= max(1e-15 * beta, rounding / curvature if curvature > 0 else 0.0):
            break
        beta = following
    return 1 / beta
