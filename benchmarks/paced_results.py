"""What the pages state of benchmarks/paced.py, computed from its rows."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from cells import read, table
from paced_tables import UPLINKS, USUAL, at_uplink, group, hours, ratio, target_of, time_to

NAME, STUDY, NVFLARE_LINK = "paced.jsonl", "cifar10", 0.8
METHODS = {"fedavg": "FedAvg", "fedfrozen": "FedFrozen", "lora": "LoRA"}
PACINGS = ("synchronous", "deadline", "buffered")
Times = dict[int, tuple[float | None, float | None]]  # by seed


class PacedStudy:
    def __init__(self, folder: Path) -> None:
        self.runs = group(read(folder / NAME))

    def times(self, method: str, pacing: str) -> Times:
        """To the synchronous run's target, by seed: of the synchronous run, and of this one."""
        own, plain = self.of(method, pacing), self.of(method, "synchronous")
        targets = {seed: target_of(row) for seed, row in plain.items() if seed in own}
        return {
            seed: (time_to(plain[seed]["curve"], target), time_to(own[seed]["curve"], target))
            for seed, target in targets.items()
        }

    def of(self, method: str, pacing: str) -> dict[int, dict]:  # type: ignore[type-arg]
        return self.runs.get((STUDY, method, pacing, USUAL), {})

    def faster(self, method: str, pacing: str) -> str:
        """Synchronous over this pacing: geometric mean, interval, and of how many seeds."""
        return ratio(self.times(method, pacing))

    def reached(self, method: str, pacing: str) -> int:
        return sum(own is not None for _, own in self.times(method, pacing).values())

    def seeds(self) -> int:
        return min(len(self.of(method, pacing)) for method in METHODS for pacing in PACINGS)

    def pacings(self) -> str:
        lines = []
        for method, title in METHODS.items():
            for pacing in PACINGS:
                own = self.of(method, pacing)
                stale = statistics.fmean(statistics.fmean(row["staleness"] or [0.0]) for row in own.values())
                final = 100 * statistics.fmean(map(target_of, own.values()))
                quicker = "" if pacing == "synchronous" else self.faster(method, pacing)
                took = hours([one for _, one in self.times(method, pacing).values()])
                lines.append([title, pacing, f"{final:.1f}", took, quicker, f"{stale:.2f}"])
        head = ["method", "pacing", "last accuracy", "hours to the target", "synchronous over it"]
        return table([*head, "mean staleness"], lines)

    def links(self) -> str:
        """FedAvg's virtual time over a method's, in synchronous rounds, by uplink."""
        plain, lines = self.of("fedavg", "synchronous"), []
        for method in ("fedfrozen", "lora"):
            own = self.of(method, "synchronous")
            seeds = sorted(own.keys() & plain.keys())
            saved = statistics.fmean(1 - own[seed]["bytes_up"] / plain[seed]["bytes_up"] for seed in seeds)
            for uplink in UPLINKS:
                whole, until = Times(), Times()
                for seed in seeds:
                    one, other = at_uplink(plain[seed], uplink), at_uplink(own[seed], uplink)
                    target = min(target_of(plain[seed]), target_of(own[seed]))
                    whole[seed] = one[-1][1], other[-1][1]
                    until[seed] = time_to(one, target), time_to(other, target)
                shares = [METHODS[method], f"{100 * saved:.1f} %", f"{uplink:g} Mbit/s"]
                lines.append([*shares, ratio(whole), ratio(until)])
        head = ["method", "bytes up saved", "uplink", "the same rounds", "until the lower target of both"]
        return table(head, lines)

    def buffered_links(self) -> str:
        """Synchronous over buffered at every uplink; a synchronous run's times at others are computed."""
        lines = []
        for method, title in METHODS.items():
            plain, cells = self.of(method, "synchronous"), list[str]()
            for uplink in UPLINKS:
                own, times = self.runs.get((STUDY, method, "buffered", uplink), {}), Times()
                for seed in sorted(own.keys() & plain.keys()):
                    target, before = target_of(plain[seed]), at_uplink(plain[seed], uplink)
                    times[seed] = time_to(before, target), time_to(own[seed]["curve"], target)
                cells.append(ratio(times))
            lines.append([title, *cells])
        return table(["method", *(f"{uplink:g} Mbit/s" for uplink in UPLINKS)], lines)

    def nvflare(self) -> str:
        """NVFLARE's setting: ten synchronous rounds, and as many updates one at a time."""
        lines = []
        for pacing in ("synchronous", "buffered"):
            own = self.runs.get(("nvflare", "fedavg", pacing, NVFLARE_LINK), {})
            scores = [100 * row["score"] for row in own.values()]
            minutes = [row["virtual_seconds"] / 60 for row in own.values()]
            lines.append([pacing, str(len(own)), mean_and_range(scores, 1), mean_and_range(minutes, 0)])
        head = ["pacing", "seeds", "accuracy (lowest to highest)", "virtual minutes (lowest to highest)"]
        return table(head, lines)


def mean_and_range(values: Sequence[float], digits: int) -> str:
    if not values:
        return "-"
    mean, low, high = statistics.fmean(values), min(values), max(values)
    return f"{mean:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"
