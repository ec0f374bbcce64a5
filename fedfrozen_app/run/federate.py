"""The story of a run, the same in every runtime: only the grid behind the conversation differs."""

import logging
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from fedfrozen_app import registry
from fedfrozen_app.config import Config, strategy_settings
from fedfrozen_app.errors import RunFailed
from fedfrozen_app.exchange.arrays import to_record
from fedfrozen_app.exchange.messages import Reply
from fedfrozen_app.files import checkpoint
from fedfrozen_app.files.disk import save_tensors
from fedfrozen_app.files.rows import Row, read_rows
from fedfrozen_app.local.resident import Resident
from fedfrozen_app.privacy.notes import audit_mark, model_metadata, opening_lines
from fedfrozen_app.report.console import Progress
from fedfrozen_app.report.output import write_outputs
from fedfrozen_app.report.track import Tracking
from fedfrozen_app.run import evaluation
from fedfrozen_app.run.debugging import debugging
from fedfrozen_app.run.job import Job
from fedfrozen_app.run.prepare import StartingPoint, check_possible, prepare, private_parts_note
from fedfrozen_app.run.samples import write_samples
from fedfrozen_app.server.adapter_rule import make_rule
from fedfrozen_app.server.base import Federation, PlannedFedAvg
from fedfrozen_app.server.conversation import Conversation
from fedfrozen_app.server.hooks import (
    BestModel,
    Checkpoints,
    MetricsFile,
    PrivacySpent,
    ShowProgress,
    SomebodyTakesPart,
    WorkersAlive,
)
from fedfrozen_app.server.optimizer import make_optimizer
from fedfrozen_app.server.state import restore
from fedfrozen_app.signals import shielded

log = logging.getLogger(__name__)
ClientState = Callable[[], dict[str, dict[str, Tensor]]]


def federate(
    job: Job, conversation: Conversation, resident: Resident, client_state: ClientState = dict
) -> dict[str, Any]:
    """Run the rounds, write every output into the job's folder, and return the summary.

    `client_state` gives what clients keep for themselves, where this process holds it.
    """
    began = time.perf_counter()
    job = job.with_settings()
    conversation.foundation = resident.foundation
    check_possible(job, resident)
    open_folder(job, resident)
    marks = model_metadata(job.config.privacy) | resident.wrapper.marks()
    best = BestModel(job.folder, job.config.early_stop.patience, metadata=marks)
    metrics = MetricsFile(job.folder / "metrics.jsonl")
    start = prepare(job, conversation, resident, best, metrics)
    began -= sum(
        row.get("seconds", {}).get("total", 0.0) for row in start.history
    )  # as their bytes count too
    progress = Progress(job.config.num_rounds, start_round=start.first_round - 1)
    tracking = Tracking(job.config.track, job.resolved_config, job.folder, start.first_round)
    saver = Checkpoints.of(
        job.config,
        job.resolved_config,
        job.overrides,
        job.folder,
        best,
        client_state,
        resident.compiling.state_dict,
    )
    hooks = [WorkersAlive(), best, *privacy_spent(job.config, start.history), saver, metrics]
    shown = [ShowProgress(progress)] if job.shown else []
    strategy = make_strategy(job, conversation, start, [*hooks, *shown, tracking, SomebodyTakesPart()])
    announce(job, strategy, conversation, resident)
    if start.first_round == 1:
        resident.load(start.model[0], {})
        write_samples(resident, job.folder, "before")
    status, personal = "failed", None
    try:
        shown_by = progress if job.shown else nullcontext()
        with shown_by, tracking, debugging(job.config.debug, job.folder):
            strategy.start(
                conversation.grid,
                to_record(start.model.pop(), local=True),  # nobody keeps the first model while others train
                num_rounds=job.config.num_rounds,
                timeout=job.config.runtime.round_timeout,
                evaluate_fn=evaluation.evaluator(strategy, resident),
            )
        resident.begun = None  # after an early stop, of a round that never comes
        if strategy.shares_model or resident.has_global:
            resident.load(strategy.model, strategy.digests)
            evaluation.judge_fairness(resident, job.folder)
            write_samples(resident, job.folder, "after")
        # Private clients would decline, and masked ones tell nothing of one of them.
        alone = job.config.privacy.name == "none" and job.config.secure_aggregation.name == "off"
        unasked = strategy.personal and alone
        if unasked if job.config.personal is None else job.config.personal:
            personal = evaluation.judge_personal(strategy, resident, job.folder)
        status = "stopped early" if best.out_of_patience else "completed"
    except (KeyboardInterrupt, SystemExit):  # Flower exits from a run that was stopped
        status = "interrupted"
        raise
    finally:
        # What was done is kept, however the run ended; a second Ctrl-C waits for the last file.
        with shielded():
            rows = read_rows(job.folder)
            reason = why_nothing_changed(rows)
            summary = write_outputs(
                job.folder,
                strategy.model,
                rows,
                metadata=best.metadata,
                config=job.resolved_config,
                status="failed" if reason else status,
                seconds=time.perf_counter() - began,
                device=str(resident.device),
                command=shlex.join(["fedfrozen", *job.overrides]),
                selected_round=best.round,
                personal=personal,
                majority=None
                if strategy.personal
                else evaluation.majority_share(resident.corpus.test.labels),
            )
    if reason:
        raise RunFailed(reason)
    return summary


def open_folder(job: Job, resident: Resident) -> None:
    job.folder.mkdir(parents=True, exist_ok=True)
    for line in opening_lines(job.config.privacy, in_sum=job.config.secure_aggregation.noise == "sum"):
        log.warning(line)
    evaluation.draw_labels(resident, job.folder)


def privacy_spent(config: Config, history: list[Row]) -> list[PrivacySpent]:
    if config.privacy.name == "none":
        return []
    hook = PrivacySpent(config.privacy.unit, config.privacy.seeded_noise, audit_mark(config.privacy))
    hook.add_rows(history)
    return [hook]


def make_strategy(
    job: Job, conversation: Conversation, start: StartingPoint, hooks: list[Any]
) -> PlannedFedAvg:
    """The strategy at its first round, with what a checkpoint kept for it."""
    config = job.config
    federation = Federation(
        conversation,
        config.participation,
        config.seed,
        config.aggregation,
        upload_saver(config, job.folder),
        private=config.privacy.name != "none",
        optimizer=make_optimizer(config),
        client=config.client,
        secure=config.secure_aggregation,
        rule=make_rule(config),
        exchanged=frozenset(start.model[0]),
    )
    strategy: PlannedFedAvg = registry.find("strategies", config.strategy["name"])(
        federation,
        strategy_settings(config),
        hooks=hooks,
        first_round=start.first_round,
        history=start.history,
    )
    strategy.model = start.model[0]  # by whose names a plan goes
    if job.start is not None:
        restore(strategy, job.start, config)
    return strategy


def upload_saver(
    config: Config, folder: Path
) -> Callable[[int, str, Reply, Mapping[str, Tensor]], None] | None:
    """Writes what one client sent, as the model it makes of the round's base, and that base."""
    kept = {config.checkpoint.uploads, config.privacy.audited} - {None}
    if not kept:
        return None

    def keep(server_round: int, client: str, reply: Reply, model: Mapping[str, Tensor]) -> None:
        if client in kept:
            target = folder / "uploads" / str(server_round)
            target.mkdir(parents=True, exist_ok=True)
            save_tensors(model, target / "base.safetensors")
            save_tensors({**model, **reply.arrays}, target / f"{client}.safetensors")

    return keep


def announce(job: Job, strategy: PlannedFedAvg, conversation: Conversation, resident: Resident) -> None:
    """Before a site is asked for anything: what becomes of private parts, what a round sends, and how long
    that takes."""
    sites = resident.shares.partition is None
    has_private = not conversation.local and strategy.clients_keep(strategy.first_round)
    if has_private and (line := private_parts_note(job, sites=sites)):
        log.warning(line)
    if sites:
        down = sum(value.numel() * value.element_size() for value in strategy.model.values()) / 1e6
        log.info(
            "A round sends at most %.1f MB to each site and takes at most %.1f MB back: %.0f s at 10 Mbit/s, "
            "%.0f s at 100, times the sites that share a line, and their training. It closes after %g s.",
            *(down, down, 2 * down * 0.8, 2 * down * 0.08, job.config.runtime.round_timeout),
        )


def why_nothing_changed(rows: list[Row]) -> str | None:
    """Why no round of a run changed the model; None where one did, or where there was none."""
    trained = [row for row in rows if row["round"] > 0]
    if not trained or any(row["clients_ok"] and "discarded" not in row for row in trained):
        return None
    if "discarded" in trained[-1]:
        return f"No round changed the model: {trained[-1]['discarded']}."
    return f"No client gave a sound reply in any round: {trained[-1]['failures'][0]}"


@contextmanager
def explain_disk_errors(folder: Path) -> Iterator[None]:
    """A full or unwritable disk ends the run with a sentence; checkpoints are whole or absent."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        kept = checkpoint.numbers(folder / "checkpoints")
        again = f"go on with: fedfrozen resume {shlex.quote(str(folder))}" if kept else "start it again."
        raise RunFailed(f"{folder} could not be written ({error}): make room there, then {again}") from error
