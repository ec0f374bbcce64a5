"""Play a case, read what it left, compare it with what was recorded.

Everything goes through what people rely on: the command line, and the files of a run's folder. Nothing here
may import more of the project than its command, for the net must outlive the modules behind it.
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import platform
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from fedfrozen_app.__main__ import run as command
from tests.golden.cases import Case

RECORDED = Path(__file__).parent / "recorded"
RESULTS, ARRAYS, STOPPED = RECORDED / "results.json", RECORDED / "arrays.safetensors", RECORDED / "stopped"
SAID = "said.txt"
RUN = "run"  # relative: a recorded folder names no place on the machine that recorded it

# What differs from machine to machine, or from one minute to the next.
TIMES = re.compile("seconds")
NOT_RESULTS = {"machine", "versions", "git_commit", "command", "config"}
# The best of several rounds, which may be equal up to rounding.
CHOSEN_ROUND = {"best_test_round", "selected_round", "selected_test_accuracy", "selected_test_loss"}
SHARES_OF_ROWS = re.compile("accuracy|f1|val_before|val_after|stability|personal")
ZERO = torch.zeros(())
# When the runs were recorded, train_loss was a method's whole objective: the sum of these two means today.
SURROGATE = "surrogate_loss"
KEY_BIAS = re.compile(r"(key|k_proj)\.bias$")

Found = dict[str, Any]


def fingerprint() -> dict[str, str]:
    """Where the same bits can be expected: the same code of torch on the same kind of processor."""
    return {
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }


class Player:
    """Plays commands in a process of its own, one after another, where nothing else ever ran.

    What ran before turns bits: one bf16 product on a CPU without bf16, and torch does without oneDNN for the
    rest of the process, which rounds float32 otherwise. The process starts with the first command.
    """

    def __init__(self) -> None:
        self._spawn = multiprocessing.get_context("spawn")
        self._process: Any = None

    def __enter__(self) -> "Player":
        return self

    def __exit__(self, *error: object) -> None:
        if self._process:
            self._pipe.send(None)
            self._process.join()

    def play(self, *words: str) -> None:
        """In the current directory, and it must end well; what it says is said here too."""
        if self._process is None:
            self._pipe, end = self._spawn.Pipe()
            self._process = self._spawn.Process(target=_serve, args=(end,))
            self._process.start()
            end.close()
        try:
            self._pipe.send((Path.cwd(), words))
            code = self._pipe.recv()
        except (EOFError, ConnectionError):  # it died; the next command gets another
            self._process.join()
            code, self._process = self._process.exitcode, None
        except BaseException:  # nobody waits for it any longer
            self._process.kill()
            self._process = None
            raise
        finally:
            if Path(SAID).exists():
                print(Path(SAID).read_text(errors="replace"))
        assert code == 0, f"exit code {code}"

    def play_case(self, case: Case) -> Path:
        self.play(*case.words, f"output_dir={RUN}")
        return Path(RUN)


def _serve(pipe: Connection) -> None:
    for directory, words in iter(pipe.recv, None):
        os.chdir(directory)  # and never back: where it was may be gone by now
        with Path(SAID).open("wb") as said, _without_pictures():
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            try:
                code = command(list(words))
            except Exception:  # noqa: BLE001 - as if it were the command's own process
                traceback.print_exc()
                code = 1
            sys.stdout.flush()
            sys.stderr.flush()
        pipe.send(code)


@contextlib.contextmanager
def _without_pictures() -> Iterator[None]:
    """They take longer to draw than such a run to train."""

    def empty(figure: Figure, target: Any, **options: Any) -> None:
        if isinstance(target, str | Path):
            Path(target).touch()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", empty)
        yield


# Reading ----------------------------------------------------------------------------------------------------


def arrays_of(folder: Path) -> dict[str, Tensor]:
    """The final model, and what clients keep for themselves, by CLIENT/NAME."""
    last = max((folder / "checkpoints").iterdir(), key=lambda path: int(path.name))
    clients = last / "clients.safetensors"
    own = load_file(clients) if clients.exists() else {}
    return {**load_file(folder / "model.safetensors"), **{f"clients/{name}": own[name] for name in own}}


def digest(tensor: Tensor) -> str:
    found = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def figures_of(folder: Path) -> Found:
    """Rows, summary and the model's header, without times and places."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    with safe_open(folder / "model.safetensors", "pt") as file:
        header = file.metadata() or {}
    summary = {key: value for key, value in summary.items() if key not in NOT_RESULTS}
    return {"rows": [_timeless(row) for row in rows], "summary": _timeless(summary), "header": header}


def _timeless(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not TIMES.search(key)}


# Comparing --------------------------------------------------------------------------------------------------


def compare(recorded: Found, store: Mapping[str, Tensor], folder: Path, tolerance: float | None) -> None:
    """Without a tolerance: the same bits. With one: what can be told on another kind of machine.

    Names, shapes, dtypes, cohorts, stages, byte figures and counts are equal there too. Arrays are apart by
    no more than `tolerance` of what the rounds after the oldest checkpoint moved.
    """
    _compare_figures(recorded, figures_of(folder), tolerance)
    arrays = arrays_of(folder)
    assert list(arrays) == list(recorded["arrays"])
    if tolerance is None:
        changed = [name for name, value in arrays.items() if digest(value) != recorded["arrays"][name]]
        assert not changed, f"other bits in {', '.join(changed)}"
        return
    _compare_arrays({name: store[key] for name, key in recorded["arrays"].items()}, arrays, folder, tolerance)


def _compare_figures(recorded: Found, found: Found, tolerance: float | None) -> None:
    """What was recorded must be there; a rebuilt tree may say more in a row or a summary."""
    assert found["header"] == recorded["header"]
    assert len(found["rows"]) == len(recorded["rows"])
    places = [f"round {row['round']}" for row in recorded["rows"]] + ["summary"]
    now, then = ([*one["rows"], one["summary"]] for one in (found, recorded))
    for place, told, before in zip(places, now, then, strict=True):
        for key, value in before.items():
            assert key in told, f"{place} has no {key}"
            if key == "train_loss" and SURROGATE in told:
                same = told[key] + told[SURROGATE] == pytest.approx(value, rel=tolerance or 1e-9)
            elif tolerance is None:
                same = json.dumps(told[key]) == json.dumps(value)
            else:
                same = key in CHOSEN_ROUND or _alike(key, told[key], value, tolerance)
            assert same, f"{place}: {key} is {told[key]}, not {value}"


def _alike(key: str, now: Any, before: Any, tolerance: float) -> bool:
    if isinstance(before, dict):
        same = list(now) == list(before)
        return same and all(_alike(f"{key} {name}", now[name], before[name], tolerance) for name in before)
    if isinstance(before, list):
        same = len(now) == len(before)
        return same and all(
            _alike(key, one, other, tolerance) for one, other in zip(now, before, strict=True)
        )
    if not isinstance(before, float):
        return type(now) is type(before) and now == before
    if SHARES_OF_ROWS.search(key):  # they jump by a whole row, which may be a client's only one, at a tie
        return isinstance(now, float)
    return now == pytest.approx(before, rel=tolerance, abs=tolerance)


def _compare_arrays(
    before: Mapping[str, Tensor], now: Mapping[str, Tensor], folder: Path, tolerance: float
) -> None:
    for name, value in now.items():
        assert (value.dtype, value.shape) == (before[name].dtype, before[name].shape), name
    # Softmax ignores key biases: their gradient is rounding noise, which Adam turns into full steps.
    names = [name for name in now if not KEY_BIAS.search(name)]
    oldest = min((folder / "checkpoints").iterdir(), key=lambda path: int(path.name))
    start = load_file(oldest / "model.safetensors")
    moved = _norm([now[name].double() - start.get(name.rpartition("/")[2], ZERO).double() for name in names])
    size = moved or _norm([now[name].double() for name in names])  # where nobody sends, the model never moves
    apart = _norm([now[name].double() - before[name].double() for name in names])
    assert apart <= tolerance * size, f"{apart / size:.1e} of the update apart"


def _norm(parts: list[Tensor]) -> float:
    return float(torch.cat([part.flatten() for part in parts]).norm())
