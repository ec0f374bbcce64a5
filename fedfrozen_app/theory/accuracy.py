"""Scores of real models by warm-up, from benchmarks/warmup.py, and how `auto` compares with fixed ones."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

AUTO, NEVER = "auto", "100 %"
CHOSEN_ON = 5  # the best fixed warm-up is chosen on seeds 0 to 4 and evaluated on the others
Scores = dict[str, dict[str, dict[int, float]]]  # setting -> warm-up -> seed -> test accuracy


@dataclass(frozen=True)
class Verdict:
    setting: str
    best: str  # fixed warm-up, chosen on the first seeds
    regret: float  # mean over the other seeds of best − auto, in points of accuracy
    behind_never: float  # mean of FedAvg − auto, in points
    stops: list[int | None]  # the rounds in which auto froze, by seed

    @property
    def passed(self) -> bool:
        return self.regret <= 1 and self.behind_never <= 1


def read_result(folder: Path, study: str) -> dict[str, Any] | None:
    """The file that `benchmarks/warmup.py STUDY` wrote; None if it was not run."""
    path = folder / f"warmup_{study}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def scores_of(cells: Iterable[Mapping[str, Any]]) -> Scores:
    scores: Scores = {}
    for cell in cells:
        scores.setdefault(cell["setting"], {}).setdefault(cell["warmup"], {})[cell["seed"]] = cell["score"]
    return scores


def evaluate(cells: Iterable[Mapping[str, Any]]) -> list[Verdict]:
    """One verdict per setting with enough seeds to choose on and to evaluate on."""
    cells = list(cells)
    verdicts = []
    for setting, by_warmup in scores_of(cells).items():
        held = [seed for seed in by_warmup.get(AUTO, {}) if seed >= CHOSEN_ON]
        if not held:
            continue
        fixed = {label: seeds for label, seeds in by_warmup.items() if label != AUTO}
        best = max(fixed, key=lambda label: fmean(v for seed, v in fixed[label].items() if seed < CHOSEN_ON))

        def behind(label: str, by_warmup: Any = by_warmup, held: Any = held) -> float:
            return 100 * fmean(by_warmup[label][seed] - by_warmup[AUTO][seed] for seed in held)

        stops = [
            cell["freeze_after"] for cell in cells if cell["setting"] == setting and cell["warmup"] == AUTO
        ]
        verdicts.append(Verdict(setting, best, behind(best), behind(NEVER), stops))
    return verdicts
