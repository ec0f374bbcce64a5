"""One run from start to results, the same in every runtime: only the grid behind the connection differs."""

import logging
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from fedfrozen_app.adapters.rule import make_rule
from fedfrozen_app.config import Config, strategy_settings
from fedfrozen_app.config.codec_checks import down_codec_of
from fedfrozen_app.core import registry
from fedfrozen_app.core.errors import RunFailed
from fedfrozen_app.core.formatting import resume_command
from fedfrozen_app.core.signals import shielded
from fedfrozen_app.exchange.arrays import to_record
from fedfrozen_app.exchange.messages import Reply
from fedfrozen_app.files import checkpoint
from fedfrozen_app.files import folder_manifest as manifest
from fedfrozen_app.files.client_segments import ClientSegments
from fedfrozen_app.files.disk import is_full
from fedfrozen_app.files.folders import has_results
from fedfrozen_app.files.rows import Row, read_rows
from fedfrozen_app.files.uploads import write_upload
from fedfrozen_app.local.compiling import Compiling
from fedfrozen_app.local.owed_noise import owed_noise
from fedfrozen_app.local.prefetch import drop_prefetched
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.privacy.notices import audit_mark, model_metadata, opening_lines
from fedfrozen_app.report.console import Progress
from fedfrozen_app.report.output import write_outputs
from fedfrozen_app.report.track import Tracking
from fedfrozen_app.run import evaluation
from fedfrozen_app.run.data_record import write_columns, write_data_record, write_tokenizer
from fedfrozen_app.run.debugging import debugging
from fedfrozen_app.run.job import Job
from fedfrozen_app.run.own_record import write_own_record
from fedfrozen_app.run.prepare import StartingPoint, check_possible, prepare, private_parts_note
from fedfrozen_app.run.samples import write_samples
from fedfrozen_app.run.score_by_site import write_site_scores
from fedfrozen_app.run.virtual_time import virtual_time
from fedfrozen_app.server.asked_file import AskedFile
from fedfrozen_app.server.base import Federation, PlannedFedAvg
from fedfrozen_app.server.coded_broadcast import Broadcast
from fedfrozen_app.server.connection import Connection
from fedfrozen_app.server.earlier_sums import EarlierSums
from fedfrozen_app.server.hooks import (
    BestModel,
    Checkpoints,
    MetricsFile,
    PrivacySpent,
    ShowProgress,
    SomebodyTakesPart,
    WorkersAlive,
)
from fedfrozen_app.server.live_pacing import LivePacing
from fedfrozen_app.server.optimizer import make_optimizer
from fedfrozen_app.server.round_traces import round_traces
from fedfrozen_app.server.state import restore

log = logging.getLogger(__name__)
ClientState = Callable[[], dict[str, dict[str, Tensor]]]


@dataclass
class Parts:
    """The parts of a run, after all checks."""

    strategy: PlannedFedAvg
    start: StartingPoint
    best: BestModel
    progress: Progress
    tracking: Tracking


@dataclass
class Ending:
    status: str = "failed"
    personal: dict[str, Any] | None = None  # metrics of personal models
    baseline: dict[str, Any] | None = None  # a linear model's metrics on the same rows


def federate(
    job: Job,
    connection: Connection,
    worker: Worker,
    client_state: ClientState = dict,
    segments: ClientSegments | None = None,
) -> dict[str, Any]:
    """Run the rounds, write every output into the job's folder, and return the summary.

    `client_state` returns the clients' kept state, if this process holds it; `segments`: storage for client
    state that exceeds memory.
    """
    began = time.perf_counter()
    job = job.with_settings().with_reading(worker.corpus.reading)
    connection.foundation.arrays = worker.foundation
    check_possible(job, worker)
    open_folder(job, worker)
    parts = assemble(job, connection, worker, client_state, segments)
    # Earlier rounds count, like their bytes.
    began -= sum(row.get("seconds", {}).get("total", 0.0) for row in parts.start.history)
    announce(job, parts.strategy, connection, worker)
    if parts.start.first_round == 1:
        worker.load(parts.start.model[0], {})
        write_samples(worker, job.folder, "before")
    ending = Ending()
    try:
        run_rounds(job, parts, connection, worker)
        ending.personal = evaluate_at_end(job, parts.strategy, worker)
        ending.baseline = evaluation.linear_baseline(parts.strategy, worker)
        ending.status = "stopped early" if parts.best.out_of_patience else "completed"
    except (KeyboardInterrupt, SystemExit):  # Flower raises SystemExit when a run is stopped
        ending.status = "interrupted"
        raise
    finally:
        # Write the results however the run ended; a second Ctrl-C waits for the last file.
        with shielded():
            reason = why_nothing_changed(read_rows(job.folder))
            if reason:
                ending.status = "failed"
            summary = write_results(job, parts, worker, ending, time.perf_counter() - began)
    if reason:
        raise RunFailed(reason)
    return summary


def assemble(
    job: Job,
    connection: Connection,
    worker: Worker,
    client_state: ClientState,
    segments: ClientSegments | None = None,
) -> Parts:
    """The strategy at its first round, with all hooks."""
    marks = model_metadata(job.config.privacy) | worker.marks()
    best = BestModel(job.folder, job.config.early_stop.patience, metadata=marks)
    metrics = MetricsFile(job.folder / "metrics.jsonl")
    start = prepare(job, connection, worker, best, metrics)
    progress = Progress(job.config.num_rounds, start_round=start.first_round - 1)
    tracking = Tracking(job.config.track, job.resolved_config, job.folder, start.first_round)
    saver = Checkpoints.of(
        job.config,
        job.resolved_config,
        job.overrides,
        job.folder,
        best,
        client_state,
        worker.kept.for_run(Compiling).state_dict,
        segments,
    )
    timed, connection.pacing = virtual_time(job.config, worker, start.history)
    if isinstance(connection.pacing, LivePacing):
        connection.pacing.asked = AskedFile.of(job.folder)
    connection.counts_clients = bool(timed)
    hooks = [
        *timed,
        WorkersAlive(job.folder),
        best,
        *privacy_spent(job.config, start.history),
        saver,
        metrics,
        *round_traces(connection, job.folder.name),
    ]
    shown = [ShowProgress(progress)] if job.shown else []
    hooks += [*shown, tracking, evaluation.DrawLabels(worker, job.folder), SomebodyTakesPart(job.folder)]
    strategy = make_strategy(job, connection, start, hooks)
    return Parts(strategy, start, best, progress, tracking)


def run_rounds(job: Job, parts: Parts, connection: Connection, worker: Worker) -> None:
    shown_by = parts.progress if job.shown else nullcontext()
    with shown_by, parts.tracking, debugging(job.config.debug, job.folder):
        parts.strategy.start(
            connection.transport.grid,
            to_record(parts.start.model.pop(), local=True),  # the initial model is freed before training
            num_rounds=job.config.num_rounds,
            timeout=job.config.runtime.round_timeout,
            evaluate_fn=evaluation.evaluator(parts.strategy, worker),
        )


def evaluate_at_end(job: Job, strategy: PlannedFedAvg, worker: Worker) -> dict[str, Any] | None:
    """Evaluate the global model's fairness and samples, and personal models if requested."""
    drop_prefetched(worker)
    if strategy.shares_model or worker.has_global:
        worker.load(strategy.model, strategy.digests)
        evaluation.evaluate_fairness(worker, job.folder)
        with worker.only_global():
            write_site_scores(worker, job.folder)
        write_samples(worker, job.folder, "after")
    # Private clients would decline, and of masked ones only sums are known.
    one_by_one = job.config.privacy.name == "none" and job.config.secure_aggregation.name == "off"
    by_default = strategy.personal and one_by_one
    if by_default if job.config.personal is None else job.config.personal:
        return evaluation.evaluate_personal(strategy, worker, job.folder)
    return None


def write_results(job: Job, parts: Parts, worker: Worker, ending: Ending, seconds: float) -> dict[str, Any]:
    corpus = worker.corpus
    trivial = {} if parts.strategy.personal else evaluation.trivial_scores(corpus.task, corpus.test.labels)
    return write_outputs(
        job.folder,
        parts.strategy.model,
        read_rows(job.folder),
        metadata=parts.best.metadata,
        config=job.resolved_config,
        status=ending.status,
        seconds=seconds,
        device=str(worker.device),
        command=shlex.join(["fedfrozen", *job.overrides]),
        selected_round=parts.best.round,
        personal=ending.personal,
        trivial=trivial,
        baseline=ending.baseline,
    )


def open_folder(job: Job, worker: Worker) -> None:
    job.folder.mkdir(parents=True, exist_ok=True)
    if not manifest.is_recorded(job.folder):  # this run was started by Flower, or by an older version
        manifest.begin(job.folder, manifest.RUN, overrides=job.overrides)
    for line in opening_lines(job.config.privacy, in_sum=job.config.secure_aggregation.noise == "sum"):
        log.warning(line)
    evaluation.write_clients(worker, job.folder)
    write_data_record(worker, job.folder)
    write_own_record(job.resolved_config, job.folder)
    write_tokenizer(worker, job.folder)
    write_columns(worker, job.folder)


def privacy_spent(config: Config, history: list[Row]) -> list[PrivacySpent]:
    if config.privacy.name == "none":
        return []
    hook = PrivacySpent(config.privacy.unit, config.privacy.seeded_noise, audit_mark(config.privacy))
    hook.add_rows(history)
    return [hook]


def make_strategy(job: Job, connection: Connection, start: StartingPoint, hooks: list[Any]) -> PlannedFedAvg:
    """The strategy at its first round, with its state from a checkpoint."""
    config = job.config
    connection.codec, connection.broadcast = config.codec, Broadcast(down_codec_of(config.codec), config.seed)
    federation = Federation(
        connection,
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
        sums=earlier_sums(config, connection, job.folder),
    )
    strategy: PlannedFedAvg = registry.find("strategies", config.strategy["name"])(
        federation,
        strategy_settings(config),
        hooks=hooks,
        first_round=start.first_round,
        history=start.history,
    )
    strategy.model = start.model[0]  # plans need its names
    if job.start is not None:
        restore(strategy, job.start, config)
    return strategy


def earlier_sums(config: Config, connection: Connection, folder: Path) -> EarlierSums:
    """The masked sums that real sites remember, as recorded by the server."""
    ticket, owed = connection.ticket, partial(owed_noise, config)
    if ticket is None:
        return EarlierSums(owed=owed)
    return EarlierSums(folder / "flower" / "sums.json", ticket["run"], owed=owed)


def upload_saver(
    config: Config, folder: Path
) -> Callable[[int, str, Reply, Mapping[str, Tensor]], None] | None:
    """A function that writes one client's upload as a model, and the round's base."""
    kept = {config.checkpoint.uploads, config.privacy.audited} - {None}
    if not kept:
        return None

    def keep(server_round: int, client: str, reply: Reply, model: Mapping[str, Tensor]) -> None:
        if client in kept:
            write_upload(folder / "uploads" / str(server_round), client, model, {**model, **reply.arrays})

    return keep


def announce(job: Job, strategy: PlannedFedAvg, connection: Connection, worker: Worker) -> None:
    """Before the first round: log the handling of private parts, and the bytes and duration of a round."""
    sites = worker.shares.partition is None
    has_private = not connection.transport.local and strategy.clients_keep(strategy.first_round)
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
    """Why no round of a run changed the model; None if one did, or if there was none."""
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
        restart = "start it again, with overwrite=true." if has_results(folder) else "start it again."
        again = f"go on with: {resume_command(folder)}" if kept else restart
        change = "make room there" if is_full(error) else "correct that"
        raise RunFailed(f"{folder} could not be written ({error}): {change}, then {again}") from error
