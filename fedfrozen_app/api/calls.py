"""`run`, `sweep`, `load` and `compare`: what the command does, as calls."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from fedfrozen_app.api.own import is_settings, overrides_for
from fedfrozen_app.api.results import Comparison, Run, Sweep, folders_of
from fedfrozen_app.compare.collect import collect
from fedfrozen_app.conf_files import choices
from fedfrozen_app.config import check_keys, compose_config, quoted, read, with_absolute_paths
from fedfrozen_app.errors import UserError
from fedfrozen_app.files import status
from fedfrozen_app.files.folders import check_free
from fedfrozen_app.launch import check_writable, execute
from fedfrozen_app.logs import prepare_logging
from fedfrozen_app.run.job import Job, fork_start
from fedfrozen_app.sweep.multirun import multirun, sweep_folder


def run(*overrides: str, **keys: Any) -> Run:
    """Train, as `fedfrozen OVERRIDES` would; settings also by keyword: `num_rounds=10`, `strategy="fedavg"`.

    `dataset` may be a `datasets.Dataset` or `DatasetDict`, `model` a module with roles, `strategy` a class.
    """
    prepare()
    words = [*overrides, *(word for key, value in keys.items() for word in spelled(key, value))]
    check_keys(words)
    resolved_config, words = with_absolute_paths(compose_config(words), words)
    config = read(resolved_config)
    folder = Path(config.output_dir).expanduser().resolve() if config.output_dir else new_folder()
    check_writable(folder)
    check_free(folder, overwrite=config.overwrite)
    with status.recorded(folder, resolved_config, words):
        execute(Job(config, resolved_config, words, folder, fork_start(config)))
    return Run(folder)


def sweep(*overrides: str, **keys: Any) -> Sweep:
    """A run for each combination, as `fedfrozen -m OVERRIDES`; a list is swept over: `seed=[0, 1, 2]`."""
    prepare()
    words = list(overrides)
    for key, value in keys.items():
        words += swept(key, value) if isinstance(value, (list, tuple, range)) else spelled(key, value)
    check_keys(words)
    folder, _ = sweep_folder(words)
    with own_command_line():
        multirun(words)
    return Sweep(folder, compare)


def load(folder: str | Path) -> Run | Sweep:
    """What a folder holds: a run, or the runs of a sweep."""
    place = Path(folder).expanduser().resolve()
    if not place.is_dir():
        raise UserError(f"There is no run folder {folder}: give the folder that holds summary.json.")
    if (place / "metrics.jsonl").is_file():
        return Run(place)
    found = Sweep(place, compare)
    if not found.runs:
        raise UserError(f"{folder} holds no run: give the folder of a run, or of a sweep.")
    return found


def compare(
    *things: Run | Sweep | str | Path,
    baseline: str | Sequence[str] = (),
    target: float | None = None,
    figure: str = "final",
) -> Comparison:
    """Compare runs, sweeps or folders that hold them; `baseline` such as "strategy=fedavg"."""
    if not things:
        raise UserError("Say what to compare: runs, sweeps or folders that hold them.")
    words = baseline.split() if isinstance(baseline, str) else baseline
    return Comparison(collect(folders_of(things), baseline=words, target=target, tested=figure))


def spelled(key: str, value: Any) -> list[str]:
    """A keyword as words of the command line."""
    if key in choices() and not is_settings(value):
        return overrides_for(key, value)
    key = "from" if key == "start_from" else key
    if isinstance(value, dict):
        return [word for inner, found in value.items() for word in spelled(f"{key}.{inner}", found)]
    return [quoted(key, str(value)) if isinstance(value, (str, Path)) else f"{key}={plain(value)}"]


def swept(key: str, values: Sequence[Any]) -> list[str]:
    each = [spelled(key, value) for value in values]
    if any(len(words) != 1 for words in each):
        raise UserError(f"{key}: a data set or a model of your own cannot be swept over: call run for each.")
    return [f"{key}={','.join(word.partition('=')[2] for (word,) in each)}"]


def plain(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple, range)):
        return f"[{','.join(map(plain, value))}]"
    return str(value)


def prepare() -> None:
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    prepare_logging()


def new_folder() -> Path:
    """outputs/DATE/TIME, as the command's; where that is taken, with a number behind."""
    now = datetime.now()
    usual = Path("outputs") / f"{now:%Y-%m-%d}" / f"{now:%H-%M-%S}"
    number, folder = 1, usual
    while folder.exists():
        number += 1
        folder = usual.with_name(f"{usual.name}-{number}")
    return folder.resolve()


@contextmanager
def own_command_line() -> Iterator[None]:
    """Hydra reads the process's words: those of a notebook come back afterwards."""
    before = sys.argv
    try:
        yield
    finally:
        sys.argv = before
