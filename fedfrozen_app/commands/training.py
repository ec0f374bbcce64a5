"""The verbs that train a model, or need one that was trained: a run, resume, evaluate, export."""

import json
import logging
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from safetensors import SafetensorError

from fedfrozen_app import conf_files, registry
from fedfrozen_app.config import Config, compose_config, read, resolved, with_absolute_paths, with_hydra
from fedfrozen_app.errors import RunFailed, UserError
from fedfrozen_app.files import checkpoint, status
from fedfrozen_app.files.disk import whole_folder
from fedfrozen_app.files.folders import check_free
from fedfrozen_app.launch import check_writable, execute, load_run, run_folder, unwritable
from fedfrozen_app.report.console import show_end
from fedfrozen_app.run.job import Job, as_it_was, fork_start
from fedfrozen_app.verb_table import parse
from fedfrozen_app.words import counted

log = logging.getLogger(__name__)
DETACH, STOP = "--detach", "--stop"


def train(arguments: list[str]) -> None:
    """`fedfrozen [OVERRIDES]`: one run, or a Hydra multirun with -m."""
    if "-m" in arguments or "--multirun" in arguments:
        from fedfrozen_app.sweep.multirun import multirun

        multirun(arguments)
        return
    detach = DETACH in arguments
    arguments = [word for word in arguments if word != DETACH]
    # Kept here, because Hydra would add a line of its own to an error.
    failed: list[Exception] = []
    started = False

    def job(composed: DictConfig) -> float | None:
        nonlocal started
        started = True
        settings = HydraConfig.get()
        resolved_config, overrides = with_absolute_paths(composed, settings.overrides.task)
        folder = Path(resolved_config["output_dir"] or settings.runtime.output_dir).expanduser().resolve()
        try:
            check_writable(folder)
            check_free(folder, overwrite=bool(resolved_config["overwrite"]))
            if line := what_was_brought(settings.runtime.choices, settings.overrides.task):
                log.info(line)
            with status.recorded(folder, resolved_config, overrides):
                config = read(resolved_config)
                check_detach(config, detach)
                execute(Job(config, resolved_config, overrides, folder, fork_start(config), detach))
        except status.Detached as goes_on:
            print(goes_on)
        except (UserError, RunFailed) as error:
            failed.append(error)
        return None

    try:
        with_hydra(job, arguments)
    except OSError as error:
        if started:
            raise
        raise unwritable(error.filename, error) from error  # Hydra makes the folder before it calls the job
    if failed:
        raise failed[0]


def what_was_brought(choices: Mapping[str, Any], overrides: Sequence[str]) -> str:
    """What a chosen strategy or dataset took with it, for somebody who did not name it; else ""."""
    named = {word.partition("=")[0] for word in overrides}
    if "experiment" in named:
        return ""
    brought = [
        f"{group}={choices[group]}"
        for group, usual in conf_files.usual().items()
        if group not in named and choices[group] != usual
    ]
    askers = [f"{group}={choices[group]}" for group in ("strategy", "dataset") if group in named]
    if not brought or not askers:
        return ""
    return f"Using {' and '.join(brought)}, which {' and '.join(askers)} brings: name others to replace them."


def resume(arguments: list[str]) -> None:
    """`fedfrozen resume RUN [OVERRIDES]`: go on after the run's newest checkpoint, in the same folder."""
    flags = {word for word in arguments if word in (DETACH, STOP)}
    run, extra = run_folder("resume", [word for word in arguments if word not in flags])
    if own := [word for word in extra if word.startswith(("from=", "output_dir="))]:
        raise UserError(
            f"A run is resumed in its own folder, from its newest checkpoint: leave {own[0]} out, or begin "
            f"another run there with `fedfrozen from={run}/checkpoints/N output_dir=DIR`."
        )
    start = checkpoint.newest(run)
    overrides = as_it_was(start.overrides, start.config) + extra
    composed = compose_config(overrides)
    if composed.num_rounds != start.config["num_rounds"]:
        settings = registry.find("strategies", str(composed.strategy.name)).Settings
        holds = settings.kept_by(start.config["strategy"], start.row)
        overrides += [
            f"strategy.{key}={holds[key]}"
            for key, value in composed.strategy.items()
            if value is None and holds.get(key)
        ]
        composed = compose_config(overrides)
    resolved_config, overrides = with_absolute_paths(composed, overrides)
    config = read(resolved_config | {"from": None})  # a fork goes on from its own rows, not its origin's
    before = status.read(run)
    # A run that stopped while it wrote its results has them written now.
    complete = before is None or before.state == "complete"
    if start.round > config.num_rounds or (start.round == config.num_rounds and complete):
        raise UserError(
            f"{run} has already finished its {counted(start.round, 'round')}: add num_rounds=N to go on to "
            "round N."
        )
    check_detach(config, DETACH in flags)
    if before is not None and before.flower_run and config.runtime.name == "deployed":
        end_earlier(config, run, before.flower_run, stop=STOP in flags)
    status.check_unowned(run)
    start = checkpoint.newest(run)  # a run that was still going has perhaps written another
    now = status.read(run)
    if now is not None and now != before and now.state == "complete" and start.round >= config.num_rounds:
        log.info("%s has finished by itself meanwhile.", run)
        return
    log.info("Going on after round %d.", start.round)
    try:
        with status.recorded(run, resolved_config, overrides):
            execute(Job(config, resolved_config, overrides, run, start, DETACH in flags))
    except status.Detached as goes_on:
        print(goes_on)


def end_earlier(config: Config, run: Path, flower_run: int, *, stop: bool) -> None:
    """A run has one owner: what the SuperLink still runs of it is watched or stopped, never run beside."""
    from fedfrozen_app.flower.deployed import connect, stop_run

    connection = connect(config, run)
    if not connection.is_going(flower_run):
        return
    if not stop:
        place = shlex.quote(str(run))
        raise UserError(
            f"{run} is still going, as Flower's run {flower_run}: watch it with fedfrozen attach {place}, or "
            f"stop it first, fedfrozen resume {place} {STOP}."
        )
    stop_run(connection, config, run, flower_run)


def attach(arguments: list[str]) -> None:
    """`fedfrozen attach RUN [--on-interrupt detach|stop] [--stop]`: watch a deployed run that is going."""
    from fedfrozen_app.flower.deployed import connect, follow_to_end, stop_run

    given = parse("attach", arguments)
    run, _ = run_folder("attach", [given.run])
    known = status.read(run)
    if known is None or not known.flower_run:
        raise UserError(f"{run} was not handed in to a SuperLink: fedfrozen watch {run} shows any run.")
    config = read(resolved(compose_config(known.overrides)) | {"from": None})
    connection = connect(config, run)
    if not connection.is_going(known.flower_run):
        raise UserError(f"Flower's run {known.flower_run} has ended ({known.state}): see {run}/report.html.")
    if given.stop:
        stop_run(connection, config, run, known.flower_run)
        print(f"Stopped. Go on with: fedfrozen resume {shlex.quote(str(run))}")
        return
    try:
        with status.concluded(run):
            summary = follow_to_end(
                connection, config, run, known.flower_run, on_interrupt=given.on_interrupt
            )
    except status.Detached as goes_on:
        print(goes_on)
        return
    show_end(summary, run)


def check_detach(config: Config, detach: bool) -> None:
    if detach and config.runtime.name != "deployed":
        raise UserError(f"{DETACH} needs a SuperLink that goes on by itself: use it with runtime=deployed.")


def evaluate(arguments: list[str]) -> None:
    """`fedfrozen evaluate RUN [OVERRIDES]`: judge the run's final model on its test set."""
    run, extra = run_folder("evaluate", arguments)
    resident = load_run(run, extra)
    with resident.only_global():
        figures = {f"test_{key}": value for key, value in resident.evaluate_test().items()}
    print(json.dumps({"run": str(run), "examples": len(resident.corpus.test), **figures}))


def export(arguments: list[str]) -> None:
    """`fedfrozen export RUN DIR [--merge]`: the final model as a folder for `from_pretrained`."""
    merge = "--merge" in arguments
    run, rest = run_folder("export", [word for word in arguments if word != "--merge"])
    if len(rest) != 1:
        raise UserError("Say where to: fedfrozen export RUN DIR.")
    resident, target = load_run(run, []), Path(rest[0]).expanduser().resolve()
    if target.is_file():
        raise UserError(f"{rest[0]} is a file: give a folder.")
    parts = resident.wrapper.merges and not merge
    if merge and not resident.wrapper.merges:
        raise UserError(f"{run} has no adapters to merge: leave --merge out.")
    try:
        with whole_folder(target) as part:
            resident.export(part, merged=not parts)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{rest[0]} cannot be written ({reason}): give another folder.") from error
    loader = "PeftModel.from_pretrained, on the model it was trained on" if parts else "from_pretrained"
    print(f"Wrote {rest[0]}: load it with {'peft' if parts else 'transformers'}'s {loader}.")
