"""`fedfrozen search [--trials N] [--jobs N] [OVERRIDES]`: settings chosen by Optuna, by validation accuracy.

Values to search over are written as Hydra's sweeps are: client.batch_size=8,16,32 chooses,
'client.lr=interval(1e-4,1e-1)' draws between, 'client.lr=tag(log,interval(1e-4,1e-1))' on a log scale, and
'num_clients=range(5,20)' takes a whole number.

There is no database: the sampler is seeded and finished runs are kept, so the same command gets the
same results, proposes the same trials, and continues where it stopped.
"""

import json
import shlex
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from joblib import Parallel, delayed

from fedfrozen_app.config import compose_run
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.logs import prepare_logging
from fedfrozen_app.core.terminal import Console
from fedfrozen_app.core.verb_table import parser
from fedfrozen_app.files.disk import replace_file
from fedfrozen_app.sweep.member import Asked, run_member
from fedfrozen_app.sweep.multirun import check_place, disk_explained, new_token, raise_failures, sweep_folder
from fedfrozen_app.sweep.sweep_table import members, sweep_table

Ask = Callable[[Any], str]  # an Optuna trial in, an override out


def search(arguments: list[str]) -> None:
    given, unknown = parser("search").parse_known_intermixed_args(arguments)
    overrides = given.overrides
    if given.trials < 1 or given.jobs < 1 or given.seed < 0:
        raise UserError("--trials and --jobs must be at least 1, and --seed at least 0.")
    if unknown:
        raise UserError(f"Searching takes no {unknown[0]}: see fedfrozen search --help.")
    if find_spec("optuna") is None:
        raise UserError('Searching needs Optuna: pip install "fedfrozen[search]".')
    folder, overrides = sweep_folder(overrides)
    parsed = OverridesParser.create().parse_overrides(overrides)
    asks = [ask for word in parsed if (ask := question(word)) is not None]
    fixed = [str(word.input_line) for word in parsed if not word.is_sweep_override()]
    if not asks:
        raise UserError("There is nothing to search: give values, such as client.batch_size=8,16,32.")
    compose_run(fixed)  # a typo fails here, not in every trial
    with disk_explained(folder):
        check_place(folder)
        _search(given, folder, fixed, asks)


def _search(given: Any, folder: Path, fixed: list[str], asks: list[Ask]) -> None:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=given.seed))
    token = new_token()
    for first in range(0, given.trials, given.jobs):
        numbers = range(first, min(first + given.jobs, given.trials))
        trials = [study.ask() for _ in numbers]
        lines = [[*fixed, *(ask(trial) for ask in asks)] for trial in trials]
        # One at a time stays in this process.
        values = Parallel(n_jobs=given.jobs)(
            delayed(attempt)(line, folder / str(number), token)
            for line, number in zip(lines, numbers, strict=True)
        )
        for trial, value in zip(trials, values, strict=True):
            state = optuna.trial.TrialState.COMPLETE if value is not None else optuna.trial.TrialState.FAIL
            study.tell(trial, value, state)
    found = members(folder, token)
    console = Console()
    console.print(sweep_table(folder, found))
    done = [trial for trial in study.trials if trial.value is not None]
    if done:
        best = study.best_trial
        line = [*fixed, *(ask(optuna.trial.FixedTrial(best.params)) for ask in asks)]
        result = {
            "best_val_accuracy": best.value,
            "overrides": line,
            "command": shlex.join(["fedfrozen", *line]),
        }
        replace_file(folder / "best.json", json.dumps(result, indent=2))
        console.print(
            f"Best validation accuracy {best.value:.4f} by: {result['command']}",
            highlight=False,
            soft_wrap=True,
        )
    raise_failures(found)


def attempt(line: list[str], folder: Path, token: str) -> float | None:
    prepare_logging()
    asked = Asked(compose_run(line).with_absolute_paths(), folder)
    return run_member(asked, token, wait=True)


def question(word: Override) -> Ask | None:
    """How a trial samples this key; None for a fixed override."""
    if not word.is_sweep_override():
        return None
    key, value = str(word.get_key_element()), word.value()
    if isinstance(value, IntervalSweep):
        low, high, log = value.start or 0, value.end or 0, "log" in value.tags
        if not low < high or (log and low <= 0):
            raise UserError(
                f"{word.input_line} is no interval: give a lower end first, above 0 for a log scale."
            )
        return lambda trial: f"{key}={trial.suggest_float(key, low, high, log=log)}"
    if isinstance(value, RangeSweep | ChoiceSweep):
        choices = list(word.sweep_string_iterator())
        return lambda trial: f"{key}={trial.suggest_categorical(key, choices)}"
    raise UserError(f"{word.input_line} cannot be searched: use a,b,c or interval(low,high).")
