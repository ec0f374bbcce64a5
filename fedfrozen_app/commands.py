"""What the command's verbs do."""

import importlib
import json
import logging
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from safetensors.torch import load_file

from fedfrozen_app.config import (
    Config,
    absolute_paths,
    compose_config,
    conf_dir,
    quoted,
    read,
    resolved,
    sentence,
)
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.errors import UserError
from fedfrozen_app.models.build import export_model
from fedfrozen_app.report.console import closing_table
from fedfrozen_app.runtime import checkpoint
from fedfrozen_app.runtime.deployed import run_deployed
from fedfrozen_app.runtime.inprocess import run_in_process
from fedfrozen_app.runtime.resident import Resident
from fedfrozen_app.runtime.simulation import SimulationFailed, app_folder, run_app, show
from fedfrozen_app.runtime.track import check_installed
from fedfrozen_app.server_app import RunFailed
from fedfrozen_app.sweep.status import SweepFailed, recorded

log = logging.getLogger(__name__)
FAILURES = (RunFailed, SimulationFailed, SweepFailed)

# verb: where its function lies. It takes the words after the verb; imported only when it is called.
VERBS = {
    "resume": "fedfrozen_app.commands:resume",
    "evaluate": "fedfrozen_app.commands:evaluate",
    "export": "fedfrozen_app.commands:export",
    "compare": "fedfrozen_app.compare.command:compare",
    "search": "fedfrozen_app.sweep.search:search",
    "plan": "fedfrozen_app.housekeeping.plan:plan",
    "list": "fedfrozen_app.housekeeping.runs:list_runs",
    "show": "fedfrozen_app.housekeeping.runs:show_run",
    "doctor": "fedfrozen_app.housekeeping.doctor:doctor",
    "completion": "fedfrozen_app.housekeeping.completion:completion",
    "report": "fedfrozen_app.report.watch:report",
    "watch": "fedfrozen_app.report.watch:watch",
    "theory": "fedfrozen_app.theory.command:theory",
    "site": "fedfrozen_app.sites.verbs:site",
    "provision": "fedfrozen_app.sites.provision:provision",
}


def dispatch(arguments: list[str]) -> int:
    """Carry out a command line; 1 when the run it started failed."""
    verb, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    try:
        if verb in VERBS:
            module, _, function = VERBS[verb].partition(":")
            getattr(importlib.import_module(module), function)(rest)
        else:
            train(arguments)
    except FAILURES as error:
        print(f"fedfrozen: the run failed. {error}", file=sys.stderr)
        return 1
    return 0


def train(arguments: list[str]) -> None:
    """`fedfrozen [OVERRIDES]`: one run, or a Hydra multirun with -m."""
    if "-m" in arguments or "--multirun" in arguments:
        from fedfrozen_app.sweep.multirun import multirun

        multirun(arguments)
        return
    # Kept here, because Hydra would add a line of its own to an error.
    failed: list[Exception] = []

    def job(composed: DictConfig) -> float | None:
        plain = resolved(composed)
        settings = HydraConfig.get()
        overrides = list(settings.overrides.task)
        folder = Path(plain["output_dir"] or settings.runtime.output_dir).resolve()
        try:
            _check_writable(folder)
            with recorded(folder, plain, overrides):
                config = read(plain)
                start = checkpoint.read(Path(config.start_from)) if config.start_from else None
                execute(config, plain, overrides, folder, start)
        except (UserError, *FAILURES) as error:
            failed.append(error)
        return None

    with_hydra(job, arguments)
    if failed:
        raise failed[0]


def with_hydra(job: Callable[[DictConfig], float | None], arguments: list[str]) -> None:
    """Let Hydra read the command line and call `job`; what it cannot compose is a `UserError`."""
    sys.argv = ["fedfrozen", *arguments]
    try:
        hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(job)()
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(sentence(error)) from error


def resume(arguments: list[str]) -> None:
    """`fedfrozen resume RUN [OVERRIDES]`: go on after the run's newest checkpoint, in the same folder."""
    run, extra = _run_folder("resume", arguments)
    start = checkpoint.newest(run)
    overrides = start.overrides + extra
    plain = resolved(compose_config(overrides))
    config = replace(read(plain), start_from=None)  # a fork goes on from its own rows, not its origin's
    if start.round >= config.num_rounds:
        raise UserError(
            f"{run} has already finished its {start.round} rounds: add num_rounds=N to go on to round N."
        )
    log.info("Going on after round %d.", start.round)
    with recorded(run, plain, overrides):
        execute(config, plain, overrides, run, start)


def evaluate(arguments: list[str]) -> None:
    """`fedfrozen evaluate RUN [OVERRIDES]`: judge the run's final model on its test set."""
    run, extra = _run_folder("evaluate", arguments)
    resident = _trained(run, extra)
    figures = {f"test_{key}": value for key, value in resident.evaluate_test().items()}
    print(json.dumps({"run": str(run), "examples": len(resident.corpus.test), **figures}))


def export(arguments: list[str]) -> None:
    """`fedfrozen export RUN DIR`: the final model as a folder for transformers' `from_pretrained`."""
    run, rest = _run_folder("export", arguments)
    if len(rest) != 1:
        raise UserError("Say where to: fedfrozen export RUN DIR.")
    resident = _trained(run, [])
    export_model(resident.model, Path(rest[0]), resident.corpus.classes)
    print(f"Wrote {rest[0]}: load it with transformers' from_pretrained.")


def execute(
    config: Config,
    plain: dict[str, Any],
    overrides: list[str],
    folder: Path,
    start: checkpoint.Checkpoint | None,
) -> dict[str, Any]:
    """Run in the chosen runtime, and show how it ended."""
    check_installed(config.track)
    _check_writable(folder)
    try:
        if config.runtime.name == "flower":
            summary = _run_with_flower(config, plain, overrides, folder, start)
        elif config.runtime.name == "deployed":
            summary = run_deployed(config, plain, overrides, folder, start)
        else:
            summary = run_in_process(config, plain, overrides, folder, start)
    except KeyboardInterrupt:
        done = checkpoint.numbers(folder / "checkpoints")
        again = f" Go on with: fedfrozen resume {shlex.quote(str(folder))}" if done else ""
        print(f"Interrupted. What was done is in {folder}.{again}", file=sys.stderr)
        raise
    Console().print(closing_table(summary, folder))
    return summary


def _run_with_flower(
    config: Config,
    plain: dict[str, Any],
    overrides: list[str],
    folder: Path,
    start: checkpoint.Checkpoint | None,
) -> dict[str, Any]:
    if start is not None and start.clients:
        raise UserError(
            "Clients of this run keep private state, which Flower's simulation forgets between runs: "
            "resume it with runtime=inprocess."
        )
    # Before anything long starts: whether the data are there and fill the clients.
    shares = share_out(load_corpus(config), config, config.num_clients)
    assert shares.partition is not None
    count = len(shares.partition.indices)
    paths = absolute_paths(plain)
    if start is not None:
        paths["from"] = str(
            (folder if config.start_from is None else Path(paths["from"]).parents[1]).resolve()
        )
        paths["from"] += f"/checkpoints/{start.round}"
    words = [
        *overrides,
        *(quoted(key, value) for key, value in paths.items()),
        f"num_clients={count}",
    ]
    work = folder / "flower"
    log.info("Starting Flower's simulation with %d nodes; its logs go to %s.", count, work)
    run_app(
        app_folder(work),
        {"overrides": shlex.join(words), "output-dir": str(folder)},
        num_supernodes=count,
        cpus_per_client=config.runtime.cpus_per_client,
        gpus_per_client=config.runtime.gpus_per_client,
        work_dir=work,
        on_line=show,
    )
    return json.loads((folder / "summary.json").read_text())


def _run_folder(verb: str, arguments: list[str]) -> tuple[Path, list[str]]:
    if not arguments or "=" in arguments[0]:
        raise UserError(f"Say which run: fedfrozen {verb} RUN, where RUN is the folder of its results.")
    run = Path(arguments[0]).expanduser().resolve()
    if not run.is_dir():
        raise UserError(f"There is no run folder {arguments[0]}: give the folder that holds summary.json.")
    return run, arguments[1:]


def _trained(run: Path, extra: list[str]) -> Resident:
    """The run's model and data, loaded."""
    try:
        command = shlex.split(json.loads((run / "summary.json").read_text())["command"])
        model = load_file(run / "model.safetensors")
    except (OSError, KeyError, json.JSONDecodeError) as error:
        raise UserError(f"{run} holds no finished run ({error}): give the folder of one.") from error
    config = read(resolved(compose_config(command[1:] + extra)))
    corpus = load_corpus(config)
    resident = Resident(config, corpus, shares=share_out(corpus, config, config.num_clients))
    resident.load(model, {})
    return resident


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"The output folder {folder} cannot be written ({error.strerror}): "
            "set output_dir=DIR to one that can."
        ) from error
