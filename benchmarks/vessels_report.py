"""The table of benchmarks/vessels.py, from its rows."""

import json
import statistics
from itertools import pairwise
from pathlib import Path

from cells import table
from flamby_report import interval

ARMS = {"federated": "FedAvg", "pooled": "pooled training", "alone": "each site alone"}
SITES = {"drive": "DRIVE", "chase": "CHASE_DB1"}
LEFT = 0.1  # Dice of a model that no longer calls all pixels background
HEAD = ["trained", "test pictures", "seeds", "Dice", "less FedAvg, paired"]


def first_above(dice: list[float]) -> int | None:
    """The first round after the initial model."""
    return next((number for number, value in enumerate(dice) if number and value > LEFT), None)


class Vessels:
    """Dice by arm, site and seed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        file, self.by = folder / "vessels.jsonl", dict[tuple[str, str], dict[int, float]]()
        for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
            row = json.loads(line)
            for site, scores in row["sites"].items():
                self.by.setdefault((row["arm"], site), {})[row["seed"]] = scores["dice"]

    def dice(self, arm: str, site: str) -> str:
        values = list(self.by[arm, site].values())
        spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
        return f"{statistics.fmean(values):.3f}{spread}"

    def less(self, arm: str, site: str) -> str:
        own, base = self.by[arm, site], self.by["federated", site]
        return interval([value - base[seed] for seed, value in own.items() if seed in base])

    def table(self) -> str:
        rows = []
        for arm, title in ARMS.items():
            for site, name in SITES.items():
                if (arm, site) in self.by:
                    less = "" if arm == "federated" else self.less(arm, site)
                    seeds = str(len(self.by[arm, site]))
                    rows.append([title, name, seeds, self.dice(arm, site), less])
        return table(HEAD, rows)

    def worst(self) -> str:
        """The run with the lowest Dice, which a mean over five seeds hides."""
        arm, site, seed = min(
            ((arm, site, seed) for (arm, site), own in self.by.items() for seed in own),
            key=lambda place: self.by[place[:2]][place[2]],
        )
        value = self.by[arm, site][seed]
        return (
            f"The lowest of all: {ARMS[arm]}, seed {seed}, on {SITES[site]}: {value:.3f}. It is in the means."
        )

    def why(self) -> str:
        """When the run with the lowest Dice and another leave "all background", and what else lets it."""
        lines = (self.folder / "vessels_curves.jsonl").read_text(encoding="utf-8").splitlines()
        curves = {(row["seed"], row["way"]): row for row in map(json.loads, lines)}
        leaves = {key: first_above(row["dice"]) for key, row in curves.items()}
        late, usual = curves[2, "as run"]["loss"], leaves[0, "as run"]
        falls = all(after < before for before, after in pairwise(late))
        text = (
            f"It has not diverged: its test loss falls from {late[0]:.2f} to {late[-1]:.2f}"
            f"{', in every round' if falls else ''}. Every run first calls all pixels background, with a "
            f"Dice near zero. Seed 0 leaves that (Dice above {LEFT:g}) in round {usual}; seed 2 has not by "
            f"round {len(late) - 1}, when the cosine schedule has brought the rate to zero."
        )
        for way in ("a constant rate", "60 rounds"):
            row = curves[2, way]
            text += f" With {way} it does in round {leaves[2, way]} and ends at {row['dice'][-1]:.3f}."
        return text + " (Runs made after the others had been seen: `benchmarks/vessels.py curves`.)"

    def speed(self) -> str:
        """Images a second of ten stacked clients, and the ratio to one client after another."""
        found = json.loads((self.folder / "unet_speed.json").read_text(encoding="utf-8"))
        rate = found["images_per_second"]["stacked"]["median"]
        times = (found["stacked_over"][name] for name in ("in turn, recorded", "in turn, step by step"))
        ratios = " and ".join(f"{one['median']:.0f} ({one['low']:.0f} to {one['high']:.0f})" for one in times)
        return (
            f"{rate:,.0f} images a second, {ratios} times as many as one client after another with recorded "
            "steps and step by step"
        )
