"""What pages say of noise in the sum, from its rows: see `evidence`."""

import json
import statistics
from pathlib import Path
from typing import Any

from cells import table

HEAD = ["epsilon", "noise at each site", "earlier shares", "noise in the sum", "no noise"]


class NoiseInSum:
    def __init__(self, folder: Path) -> None:
        self.setups = json.loads((folder / "sum_epsilon.json").read_text())["setups"]
        runs = json.loads((folder / "noise_in_sum_mtsamples.json").read_text())["runs"]
        earlier = json.loads((folder / "noise_in_sum_mtsamples_before.json").read_text())["runs"]
        self.runs = runs | {name.replace("sum", "before"): run for name, run in earlier.items()}

    def epsilons(self) -> str:
        """The claimed epsilon and what the sums cost."""
        head = ["clients, cohort × rounds", "threshold", "stay, conspire", "claimed", "all stay"]
        head += ["down to the threshold", "and colluders", "hostile server", "earlier sizing"]
        return table(head, [self._line(setup) for setup in self.setups])

    def _line(self, setup: dict[str, Any]) -> list[str]:
        sizes = f"{setup['clients']}, {setup['cohort']} × {setup['rounds']}"
        stay = f"{setup['survivors']}, {setup['colluders']}"
        claimed = [f"{setup['threshold']:.2f}", stay, f"{setup['epsilon']:g}"]
        return [sizes, *claimed, *(f"{value:.2f}" for value in setup["real"].values())]

    def within(self) -> int:
        """Set-ups in which no sum costs more than is claimed."""
        ways = ("all stay", "threshold", "colluders", "hostile")
        return sum(max(one["real"][way] for way in ways) <= one["epsilon"] for one in self.setups)

    def above_before(self) -> int:
        return sum(one["real"]["before"] > one["epsilon"] for one in self.setups)

    def _figures(self, way: str, epsilon: float) -> list[float]:
        return [float(value) for value in self.runs[f"{way}, epsilon {epsilon:g}"]["figures"]]

    def f1(self, way: str, epsilon: float) -> str:
        """Mean and range."""
        found = self._figures(way, epsilon)
        return f"{statistics.fmean(found):.3f} ({min(found):.3f} to {max(found):.3f})"

    def scores(self) -> str:
        rows = [
            [f"{epsilon}", *(self.f1(way, epsilon) for way in ("site", "before", "sum"))]
            for epsilon in (8, 2)
        ]
        rows = [[*row, self.f1("none", 0) if number == 0 else ""] for number, row in enumerate(rows)]
        return table(HEAD, rows)

    def cost(self, epsilon: float) -> str:
        """After less before: the mean, and each seed's."""
        pairs = zip(self._figures("sum", epsilon), self._figures("before", epsilon), strict=True)
        each = [after - before for after, before in pairs]
        return f"{statistics.fmean(each):+.3f} ({', '.join(f'{value:+.3f}' for value in each)})"
