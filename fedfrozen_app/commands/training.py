"""The verbs that train a model or use a trained one: run, resume, evaluate, export."""

import json
import logging
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from safetensors import SafetensorError

from fedfrozen_app.config import ComposedConfig, Config, compose_run, with_hydra
from fedfrozen_app.config.compose import run_in_folder
from fedfrozen_app.core import conf_files, registry
from fedfrozen_app.core.errors import RunFailed, UserError
from fedfrozen_app.core.formatting import counted
from fedfrozen_app.core.verb_table import parse
from fedfrozen_app.core.verbs.train_verbs import DETACH, STOP
from fedfrozen_app.core.verbs.verb import TRUST
from fedfrozen_app.files import checkpoint, lease, status
from fedfrozen_app.files.checkpoint import Checkpoint
from fedfrozen_app.files.disk import whole_folder
from fedfrozen_app.files.folders import check_free
from fedfrozen_app.files.integrity import check_folder, mend_manifest
from fedfrozen_app.files.kinds import check_is_neither
from fedfrozen_app.launch import check_writable, execute, load_run, run_folder, unwritable
from fedfrozen_app.local.model_evaluation import evaluate_test
from fedfrozen_app.report.console import show_end
from fedfrozen_app.run.export_folder import write_export
from fedfrozen_app.run.job import Job, fork_start
from fedfrozen_app.run.stored_config import stored_config

log = logging.getLogger(__name__)
WRITTEN_AT_END = ("model.safetensors", "summary.json", "fairness.json", "personal.json")


def train_composed(composed: DictConfig, run: ComposedConfig, *, detach: bool) -> None:
    """Train a run whose configuration is already composed."""
    _train(partial(run_in_folder, composed), detach, run)


def train_by_hydra(arguments: list[str], *, detach: bool) -> None:
    """Train a run, or do what Hydra's flags request, such as --cfg job."""
    _train(partial(with_hydra, arguments=arguments), detach)


def _train(
    call: Callable[[Callable[[DictConfig], None]], None], detach: bool, composed: ComposedConfig | None = None
) -> None:
    """`call` lets Hydra make the folder and call the job. Without `composed`, Hydra composes too."""
    failed: list[Exception] = []  # raised at the end: Hydra would add its own line to an error
    started = False

    def job(task: DictConfig) -> None:
        nonlocal started
        started = True
        settings = HydraConfig.get()
        run = (composed or ComposedConfig.of(task, settings.overrides.task)).with_absolute_paths()
        folder = Path(run.resolved["output_dir"] or settings.runtime.output_dir).expanduser().resolve()
        try:
            check_writable(folder)
            check_free(folder, overwrite=bool(run.resolved["overwrite"]))
            mend(folder)
            if line := what_was_brought(settings.runtime.choices, settings.overrides.task):
                log.info(line)
            with status.recorded(folder, run.resolved, run.overrides):
                check_detach(run.config, detach)
                execute(Job(run, folder, fork_start(run.config), detach))
        except status.Detached as detached:
            print(detached)
        except (UserError, RunFailed, OSError) as error:
            failed.append(error)

    try:
        call(job)
    except OSError as error:
        if started:
            raise
        wanted = composed.resolved["output_dir"] if composed is not None else None
        place = error.filename or wanted or "of this run"
        raise unwritable(place, error) from error  # Hydra makes the folder before it calls the job
    if failed:
        raise failed[0]


def mend(run: Path) -> None:
    """Rewrite a damaged manifest before a run continues, unless another process writes to the folder."""
    known = status.read(run)
    if lease.holder(run) is None and not (known is not None and known.alive) and (done := mend_manifest(run)):
        log.warning("%s: %s", run, done)


def what_was_brought(choices: Mapping[str, Any], overrides: Sequence[str]) -> str:
    """The files that a chosen strategy or dataset selected, for the log; "" where there are none."""
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
    """`fedfrozen resume RUN [OVERRIDES]`: continue after the run's newest checkpoint, in the same folder."""
    flags = {word for word in arguments if word in (DETACH, STOP, TRUST)}
    run, extra = run_folder("resume", [word for word in arguments if word not in flags])
    if own := [word for word in extra if word.startswith(("from=", "output_dir="))]:
        raise UserError(
            f"A run is resumed in its own folder, from its newest checkpoint: leave {own[0]} out, or begin "
            f"another run there with `fedfrozen from={run}/checkpoints/N output_dir=DIR`."
        )
    start = checkpoint.newest(run)
    mend(run)
    composed = stored_config(run, start.overrides, start.config, extra, trusted=TRUST in flags, trains=True)
    if composed.resolved["num_rounds"] != start.config["num_rounds"]:
        composed = _with_open_settings(composed, start)
    composed = composed.with_absolute_paths().continuing()
    config = composed.config
    before = status.read(run)
    # A run that stopped while writing its results writes them now, and damaged ones again.
    complete = before is None or before.state == "complete"
    if complete and (damage := damaged_results(run)):
        log.warning("%s: %s, so the results are written again.", run, damage)
        complete = False
    done = max(checkpoint.numbers(run / "checkpoints"))  # the newest of them may be damaged
    if start.round > config.num_rounds or (done >= config.num_rounds and complete):
        raise UserError(
            f"{run} has already finished its {counted(done, 'round')}: add num_rounds=N to go on to round N."
        )
    check_detach(config, DETACH in flags)
    if before is not None and before.flower_run and config.runtime.name == "deployed":
        end_earlier(config, run, before.flower_run, stop=STOP in flags)
    status.check_unowned(run)
    start = checkpoint.newest(run)  # a run that was still active may have written another
    now = status.read(run)
    if now is not None and now != before and now.state == "complete" and start.round >= config.num_rounds:
        log.info("%s has finished by itself in between.", run)
        return
    log.info("Going on after round %d.", start.round)
    try:
        with status.recorded(run, composed.resolved, composed.overrides):
            execute(Job(composed, run, start, DETACH in flags))
    except status.Detached as detached:
        print(detached)


def damaged_results(run: Path) -> str:
    """Damaged files that the end of a run writes, so that resuming rewrites them; "" if there are none."""
    found = [one for one in check_folder(run) if one.is_bad and one.name in WRITTEN_AT_END]
    return ", ".join(f"{one.name} is {one.state}" for one in found)


def _with_open_settings(composed: ComposedConfig, start: Checkpoint) -> ComposedConfig:
    """For a run that gets more rounds: settings that are derived by default keep their earlier values."""
    strategy = composed.resolved["strategy"]
    settings = registry.find("strategies", str(strategy["name"])).Settings
    holds = settings.kept_by(start.config["strategy"], start.row)
    kept = [
        f"strategy.{key}={holds[key]}" for key, value in strategy.items() if value is None and holds.get(key)
    ]
    return compose_run([*composed.overrides, *kept], recorded=True) if kept else composed


def end_earlier(config: Config, run: Path, flower_run: int, *, stop: bool) -> None:
    """End or refuse an active Flower run of this folder: a run must never be active twice."""
    from fedfrozen_app.runtimes.flower.deployed import connect, stop_run

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
    """`fedfrozen attach RUN [--on-interrupt detach|stop] [--stop]`: watch an active deployed run."""
    from fedfrozen_app.runtimes.flower.deployed import connect, follow_to_end, stop_run

    given = parse("attach", arguments)
    run, _ = run_folder("attach", [given.run])
    known = status.read(run)
    if known is None or not known.flower_run:
        raise UserError(f"{run} was not handed in to a SuperLink: fedfrozen watch {run} shows any run.")
    had = (checkpoint.newest_state(run) or {}).get("config", {})
    stored = stored_config(run, known.overrides, had, trusted=given.trust_folder, trains=True)
    config = stored.continuing().config
    connection = connect(config, run)
    if not connection.is_going(known.flower_run):
        raise UserError(ended_text(run, known))
    if given.stop:
        stop_run(connection, config, run, known.flower_run)
        print(f"Stopped. Go on with: fedfrozen resume {shlex.quote(str(run))}")
        return
    try:
        with status.concluded(run):
            summary = follow_to_end(
                connection, config, run, known.flower_run, on_interrupt=given.on_interrupt
            )
    except status.Detached as detached:
        print(detached)
        return
    show_end(summary, run)


def ended_text(run: Path, known: status.Status) -> str:
    """The message for attaching to a finished run: how it ended, and how to continue."""
    flower = f"Flower's run {known.flower_run} has ended"
    if known.state == "complete":
        return f"{flower} (complete): see {run}/report.html."
    state = "its process was lost" if known.state == "running" else known.state
    if not (rounds := checkpoint.numbers(run / "checkpoints")):
        return f"{flower} ({state}) and wrote no checkpoint: start it again."
    return (
        f"{flower} ({state}): go on after round {max(rounds)} with fedfrozen resume {shlex.quote(str(run))}."
    )


def check_detach(config: Config, detach: bool) -> None:
    if detach and config.runtime.name != "deployed":
        raise UserError(f"{DETACH} needs a SuperLink that goes on by itself: use it with runtime=deployed.")


def evaluate(arguments: list[str]) -> None:
    """`fedfrozen evaluate RUN [OVERRIDES]`: evaluate the run's final model on its test set."""
    run, extra = run_folder("evaluate", [word for word in arguments if word != TRUST])
    worker = load_run(run, extra, trusted=TRUST in arguments)
    with worker.only_global():
        metrics = {f"test_{key}": value for key, value in evaluate_test(worker).items()}
    print(json.dumps({"run": str(run), "examples": len(worker.corpus.test), **metrics}))


def export(arguments: list[str]) -> None:
    """`fedfrozen export RUN DIR [--merge]`: the final model as a folder for `from_pretrained`."""
    merge, trusted = "--merge" in arguments, TRUST in arguments
    run, rest = run_folder("export", [word for word in arguments if word not in ("--merge", TRUST)])
    if len(rest) != 1:
        raise UserError("Say where to: fedfrozen export RUN DIR.")
    target = Path(rest[0]).expanduser().resolve()
    check_is_neither(target, "an export")
    worker = load_run(run, [], trusted=trusted)
    if target.is_file():
        raise UserError(f"{rest[0]} is a file: give a folder.")
    parts = worker.wrapper.merges and not merge
    if merge and not worker.wrapper.merges:
        raise UserError(f"{run} has no adapters to merge: leave --merge out.")
    try:
        with whole_folder(target) as part:
            write_export(worker, run, part, merged=not parts)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{rest[0]} cannot be written ({reason}): give another folder.") from error
    library = "peft" if parts else "transformers"
    print(f"Wrote {rest[0]}: its README.md shows how to load it with plain {library}.")
