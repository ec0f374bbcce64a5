"""The tables of docs/results/appendix/safl-choice.md, from the rows of benchmarks/layer_choice.py."""

import statistics
import string
from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any

import numpy as np
from cells import Difference, Row, paired, table
from freezing import RESULT, TESTED, judged
from safl import interval, macro_f1

NAME = "layer_choice.jsonl"
SEEDS = range(221, 231)  # earlier studies have 0 to 9 and 111 to 120, and 1000 for rates
EPSILON = 8.0
FULL = {"rounds": 20, "private_rounds": 10, "steps": 5, "tokens": 96, "limit": 0}
DATA = {"newsgroups": "20 Newsgroups", "anatem": "AnatEM"}
PLAIN = ("attention", "once", "random", "fedavg", "fixed")  # in the order in which they are run
PRIVATE = (*PLAIN, "head")
NAMES = {
    "attention": "attention (SAFL)",
    "once": "random layers, drawn once",
    "random": "random layers, redrawn every round",
    "fixed": "the last two layers",
    "fedavg": "FedAvg",
    "head": "the head alone",
}
COUNTS = string.digits + string.ascii_letters  # a number below 62 as one character
RESAMPLES = 500


def key_of(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("data", "arm", "seed", "lr", "epsilon", "head_lr"))


class Study:
    def __init__(self, lines: Sequence[Row]) -> None:
        whole = [line for line in lines if all(line[key] == value for key, value in FULL.items())]
        self.truth = {line["data"]: line["truth"] for line in whole if "truth" in line}
        self.rows = [line for line in whole if "truth" not in line]
        self.arms: dict[tuple[str, str, float | None], list[Row]] = {}
        for row in self.rows:
            if row["seed"] in SEEDS:
                self.arms.setdefault((row["data"], row["arm"], row["epsilon"]), []).append(row)

    def __bool__(self) -> bool:
        return bool(self.arms)

    def own(self, data: str, arm: str, epsilon: float | None = None) -> list[Row]:
        return sorted(self.arms.get((data, arm, epsilon), ()), key=lambda row: int(row["seed"]))

    def counts(self, row: Row) -> np.ndarray:
        """(test rows, classes, 3): right, said and true; of entities one class."""
        return counts_of(row["said"], self.truth[row["data"]], row["data"])

    @cached_property
    def f1(self) -> dict[tuple[str, str, float | None], dict[int, float]]:
        """In points, by seed."""
        return {
            arm: {row["seed"]: 100 * float(macro_f1(self.counts(row).sum(axis=0))) for row in rows}
            for arm, rows in self.arms.items()
        }

    def scores(self, data: str, arm: str, epsilon: float | None = None) -> dict[int, float]:
        return self.f1.get((data, arm, epsilon), {})

    def mean(self, data: str, arm: str, epsilon: float | None = None) -> str:
        scores = self.scores(data, arm, epsilon).values()
        return f"{statistics.fmean(scores):.1f}" if scores else "not run"

    def less(self, data: str, other: str, epsilon: float | None = None) -> Difference | None:
        """Attention less another arm."""
        found = paired(self.scores(data, "attention", epsilon), self.scores(data, other, epsilon))
        return found if found is not None and found.seeds >= TESTED else None

    # Tables

    def comparisons(self, pairs: Sequence[tuple[str, str, float | None]]) -> str:
        """One family."""
        results = judged([self.less(*pair) for pair in pairs])
        lines = [
            [f"{DATA[data]}: attention less {NAMES[other]}", self.mean(*pair), *result, self.over_rows(*pair)]
            for pair, result in zip(pairs, results, strict=True)
            for data, other, _ in (pair,)
        ]
        return table(["comparison", "other's F1", *RESULT, "95 % over test rows and seeds"], lines)

    def primary(self) -> str:
        return self.comparisons([(data, arm, None) for data in DATA for arm in ("once", "random", "fedavg")])

    def others(self) -> str:
        return self.comparisons([(data, "fixed", None) for data in DATA])

    def private(self) -> str:
        return self.comparisons([("newsgroups", arm, EPSILON) for arm in PRIVATE if arm != "attention"])

    def over_rows(self, data: str, other: str, epsilon: float | None) -> str:
        """Test rows and seeds drawn together, for both sides alike."""
        one, two = self.own(data, "attention", epsilon), self.own(data, other, epsilon)
        seeds = sorted({row["seed"] for row in one} & {row["seed"] for row in two})
        if len(seeds) < TESTED:
            return ""
        rows, drawn = draws(len(seeds), len(self.counts(one[0])))
        sides = []
        for side in (one, two):
            counts = np.stack([self.counts(row) for row in side if row["seed"] in seeds], axis=1)
            size, _, classes, _ = counts.shape
            sums = rows @ counts.reshape(size, -1).astype(np.float32)
            scores = macro_f1(sums.reshape(len(rows), len(seeds), classes, 3).astype(float))
            sides.append((scores * drawn).sum(axis=1) / drawn.sum(axis=1))
        low, high = interval(100 * (sides[0] - sides[1]))
        return f"{low:+.1f} to {high:+.1f}"

    def table(self) -> str:
        """Every arm."""
        lines = []
        for (data, arm, epsilon), scores in sorted(self.f1.items(), key=place):
            rows = self.own(data, arm, epsilon)
            values = list(scores.values())
            spread = f"{statistics.stdev(values):.1f}" if len(values) > 1 else "-"
            rates = f"{rows[0]['lr']:g}" + ("" if epsilon is None else f", {rows[0]['head_lr']:g}")
            changes = [row["selection_changes"] for row in rows if row["selection_changes"] is not None]
            lines.append(
                [
                    DATA[data],
                    "-" if epsilon is None else f"{epsilon:g}",
                    NAMES[arm],
                    f"{statistics.fmean(values):.1f}",
                    spread,
                    str(len(values)),
                    f"{statistics.fmean(row['bytes_up'] for row in rows) / 1e6:.0f}",
                    rates,
                    f"{statistics.fmean(changes):.2f}" if changes else "-",
                    f"{statistics.fmean(row['seconds'] for row in rows):.0f}",
                ]
            )
        head = ["data", "epsilon", "arm", "F1", "deviation over seeds", "seeds", "MB up", "rate"]
        return table([*head, "layers changed per round", "seconds"], lines)

    def trials(self) -> str:
        """Validation F1 of every trial; the best of each arm was used."""
        lines = [
            [
                DATA[row["data"]],
                "-" if row["epsilon"] is None else f"{row['epsilon']:g}",
                NAMES[row["arm"]],
                f"{row['lr']:g}" + ("" if row["head_lr"] is None else f", {row['head_lr']:g}"),
                f"{100 * row['validation']:.1f}",
            ]
            for row in sorted(self.rows, key=lambda row: place(((row["data"], row["arm"], row["epsilon"]),)))
            if row["seed"] not in SEEDS
        ]
        return table(["data", "epsilon", "arm", "rate", "validation F1"], lines)

    def account(self) -> str:
        """What was run, what is missing."""
        wanted = [(data, arm, None) for data in DATA for arm in PLAIN]
        wanted += [("newsgroups", arm, EPSILON) for arm in PRIVATE]
        done = sum(len(self.arms.get(arm, ())) for arm in wanted)
        minutes = sum(row["seconds"] for row in self.rows) / 60
        commits = ", ".join(sorted({str(row["commit"])[:7] for row in self.rows}))
        devices = ", ".join(sorted({row["device"] for row in self.rows}))
        tried = sum(row["seed"] not in SEEDS for row in self.rows)
        text = f"{done} of {len(wanted) * len(SEEDS)} runs and {tried} trials, {minutes:.0f} process-minutes"
        text += f" on {devices}, commit {commits}."
        short = [arm for arm in wanted if len(self.arms.get(arm, ())) < len(SEEDS)]
        if short:
            told = (
                f"{DATA[data]}{'' if epsilon is None else f' at epsilon {epsilon:g}'}, {NAMES[name]} "
                f"({len(self.arms.get((data, name, epsilon), ()))} of {len(SEEDS)})"
                for data, name, epsilon in short
            )
            text += f" Not complete: {'; '.join(told)}."
        if lost := sum(row["clients_failed"] for row in self.rows):
            text += f" Clients that failed in a round: {lost}."
        return text


def place(item: Any) -> tuple[int, int, int]:
    data, arm, epsilon = item[0]
    return (epsilon is not None, list(DATA).index(data), list(NAMES).index(arm))


@cache
def counts_of(said: str, truth: str, data: str) -> np.ndarray:
    if data == "anatem":  # entities: found and said of a sentence, and true
        numbers = np.array([COUNTS.index(sign) for sign in said]).reshape(-1, 2)
        true = np.array([COUNTS.index(sign) for sign in truth])
        return np.concatenate([numbers, true[:, None]], axis=1)[:, None]
    classes = sorted(set(truth))
    guess, true = (
        np.array([[sign == name for name in classes] for sign in text], dtype=np.int64)
        for text in (said, truth)
    )
    return np.stack([true * guess, guess, true], axis=2)


@cache
def draws(seeds: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """How often each test row and each seed is drawn: one fewer than there are, as in benchmarks/safl.py."""
    rng = np.random.default_rng(0)
    drawn = rng.multinomial(rows - 1, [1 / rows] * rows, size=RESAMPLES).astype(np.float32)
    return drawn, rng.multinomial(seeds - 1, [1 / seeds] * seeds, size=RESAMPLES).astype(float)
