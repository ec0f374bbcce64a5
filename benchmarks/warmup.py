"""Accuracy against the warm-up length, and whether `strategy.warmup_rounds=auto` finds a good one.

    python benchmarks/warmup.py digits                Dirichlet 0.1, 0.3, 1.0; seeds 0 to 9
    python benchmarks/warmup.py layers                softmax attention in 1, 2 and 4 layers; seeds 0 to 4
    python benchmarks/warmup.py cifar10 --data DIR    a folder of train.parquet and test.parquet; seeds 0 to 2

For every setting and seed the full model is trained once, with a checkpoint a round. Every warm-up length is
a fork of that run (`from=RUN/checkpoints/N`), so the common rounds are paid once; the learning rate is
constant, or a fork would not be what the whole run is. A run's score is the mean test accuracy of its last
evaluations. All is done in one process. Started again, it goes on with the cells that are missing.
"""

import argparse
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from common import show, write_result

from fedfrozen_app import server_app
from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.data.federated import load_corpus
from fedfrozen_app.data.table import Corpus
from fedfrozen_app.report import output
from fedfrozen_app.report.curves import read_rows
from fedfrozen_app.runtime import checkpoint
from fedfrozen_app.runtime.inprocess import run_in_process
from fedfrozen_app.theory.accuracy import AUTO, NEVER, judge, scores_of
from strategies.fedfrozen import Settings
from strategies.warmup import Watch

SHARES = (0, 5, 10, 20, 50, 100)  # percent of the rounds
LAST = 5  # evaluations that make a run's score


@dataclass(frozen=True)
class Setting:
    name: str
    words: tuple[str, ...]


@dataclass(frozen=True)
class Study:
    settings: Callable[[], list[Setting]]
    rounds: int
    seeds: int


# At the default rate of 3e-3, held constant, ten clients with few classes each learn next to nothing.
DIGITS = ("client.lr=1e-3", "dataset.client_validation=0")
CIFAR10 = ("experiment=cifar10", "client.precision=bf16", "client.local_steps=20", "eval_every=2")


def digits() -> list[Setting]:
    return [Setting(f"digits, Dirichlet {a}", (*DIGITS, f"partition.alpha={a}")) for a in (0.1, 0.3, 1.0)]


def layers() -> list[Setting]:
    common = (*DIGITS, "partition.alpha=0.1")
    return [
        Setting(f"{n} layer{'s' * (n > 1)}", (*common, f"model.config.num_hidden_layers={n}"))
        for n in (1, 2, 4)
    ]


def cifar10() -> list[Setting]:
    common = (*CIFAR10, "dataset.client_validation=0")
    return [Setting(f"CIFAR-10, Dirichlet {a}", (*common, f"partition.alpha={a}")) for a in (0.1, 0.5)]


STUDIES = {"digits": Study(digits, 40, 10), "layers": Study(layers, 40, 5), "cifar10": Study(cifar10, 60, 3)}


class Sweep:
    """Runs what is missing and remembers what was found, in one JSON file."""

    def __init__(self, folder: Path, rounds: int, extra: Iterable[str]) -> None:
        self.folder, self.rounds, self.extra = folder.resolve(), rounds, list(extra)
        self.path = self.folder / "cells.json"
        self.cells: dict[str, Any] = json.loads(self.path.read_text()) if self.path.exists() else {}
        self._corpus: Corpus | None = None

    def fill(self, setting: Setting, seed: int) -> None:
        """Every warm-up of one setting and seed."""
        folder = self.folder / f"{setting.name.replace(' ', '_').replace(',', '')}-{seed}"
        whole = folder / "whole"
        warmups = {f"{share} %": round(share * self.rounds / 100) for share in SHARES}
        missing = [label for label in (*warmups, AUTO) if f"{setting.name}/{seed}/{label}" not in self.cells]
        if not missing:
            return
        if not (whole / "checkpoints" / str(self.rounds)).exists():
            # FedAvg to the bit, and it writes down what auto watches.
            never = ["strategy.warmup_rounds=auto", f"strategy.warmup_minimum={self.rounds}"]
            self.run(setting, seed, [*never, f"checkpoint.keep={self.rounds}"], whole)
        rows = read_rows(whole)
        for label in missing:
            after = decided(rows, self.rounds) if label == AUTO else warmups[label]
            words = [f"strategy.warmup_rounds={AUTO if label == AUTO else after}", "checkpoint.every=0"]
            if after == self.rounds:
                self.keep(setting, seed, label, rows, 0.0)
            else:
                words += [f"from={whole / 'checkpoints' / str(after)}"] if after else []
                began = time.perf_counter()
                self.run(setting, seed, words, folder / "fork")
                self.keep(setting, seed, label, read_rows(folder / "fork"), time.perf_counter() - began)

    def run(self, setting: Setting, seed: int, words: list[str], folder: Path) -> None:
        """The ordinary way: overrides in, a run folder out."""
        words = ["strategy=fedfrozen", *setting.words, f"num_rounds={self.rounds}", f"seed={seed}", *words]
        words += ["client.lr_schedule=constant", *self.extra]
        plain = resolved(compose_config(words))
        config = read(plain)
        self._corpus = self._corpus or load_corpus(config)
        start = checkpoint.read(Path(config.start_from)) if config.start_from else None
        shutil.rmtree(folder, ignore_errors=True)
        run_in_process(config, plain, words, folder, start, self._corpus)

    def keep(
        self, setting: Setting, seed: int, label: str, rows: list[dict[str, Any]], seconds: float
    ) -> None:
        scores = [row["test_accuracy"] for row in rows if "test_accuracy" in row and row["round"]]
        frozen = [row["round"] for row in rows if row["stage"] == "frozen"]
        cell = {
            "setting": setting.name,
            "seed": seed,
            "warmup": label,
            "score": fmean(scores[-LAST:]),
            "final": scores[-1],
            "freeze_after": frozen[0] - 1 if frozen else None,
            "seconds": round(seconds, 1),
        }
        self.cells[f"{setting.name}/{seed}/{label}"] = cell
        checkpoint.replace_file(self.path, json.dumps(self.cells))
        print(
            f"{setting.name}, seed {seed}, warm-up {label}: {cell['score']:.4f}, {seconds:.1f} s", flush=True
        )


def decided(rows: list[dict[str, Any]], rounds: int) -> int:
    """Where auto, with its defaults, freezes a run that has these rows."""
    watch = Watch(Settings(warmup_rounds=AUTO).checked(rounds).rule)
    for row in rows:
        if "warmup" in row:
            watch.recall(row["round"], row["warmup"])
    return watch.last_round or rounds


def report(study: str, sweep: Sweep, settings: list[Setting]) -> None:
    cells = list(sweep.cells.values())
    scores = scores_of(cells)
    labels = [*(f"{share} %" for share in SHARES), AUTO]
    table = [
        [name, *(f"{100 * fmean(by[label].values()):.1f}" for label in labels), _stops(cells, name)]
        for name, by in scores.items()
    ]
    verdicts = judge(cells)
    checks = {}
    for each in verdicts:
        checks[f"{each.setting}: regret {each.regret:.2f} against {each.best}, at most 1 point"] = (
            each.regret <= 1
        )
        checks[f"{each.setting}: {each.behind_never:.2f} behind {NEVER}, at most 1 point"] = (
            each.behind_never <= 1
        )
    path = write_result(
        f"warmup_{study}",
        {
            "rounds": sweep.rounds,
            "overrides": {setting.name: [*setting.words, *sweep.extra] for setting in settings},
            "verdicts": [each.__dict__ for each in verdicts],
            "cells": cells,
        },
    )
    columns = ["test accuracy, %", *labels, "auto froze after"]
    show(f"Warm-up, {study}: mean of the last {LAST} evaluations", columns, table, checks, path)


def _stops(cells: list[dict[str, Any]], name: str) -> str:
    found = [cell["freeze_after"] for cell in cells if cell["setting"] == name and cell["warmup"] == AUTO]
    return ", ".join("never" if stop is None else str(stop) for stop in found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--data", help="cifar10: the folder of its two parquet files")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seeds", type=int, help="how many, from 0 on")
    parser.add_argument("--runs", type=Path, default=Path("outputs/warmup"), help="where the runs go")
    parser.add_argument("--set", nargs="*", default=[], help="more overrides, such as num_clients=20")
    arguments = parser.parse_args()
    study = STUDIES[arguments.study]
    if arguments.study == "cifar10" and not arguments.data:
        parser.error("cifar10 needs --data DIR")
    logging.getLogger("flwr").setLevel(logging.WARNING)
    # Nobody looks at the pictures of hundreds of forks, and drawing them takes longer than a fork.
    output.write_curves = lambda *args, **kwargs: None
    server_app.draw_labels = lambda *args: None
    extra = [*([f"dataset.path={arguments.data}"] if arguments.data else []), *arguments.set]
    settings = study.settings()
    sweep = Sweep(arguments.runs / arguments.study, arguments.rounds or study.rounds, extra)
    # Setting by setting: on a GPU a compiled step serves all seeds of a structure.
    for setting in settings:
        for seed in range(arguments.seeds or study.seeds):
            sweep.fill(setting, seed)
    report(arguments.study, sweep, settings)


if __name__ == "__main__":
    main()
