"""`run`, `sweep`, `resume`, `load` and `compare`: the command's verbs as functions."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any

from fedfrozen_app.commands.api.own import is_settings, overrides_for
from fedfrozen_app.commands.api.results import Comparison, Run, Sweep, folders_of
from fedfrozen_app.commands.training import resume as resume_command
from fedfrozen_app.config import check_keys, compose_run, quoted
from fedfrozen_app.core.conf_files import choices
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.logs import prepare_logging
from fedfrozen_app.core.own_objects import handed_down, is_here
from fedfrozen_app.data.sources.python_rows import is_table
from fedfrozen_app.files import status
from fedfrozen_app.files.folders import check_free
from fedfrozen_app.files.kinds import RUN, kind_of
from fedfrozen_app.files.plain_files import check_plain
from fedfrozen_app.launch import check_writable, execute
from fedfrozen_app.report.compare.collect import collect
from fedfrozen_app.run.job import Job, fork_start
from fedfrozen_app.run.own_record import read_own_record
from fedfrozen_app.sweep.multirun import multirun, sweep_folder

OBJECTS = ("dataset", "model", "strategy", "algorithm")  # keywords that take Python objects


def run(*overrides: str, **keys: Any) -> Run:
    """Train, as `fedfrozen OVERRIDES` would; settings also by keyword: `num_rounds=10`, `strategy="fedavg"`.

    `dataset` may be a DataFrame, a `datasets.Dataset`, a torch `Dataset`, `(inputs, labels)`, a dictionary of
    columns, or a dictionary of these by split; `model` a module with roles; `strategy` and `algorithm`
    classes.
    """
    prepare()
    check_one_method(overrides, keys)
    words = [*overrides, *(word for key, value in keys.items() for word in spelled(key, value))]
    check_keys(words)
    composed = compose_run(words).with_absolute_paths()
    config = composed.config
    folder = Path(config.output_dir).expanduser().resolve() if config.output_dir else new_folder()
    check_writable(folder)
    check_free(folder, overwrite=config.overwrite)
    with status.recorded(folder, composed.resolved, composed.overrides):
        execute(Job(composed, folder, fork_start(config)))
    return Run(folder)


def sweep(*overrides: str, **keys: Any) -> Sweep:
    """A run for each combination, as `fedfrozen -m OVERRIDES`; a list is swept over: `seed=[0, 1, 2]`."""
    prepare()
    check_one_method(overrides, keys)
    words = list(overrides)
    for key, value in keys.items():
        words += swept(key, value) if is_swept(key, value) else spelled(key, value)
    check_keys(words)
    folder, _ = sweep_folder(words)
    with own_command_line(), handed_down() if has_launcher(words) else nullcontext():
        multirun(words)
    return Sweep(folder, compare)


def load(folder: str | Path, **objects: Any) -> Run | Sweep:
    """What a folder holds: a run, or the runs of a sweep.

    In another process, `model()` needs the Python objects that the run was given: `dataset=frame`.
    """
    place = Path(folder).expanduser().resolve()
    if not place.is_dir():
        raise UserError(f"There is no run folder {folder}: give the folder that holds summary.json.")
    check_plain(place)
    if kind_of(place) == RUN:
        give_again([place], objects)
        return Run(place)
    found = Sweep(place, compare)
    if not found.runs:
        raise UserError(f"{folder} holds no run: give the folder of a run, or of a sweep.")
    give_again([run.folder for run in found.runs], objects)
    return found


def resume(folder: str | Path, *overrides: str, **keys: Any) -> Run:
    """Go on after the run's newest checkpoint, as `fedfrozen resume FOLDER OVERRIDES`: `num_rounds=20`.

    In another process, pass again the Python objects that the run was given: `dataset=frame`.
    """
    prepare()
    place = Path(folder).expanduser().resolve()
    objects = {key: value for key, value in keys.items() if is_object(key, value)}
    if place.is_dir():
        give_again([place], objects)
    settings = {key: value for key, value in keys.items() if key not in objects}
    resume_command(
        [str(folder), *overrides, *(w for key, value in settings.items() for w in spelled(key, value))]
    )
    return Run(place)


def give_again(runs: Sequence[Path], objects: Mapping[str, Any]) -> None:
    """Register objects under the names that these runs use for them, which derive from their content."""
    recorded = [one for run in runs for one in read_own_record(run)]
    for argument, thing in objects.items():
        if not is_object(argument, thing):
            raise UserError(f"{argument} is no Python object to pass again: set it with fedfrozen.resume.")
        had = [one for one in recorded if one.argument == argument]
        if not had:
            raise UserError(f"This run was not given {argument} as a Python object: leave {argument} out.")
        overrides_for(argument, thing)
        if not any(is_here(one) for one in had):
            raise UserError(
                f"This {argument} is not what the run was made with, {had[0].described}: its rows, weights "
                "or code differ, or a class was compiled by another version of Python."
            )


def check_one_method(overrides: Sequence[str], keys: Mapping[str, Any]) -> None:
    named = "strategy" in keys or any(word.startswith("strategy=") for word in overrides)
    if "algorithm" in keys and named:
        raise UserError(
            "algorithm=... is FedAvg with these clients: leave strategy out, or give a strategy class that "
            "names the algorithm (`algorithm = Mine`)."
        )


def is_object(key: str, value: Any) -> bool:
    """Whether a keyword argument is an object, not a name or a setting."""
    return key in OBJECTS and not isinstance(value, str) and not is_settings(key, value)


def is_swept(key: str, value: Any) -> bool:
    return isinstance(value, (list, tuple, range)) and not (key == "dataset" and is_table(value))


def has_launcher(words: Sequence[str]) -> bool:
    """Whether a launcher runs them in other processes."""
    return any(word.startswith(("hydra/launcher=", "hydra.launcher.")) for word in words)


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
    """A keyword argument as words of the command line."""
    if (key in choices() or key == "algorithm") and not is_settings(key, value):
        return overrides_for(key, value)
    key = "from" if key == "start_from" else key
    if isinstance(value, dict):
        return [word for inner, found in value.items() for word in spelled(f"{key}.{inner}", found)]
    return [quoted(key, str(value)) if isinstance(value, (str, Path)) else f"{key}={plain(value)}"]


def swept(key: str, values: Sequence[Any]) -> list[str]:
    each = [spelled(key, value) for value in values]
    if any(len(words) != 1 for words in each):
        raise UserError(f"{key}: a data set or a model of your own cannot be swept over: call run for each.")
    names = dict.fromkeys(word.partition("=")[0] for (word,) in each)  # algorithm=[A, B] sweeps strategies
    return [f"{next(iter(names), key)}={','.join(word.partition('=')[2] for (word,) in each)}"]


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
    """outputs/DATE/TIME, like the command's; with a number appended if that exists."""
    now = datetime.now()
    usual = Path("outputs") / f"{now:%Y-%m-%d}" / f"{now:%H-%M-%S}"
    number, folder = 1, usual
    while folder.exists():
        number += 1
        folder = usual.with_name(f"{usual.name}-{number}")
    return folder.resolve()


@contextmanager
def own_command_line() -> Iterator[None]:
    """Hydra reads sys.argv: within the block it is ours; a notebook's is restored afterwards."""
    before = sys.argv
    try:
        yield
    finally:
        sys.argv = before
