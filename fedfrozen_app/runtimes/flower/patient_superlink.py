"""Flower's `flower-superlink` with its options, for `python -m`; but with more time for a run's process to
start.

By default it starts another process every 30 s, so that on a busy machine a run never begins.
"""

import runpy

from fedfrozen_app.core.slow_starts import allow_slow_starts
from fedfrozen_app.runtimes.flower.processes import executable

START = 300.0  # seconds

if __name__ == "__main__":
    allow_slow_starts(START)
    runpy.run_path(executable("flower-superlink"), run_name="__main__")
