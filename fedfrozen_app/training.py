"""The verbs that train a model, or need one that was trained: a run, resume, evaluate, export."""

import json
import logging
import shlex
import sys
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import load_file

from fedfrozen_app.config import (
    Config,
    absolute_paths,
    compose_config,
    device_of,
    quoted,
    read,
    resolved,
    settled,
    with_hydra,
)
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.errors import RunFailed, UserError
from fedfrozen_app.models.build import export_model
from fedfrozen_app.privacy.notes import model_metadata
from fedfrozen_app.report.console import closing_table
from fedfrozen_app.report.output import write_interrupted
from fedfrozen_app.runtime import checkpoint
from fedfrozen_app.runtime.app_folder import app_folder
from fedfrozen_app.runtime.deployed import run_deployed
from fedfrozen_app.runtime.inprocess import run_in_process
from fedfrozen_app.runtime.resident import Resident
from fedfrozen_app.runtime.seal import DAMAGED
from fedfrozen_app.runtime.simulation import run_app
from fedfrozen_app.runtime.superlink import show
from fedfrozen_app.runtime.track import check_installed
from fedfrozen_app.server_app import check_fits, majority_share
from fedfrozen_app.sweep import status
from fedfrozen_app.words import counted
from strategies import STRATEGIES

log = logging.getLogger(__name__)


def train(arguments: list[str]) -> None:
    """`fedfrozen [OVERRIDES]`: one run, or a Hydra multirun with -m."""
    if "-m" in arguments or "--multirun" in arguments:
        from fedfrozen_app.sweep.multirun import multirun

        multirun(arguments)
        return
    # Kept here, because Hydra would add a line of its own to an error.
    failed: list[Exception] = []
    begun = False

    def job(composed: DictConfig) -> float | None:
        nonlocal begun
        begun = True
        settings = HydraConfig.get()
        plain, overrides = settled(composed, settings.overrides.task)
        folder = Path(plain["output_dir"] or settings.runtime.output_dir).expanduser().resolve()
        try:
            _check_writable(folder)
            with status.recorded(folder, plain, overrides):
                config = read(plain)
                execute(config, plain, overrides, folder, fork_start(config))
        except (UserError, RunFailed) as error:
            failed.append(error)
        return None

    try:
        with_hydra(job, arguments)
    except OSError as error:
        if begun:
            raise
        raise _unwritable(error.filename, error) from error  # Hydra makes the folder before it calls the job
    if failed:
        raise failed[0]


def resume(arguments: list[str]) -> None:
    """`fedfrozen resume RUN [OVERRIDES]`: go on after the run's newest checkpoint, in the same folder."""
    run, extra = run_folder("resume", arguments)
    if own := [word for word in extra if word.startswith(("from=", "output_dir="))]:
        raise UserError(
            f"A run is resumed in its own folder, from its newest checkpoint: leave {own[0]} out, or begin "
            f"another run there with `fedfrozen from={run}/checkpoints/N output_dir=DIR`."
        )
    start = checkpoint.newest(run)
    words = start.overrides + extra
    composed, had = compose_config(words), start.config["strategy"]
    if start.row["stage"] == "frozen" and composed.num_rounds != start.config["num_rounds"]:
        # What was left open is a share of the rounds, and of more rounds could thaw it again.
        words += [
            f"strategy.{key}={had[key]}"
            for key, value in composed.strategy.items()
            if value is None and had.get(key)
        ]
        composed = compose_config(words)
    plain, overrides = settled(composed, words)
    config = read(plain | {"from": None})  # a fork goes on from its own rows, not its origin's
    before = status.read(run)
    # A run that stopped while it wrote its results has them written now.
    complete = before is None or before.state == "complete"
    if start.round > config.num_rounds or (start.round == config.num_rounds and complete):
        raise UserError(
            f"{run} has already finished its {counted(start.round, 'round')}: add num_rounds=N to go on to "
            "round N."
        )
    log.info("Going on after round %d.", start.round)
    with status.recorded(run, plain, overrides):
        execute(config, plain, overrides, run, start)


def evaluate(arguments: list[str]) -> None:
    """`fedfrozen evaluate RUN [OVERRIDES]`: judge the run's final model on its test set."""
    run, extra = run_folder("evaluate", arguments)
    resident = load_run(run, extra)
    with resident.only_global():
        figures = {f"test_{key}": value for key, value in resident.evaluate_test().items()}
    print(json.dumps({"run": str(run), "examples": len(resident.corpus.test), **figures}))


def export(arguments: list[str]) -> None:
    """`fedfrozen export RUN DIR`: the final model as a folder for transformers' `from_pretrained`."""
    run, rest = run_folder("export", arguments)
    if len(rest) != 1:
        raise UserError("Say where to: fedfrozen export RUN DIR.")
    resident = load_run(run, [])
    try:
        export_model(resident.model, Path(rest[0]), resident.corpus.classes)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{rest[0]} cannot be written ({reason}): give another folder.") from error
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
        state = checkpoint.newest_state(folder)
        lost = config.runtime.name == "flower" and state is not None and state["hooks"].get("private")
        again = f" Go on with: fedfrozen resume {shlex.quote(str(folder))}" if state and not lost else ""
        print(f"Interrupted. What was done is in {folder}.{again}", file=sys.stderr)
        raise
    Console().print(closing_table(summary, folder))
    return summary


def fork_start(config: Config) -> checkpoint.Checkpoint | None:
    """The checkpoint of another run that this one starts from."""
    if config.start_from is None:
        return None
    start = checkpoint.read(Path(config.start_from))
    if start.round >= config.num_rounds:
        raise UserError(
            f"from={config.start_from} was written after round {start.round}, so that num_rounds="
            f"{config.num_rounds} leaves nothing to train: raise num_rounds."
        )
    return start


def _run_with_flower(
    config: Config,
    plain: dict[str, Any],
    overrides: list[str],
    folder: Path,
    start: checkpoint.Checkpoint | None,
) -> dict[str, Any]:
    if start is not None and STRATEGIES[config.strategy["name"]].personal:
        checkpoint.check_private(start, in_process=False)  # rather than when all is up
    # Before anything long starts: whether the data are there and fill the clients.
    corpus = load_corpus(config)
    shares = share_out(corpus, config, config.num_clients)
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
    log.info("Starting Flower's simulation with %s; its logs go to %s.", counted(count, "node"), work)
    try:
        run_app(
            app_folder(work),
            {"overrides": shlex.join(words), "output-dir": str(folder)},
            num_supernodes=count,
            cpus_per_client=config.runtime.cpus_per_client,
            gpus_per_client=config.runtime.gpus_per_client,
            work_dir=work,
            on_line=show,
        )
    except KeyboardInterrupt:  # Flower ends the ServerApp's process, which is given no time to write
        personal = STRATEGIES[config.strategy["name"]].personal
        write_interrupted(
            folder,
            model_metadata(config.privacy),
            device=str(device_of(config.device)),
            majority=None if personal else majority_share(corpus.test.labels),
        )
        raise
    return json.loads((folder / "summary.json").read_text())


def run_folder(verb: str, arguments: list[str]) -> tuple[Path, list[str]]:
    if not arguments or ("=" in arguments[0] and not Path(arguments[0]).exists()):
        raise UserError(f"Say which run: fedfrozen {verb} RUN, where RUN is the folder of its results.")
    run = Path(arguments[0]).expanduser().resolve()
    if not run.is_dir():
        raise UserError(f"There is no run folder {arguments[0]}: give the folder that holds summary.json.")
    return run, arguments[1:]


def load_run(run: Path, extra: list[str]) -> Resident:
    """The run's model and data, loaded."""
    try:
        command = shlex.split(json.loads((run / "summary.json").read_text())["command"])
        model = load_file(run / "model.safetensors")
    except (SafetensorError, *DAMAGED) as error:
        raise UserError(f"{run} holds no finished run ({error}): give the folder of one.") from error
    config = read(resolved(compose_config(command[1:] + extra)) | {"from": None})
    corpus = load_corpus(config)
    resident = Resident(config, corpus, shares=share_out(corpus, config, config.num_clients))
    if STRATEGIES[config.strategy["name"]].personal and not resident.has_global:
        raise UserError(
            f"The clients of {run} shared nothing, so that it has no model of its own: how each of theirs "
            "does is in its personal.json, which a run with personal=true writes."
        )
    check_fits(model, resident.exchanged)
    resident.load(model, {})
    return resident


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise _unwritable(folder, error) from error


def _unwritable(folder: Path | str, error: OSError) -> UserError:
    return UserError(
        f"The output folder {folder} cannot be written ({error.strerror}): "
        "set output_dir=DIR to one that can."
    )
