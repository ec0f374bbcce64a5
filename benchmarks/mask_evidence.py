"""What pages say of noise in the sum, from its rows: see `evidence`."""

import json
import statistics
from pathlib import Path
from typing import Any

from cells import table

HEAD = ["epsilon", "noise at each site", "noise in the sum", "no noise"]


class NoiseInSum:
    def __init__(self, folder: Path) -> None:
        self.setups = json.loads((folder / "sum_epsilon.json").read_text())["setups"]
        self.runs = json.loads((folder / "noise_in_sum_mtsamples.json").read_text())["runs"]

    def epsilons(self) -> str:
        """The claimed epsilon and what the sums cost, where that is closest to it."""
        head = ["clients, cohort × rounds", "stay, conspire", "claimed", "all stay", "hostile server"]
        tight = sorted(self.setups, key=lambda one: -one["real"]["hostile"] / one["epsilon"])[:6]
        return table(head, [self._line(setup) for setup in tight])

    def _line(self, setup: dict[str, Any]) -> list[str]:
        sizes = f"{setup['clients']}, {setup['cohort']} × {setup['rounds']}"
        stay = f"{setup['survivors']}, {setup['colluders']}"
        real = (f"{setup['real'][way]:.2f}" for way in ("all stay", "hostile"))
        return [sizes, stay, f"{setup['epsilon']:g}", *real]

    def within(self) -> int:
        """Set-ups in which no sum costs more than is claimed."""
        ways = ("all stay", "threshold", "colluders", "hostile")
        return sum(max(one["real"][way] for way in ways) <= one["epsilon"] for one in self.setups)

    def f1(self, way: str, epsilon: float) -> str:
        """Mean and range."""
        found = [float(value) for value in self.runs[f"{way}, epsilon {epsilon:g}"]["figures"]]
        return f"{statistics.fmean(found):.3f} ({min(found):.3f} to {max(found):.3f})"

    def scores(self) -> str:
        rows = [[f"{epsilon}", *(self.f1(way, epsilon) for way in ("site", "sum"))] for epsilon in (8, 2)]
        return table(HEAD, [[*row, none] for row, none in zip(rows, (self.f1("none", 0), ""), strict=True)])
