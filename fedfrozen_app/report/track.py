"""Further destinations of a run's metrics: TensorBoard files in its folder and, on request, W&B and MLflow.

Each uses its own library, imported only on request. That library's settings (WANDB_MODE, MLFLOW_TRACKING_URI
and so on) decide where the results are stored and who may see them.
"""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

from fedfrozen_app.config import TrackConfig
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.files.disk import replace_file
from fedfrozen_app.files.readers import read_object
from fedfrozen_app.files.rows import Row
from fedfrozen_app.report.html import flat

Log = Callable[[dict[str, float], int], None]
OPTIONAL = ("wandb", "mlflow")
PARAMETERS_A_CALL = 100  # MLflow servers accept no more


def check_installed(settings: TrackConfig) -> None:
    """Check that the requested libraries are installed, before anything long starts."""
    for name in OPTIONAL:
        if getattr(settings, name) and find_spec(name) is None:
            raise UserError(_missing(name))


@dataclass
class Tracking:
    """A hook that is also a context manager; use the hook within the context."""

    settings: TrackConfig
    config: dict[str, Any]
    folder: Path
    first_round: int = 1
    _logs: list[Log] = field(default_factory=list)
    _open: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        with ExitStack() as stack:  # closes open loggers if the next cannot be opened
            for name, begin in (("tensorboard", _tensorboard), ("wandb", _wandb), ("mlflow", _mlflow)):
                if getattr(self.settings, name):
                    self._logs.append(stack.enter_context(begin(self)))
            self._open = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open.__exit__(kind, error, traceback)

    def after_round(self, strategy: object, row: Row) -> tuple[bool, Row]:
        for log in self._logs:
            log(scalars(row), row["round"])
        return False, {}

    # The ids of W&B and MLflow runs are kept in the folder, so that a resumed run continues them.

    def known(self, name: str) -> str | None:
        found = read_object(self.folder / "tracking.json") if self.first_round > 1 else None
        return None if found is None else found.get(name)

    def remember(self, name: str, value: str) -> None:
        path = self.folder / "tracking.json"
        others = read_object(path) or {}
        replace_file(path, json.dumps(others | {name: value}))


def scalars(row: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a row, nested ones as drift/kernel/rms; without per-client numbers."""
    found: dict[str, float] = {}
    for key, value in row.items():
        if key in ("round", "by_client", "selection", "epsilon"):
            continue
        if isinstance(value, dict):
            found |= scalars(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[f"{prefix}{key}"] = float(value)
    return found


@contextmanager
def _tensorboard(run: Tracking) -> Iterator[Log]:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from torch.utils.tensorboard import SummaryWriter

    folder, fresh = run.folder / "tensorboard", run.first_round == 1
    if fresh:  # like metrics.jsonl, which is emptied
        for path in folder.glob("events.out.tfevents.*"):
            path.unlink()
    purge = None if fresh else run.first_round  # repeated rounds are not shown twice
    threading.excepthook = _quiet_about_the_disk
    with SummaryWriter(str(folder), purge_step=purge, flush_secs=5) as writer:

        def log(metrics: dict[str, float], step: int) -> None:
            # One event for all metrics: one event each would take as long as a short round's aggregation.
            values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
            writer.file_writer.add_summary(Summary(value=values), step)

        yield log


_default_hook = threading.excepthook


def _quiet_about_the_disk(found: threading.ExceptHookArgs) -> None:
    """Ignore disk errors of TensorBoard's writer thread: the run itself reports a full disk in one
    sentence."""
    if not (issubclass(found.exc_type, OSError) and type(found.thread).__name__ == "_AsyncWriterThread"):
        _default_hook(found)


@contextmanager
def _wandb(run: Tracking) -> Iterator[Log]:
    wandb = _library("wandb")
    try:
        started = wandb.init(
            project=run.settings.project,
            name=run.folder.name,
            dir=str(run.folder),
            config=run.config,
            id=run.known("wandb"),
            resume="allow",
            settings=wandb.Settings(console="off"),  # console capture would conflict with the progress bar
        )
    except wandb.errors.Error as error:
        raise UserError(
            f"W&B did not start ({_line(error)}): run `wandb login`, set WANDB_MODE=offline, or leave "
            "track.wandb out."
        ) from error
    run.remember("wandb", started.id)
    with started:
        yield lambda metrics, step: started.log(metrics, step=step)


@contextmanager
def _mlflow(run: Tracking) -> Iterator[Log]:
    mlflow = _library("mlflow")
    known = run.known("mlflow")
    try:
        mlflow.set_experiment(run.settings.project)
        started = mlflow.start_run(run_id=known, run_name=None if known else run.folder.name)
        if known is None:
            settings = flat(run.config)
            for begin in range(0, len(settings), PARAMETERS_A_CALL):
                mlflow.log_params(dict(settings[begin : begin + PARAMETERS_A_CALL]))
    except mlflow.MlflowException as error:
        raise UserError(
            f"MLflow did not start ({_line(error)}): set MLFLOW_TRACKING_URI to a store that works, or leave "
            "track.mlflow out."
        ) from error
    run.remember("mlflow", started.info.run_id)
    with started:
        yield lambda metrics, step: mlflow.log_metrics(metrics, step=step)


def _library(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError as error:
        raise UserError(_missing(name)) from error


def _missing(name: str) -> str:
    return f"track.{name}=true needs {name}, which is not installed: pip install 'fedfrozen[{name}]'."


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
