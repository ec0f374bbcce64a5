"""Quantiles of very many clients' numbers, instead of one line per client."""

from collections.abc import Mapping
from typing import Any

LISTED = 10_000  # clients; of more, files hold quantiles in place of an entry for each client
SHARES = (0, 5, 25, 50, 75, 95, 100)  # per cent of the clients that lie below
HEAD = ["lowest", "5 % of clients below", "25 %", "median", "75 %", "95 %", "highest"]


def quantiles(values: Any) -> dict[str, float]:
    """Quantiles as p0, p5, ..., p100, ignoring NaN; empty without values."""
    import numpy as np  # lazy: pages of a finished run do without

    known = np.asarray(values, dtype=np.float64)
    known = known[~np.isnan(known)]
    if not len(known):
        return {}
    ends = np.percentile(known, SHARES).tolist()
    return {f"p{share}": round(end, 6) for share, end in zip(SHARES, ends, strict=True)}


def cells(bands: Mapping[str, float], digits: int) -> list[str]:
    """For a table below `HEAD`."""
    return [f"{bands[f'p{share}']:,.{digits}f}" for share in SHARES]
