"""Whole rounds on a GPU: clients stacked, clients in turn, central training, and Flower's own simulation.

    python benchmarks/cohort.py --data DIR      (a folder with train.parquet and test.parquet of CIFAR-10)

The app's own rounds (exchange, training, aggregation; evaluation apart) with FedAvg in bf16, AdamW: a ViT of
width 192 and 6 layers, 10 clients with batches of 64 and 50 with batches of 32, equal sizes and Dirichlet
0.3; and a DINOv2-S (random weights, 84 x 84 pixels), 10 clients with batches of 32. Useful images only:
padding is not work. Contestants take turns, a round each. Cases that are already in the result file with the
same settings stay there (--cases picks those to run). The share of the device's peak counts the operations of
the model's own products, forward and back.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, Spread, about, arguments, interleave, ratio, show, spread, write_result
from torch.utils.flop_counter import FlopCounterMode
from turns import AppTurns, unheard

from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.data.table import Corpus
from fedfrozen_app.local import cohort as runner
from fedfrozen_app.local.slots import Schedule
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.models.task import Batch

VIT, DINO = "vit_d192", "dinov2_s"
CASES = [
    *(
        (VIT, clients, batch, split)
        for clients, batch in ((10, 64), (50, 32))
        for split in ("equal", "dirichlet")
    ),
    (DINO, 10, 32, "equal"),
]
PEAK = {"NVIDIA H200": 989e12}  # operations a second in bf16, as its data sheet has it without sparsity
MODELS = {
    VIT: ["model=vit_cifar"],
    DINO: [
        *("model=hub", "model.source=config", "model.path=null", "model.model_type=dinov2"),
        *("model.name=dinov2_s", "+model.config.hidden_size=384", "+model.config.num_hidden_layers=12"),
        *("+model.config.num_attention_heads=6", "+model.config.patch_size=14", "dataset.image_size=84"),
    ],
}
# With this analysis torch 2.11 fails on the positions of DINOv2, which are scaled to the picture's size.
COMPILED = {DINO: {"triton.coalesce_tiling_analysis": False}}
GOALS = {10: 12, 50: 25}  # times faster than clients in turn, step by step
RUNNERS = {
    "cohort": ["runtime.runner=cohort", "runtime.compile=true"],
    "in turn, recorded": ["runtime.runner=sequential"],
    "in turn, step by step": ["runtime.runner=sequential", "runtime.capture=false"],
}


OTHERS = [name for name in (*RUNNERS, "central", "central, compiled") if name != "cohort"]


def words_for(options: Any, model: str, clients: int, batch: int, split: str) -> list[str]:
    words = ["strategy=fedavg", *MODELS[model], "dataset=parquet", f"dataset.path={options.data}"]
    words += [f"dataset.limit={options.images}", "dataset.validation=0", "dataset.client_validation=0"]
    words += [f"num_clients={clients}", f"client.batch_size={batch}", "client.local_epochs=1"]
    words += ["client.precision=bf16", "client.lr=1e-3", "client.lr_schedule=constant"]
    words += ["num_rounds=1000", "checkpoint.every=0", f"device={options.device}"]
    return words + (["partition=iid"] if split == "equal" else ["partition=dirichlet", "partition.alpha=0.3"])


class Central:
    """The same model and optimiser on batches of all clients' size: as many images as a round has."""

    def __init__(self, words: list[str], corpus: Corpus, batch: int, images: int, compiled: bool) -> None:
        config = read(resolved(compose_config(words)))
        self.worker = Worker(config, corpus, shares=share_out(corpus, config, config.num_clients))
        model = self.worker.model.train()
        called = torch.compile(model, options=COMPILED.get(config.model.name)) if compiled else model
        self.task = self.worker.task.with_call(lambda parameters, inputs: called(**inputs).logits)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
        self.batch, self.steps = batch, max(1, images // batch)

    def turn(self) -> float:
        """Images a second."""
        wait(self.worker.device)
        began = time.perf_counter()
        for _ in range(self.steps):
            index = torch.randint(len(self.worker.corpus.train), (self.batch,), device=self.worker.device)
            loss = self.task.loss({}, Batch(*self.worker.take(index)))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        wait(self.worker.device)
        return self.batch * self.steps / (time.perf_counter() - began)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def laying_out_timed() -> Iterator[list[float]]:
    """Seconds that laying out batches took, call by call: the data phase of the cohort runner."""
    plain, seconds = runner.lay_out, []

    def timed(*given: Any) -> Schedule:
        began = time.perf_counter()
        try:
            return plain(*given)
        finally:
            seconds.append(time.perf_counter() - began)

    runner.lay_out = timed
    try:
        yield seconds
    finally:
        runner.lay_out = plain


def case(options: Any, model: str, clients: int, batch: int, split: str) -> dict[str, Any]:
    words = words_for(options, model, clients, batch, split)
    config = read(resolved(compose_config(words)))
    corpus = load_corpus(config)
    images = sum(len(part) for part in share_out(corpus, config, clients).partition.indices)  # type: ignore[union-attr]
    runners = {name: extra for name, extra in RUNNERS.items() if name in options.runners}
    runs = {name: AppTurns([*words, *extra], corpus) for name, extra in runners.items()}
    phases: list[dict[str, float]] = []

    def app_turn(name: str) -> float:
        with laying_out_timed() as data:
            seconds = runs[name].turn()["seconds"]
        if name == "cohort":
            parts = {"data": sum(data), "step": seconds["train"] - sum(data)}
            phases.append(parts | {key: seconds[key] for key in ("aggregate", "evaluate")})
        return images / (seconds["train"] + seconds["aggregate"])

    contestants: dict[str, Callable[[], float]] = {name: lambda name=name: app_turn(name) for name in runs}
    for compiled in (False, True):
        one = Central(words, corpus, clients * batch, images, compiled)
        contestants["central, compiled" if compiled else "central"] = one.turn
    operations = operations_of_an_image(one)
    first = {
        name: seconds_of(turn) for name, turn in contestants.items()
    }  # compiles and records; not counted
    phases.clear()
    found = interleave(contestants, options.repeats)
    for run in runs.values():
        run.close()
    peak = PEAK.get(gpu_name() or "")
    return {
        "model": model,
        "clients": clients,
        "batch": batch,
        "split": split,
        "images_a_round": images,
        "first_turn_seconds": first,
        "images_per_second": {name: spread(values) for name, values in found.items()},
        "operations_of_an_image": operations,
        "share_of_peak": peak and {n: operations * spread(rates).median / peak for n, rates in found.items()},
        "cohort_over": {
            name: ratio(found["cohort"], values) for name, values in found.items() if name != "cohort"
        },
        "cohort_phases_seconds": {key: spread([phase[key] for phase in phases]) for key in phases[0]},
    }


def operations_of_an_image(central: Central) -> float:
    """Of products, forward and back."""
    worker, rows = central.worker, 8
    batch = Batch(*worker.take(torch.arange(rows, device=worker.device)))
    with FlopCounterMode(display=False) as counter:
        worker.task.loss({}, batch).backward()
    worker.model.zero_grad()
    return counter.get_total_flops() / rows


def seconds_of(turn: Callable[[], float]) -> float:
    began = time.perf_counter()
    turn()
    return time.perf_counter() - began


def beside_flower(options: Any, corpus: Corpus) -> None:
    """10 clients of equal size: Flower's Ray simulation of the same app, and ours before and after it."""
    words = words_for(options, VIT, 10, 64, "equal")
    runs = {name: AppTurns([*words, *RUNNERS[name]], corpus) for name in ("cohort", "in turn, recorded")}
    found: dict[str, list[float]] = {name: [] for name in runs}

    def ours(rounds: int) -> None:
        for name, run in runs.items():
            each = [run.turn()["seconds"] for _ in range(rounds)]
            found[name] += [options.images / (part["train"] + part["aggregate"]) for part in each]

    with unheard():
        ours(2)
        found = {name: [] for name in runs}  # those compiled and recorded
        ours(options.repeats)
    found["Flower's simulation"] = flower_rates(options, words)
    with unheard():
        ours(options.repeats)
    for run in runs.values():
        run.close()
    rates = {name: spread(values) for name, values in found.items()}
    slow = rates["Flower's simulation"].median
    times = {name: rate.median / slow for name, rate in rates.items()}
    result: dict[str, Any] = {"setting": {"images": options.images, "clients": 10, "batch": 64, "workers": 4}}
    result["gpu"] = gpu_name()
    path = write_result("cohort_flower", result | {"images_per_second": rates, "times_flower": times})
    rows = [(name, f"{rate:.0f}", f"{times[name]:.1f}") for name, rate in rates.items()]
    show("Beside Flower's Ray simulation", ("", "images/s", "times Flower's"), rows, {}, path)


def flower_rates(options: Any, words: list[str]) -> list[float]:
    """Images a second in each round after the first two, in which workers start and record."""
    share = 0.25 if options.device == "cuda" else 0  # four workers on the card
    words = [*words, "runtime=flower", f"runtime.gpus_per_client={share}", "num_rounds=6", "eval_every=6"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fedfrozen_app", *words, f"output_dir={folder}/run"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"Flower's simulation failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    seconds = [row["seconds"] for row in map(json.loads, lines[3:])]
    return [options.images / (part["train"] + part["aggregate"]) for part in seconds]


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument(
        "--data", required=True, help="folder with train.parquet and test.parquet of CIFAR-10"
    )
    parser.add_argument("--images", type=int, default=16000, help="training images, all clients together")
    parser.add_argument("--cases", type=int, nargs="*", default=range(len(CASES)), help=f"of {CASES}")
    parser.add_argument("--runners", nargs="+", choices=RUNNERS, default=list(RUNNERS))
    parser.add_argument("--flower", action="store_true", help="beside Flower's Ray simulation, and no case")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    if options.flower:
        words = words_for(options, VIT, 10, 64, "equal")
        beside_flower(options, load_corpus(read(resolved(compose_config(words)))))
        return
    setting = {"images": options.images, "repeats": options.repeats}
    figures = [known for known in earlier(setting) if case_of(known) not in options.cases]
    for number in options.cases:
        with unheard():
            figure = case(options, *CASES[number])
        print(json.dumps(figure, default=lambda value: round(value.median, 4)), flush=True)
        figures = sorted([*figures, plain(figure | {"about": about()})], key=case_of)
        # After each case: whoever stops the rest keeps what there is.
        checks = {name: met for known in figures for name, met in goals(known).items()}
        path = write_result(
            "cohort", {"setting": setting, "gpu": gpu_name(), "figures": figures, "checks": checks}
        )
    rows = [row(figure) for figure in figures]
    show(
        "Cohort runner, times faster: median (range)",
        ("", "images/s", "of peak", *OTHERS),
        rows,
        checks,
        path,
    )


def gpu_name() -> str | None:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def case_of(figure: dict[str, Any]) -> int:
    model = figure.get("model", VIT)  # files of before know no other
    return CASES.index((model, figure["clients"], figure["batch"], figure["split"]))


def earlier(setting: dict[str, Any]) -> list[dict[str, Any]]:
    """The cases of the result file, where it was made with these settings: a table can grow."""
    path = RESULTS / "cohort.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    return found["figures"] if found.get("setting") == setting else []


def plain(figure: dict[str, Any]) -> dict[str, Any]:
    """As it is read again from the file."""
    return json.loads(json.dumps(figure, default=asdict))


def goals(figure: dict[str, Any]) -> dict[str, bool]:
    over, clients = figure["cohort_over"], figure["clients"]
    name, goal = f"{CASES[case_of(figure)][0]}_{clients}x{figure['batch']}_{figure['split']}", GOALS[clients]
    met = {f"{name}_as_fast_as_central_compiled": over["central, compiled"]["median"] >= 1}
    if "in turn, step by step" in over and figure.get("model", VIT) == VIT:
        met[f"{name}_{goal}_times_clients_in_turn"] = over["in turn, step by step"]["median"] >= goal
    return met


def row(figure: dict[str, Any]) -> tuple[str, ...]:
    def text(value: Spread) -> str:
        return f"{value:.1f}" if value.median >= 10 else f"{value:.2f}"

    over = {name: text(Spread(**value)) for name, value in figure["cohort_over"].items()}
    name = f"{CASES[case_of(figure)][0]}, {figure['clients']} x {figure['batch']}, {figure['split']}"
    rate, share = f"{Spread(**figure['images_per_second']['cohort']):.0f}", figure.get("share_of_peak") or {}
    peak = f"{share['cohort']:.0%}" if share else "–"
    return (name, rate, peak, *(over.get(other, "–") for other in OTHERS))


if __name__ == "__main__":
    main()
