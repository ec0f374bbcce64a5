"""A short series of random faults; the long one: `python -m tests.chaos.harness --faults 60`."""

import os
from pathlib import Path

import pytest

from tests.chaos.harness import series

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]


def test_after_every_fault_the_run_ends_with_the_bits_of_the_unbroken_one(tmp_path):
    """FEDFROZEN_CHAOS_FAULTS, _SEED, _PAUSE, _OUT: how many, which, how long a stop lasts, and where to."""
    settings = {key: os.environ.get(f"FEDFROZEN_CHAOS_{key}") for key in ("FAULTS", "SEED", "PAUSE", "OUT")}
    out = Path(settings["OUT"] or tmp_path / "chaos.jsonl")
    found = series(
        tmp_path,
        int(settings["FAULTS"] or 5),
        int(settings["SEED"] or 0),
        out,
        pause=float(settings["PAUSE"] or 60),
    )
    assert all(one["good"] for one in found), [one for one in found if not one["good"]]
