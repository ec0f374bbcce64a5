"""Drawn studies, the same on every machine: what the tests and `record_lifelines.py` compute on."""

import numpy as np

CASES = 200
SITES = ("A", "B", "C", "D")


def study(seed: int) -> dict[str, np.ndarray]:
    """Rows of four sites, of which D has no event. Times are whole days in every other study: they tie."""
    draw = np.random.default_rng(seed)
    count = int(draw.integers(60, 160))
    age, marker = draw.normal(60, 10, count), draw.normal(size=count)
    arm, site = draw.integers(0, 2, count), draw.integers(0, len(SITES), count)
    hazard = 0.01 * np.exp(0.03 * (age - 60) + 0.5 * marker - 0.4 * arm)
    death, end = draw.exponential(1 / hazard), draw.exponential(120, count)
    time, event = np.minimum(death, end), (death <= end) & (site != 3)
    if seed % 2 == 0:
        time = np.ceil(time / 15)
    return {"time": time, "event": event.astype(int), "arm": arm, "site": site, "age": age, "marker": marker}
