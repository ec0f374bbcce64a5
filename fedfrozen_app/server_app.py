"""The ServerApp: wires configuration, data, strategy and outputs together, and runs the rounds.

`federate` is the same for every runtime; only the grid behind the conversation differs.
"""

import logging
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.utils import get_flwr_home
from safetensors import SafetensorError
from torch import Tensor

from fedfrozen_app.config import Config, compose_config, read, resolved, strategy_settings
from fedfrozen_app.data.federated import load_corpus, server_only, share_out
from fedfrozen_app.data.partition import label_counts
from fedfrozen_app.data.picture import label_picture
from fedfrozen_app.errors import RunFailed, UserError
from fedfrozen_app.exchange.arrays import to_record, to_tensors
from fedfrozen_app.exchange.conversation import Conversation
from fedfrozen_app.exchange.messages import Reply
from fedfrozen_app.logs import prepare_logging
from fedfrozen_app.privacy.budget import carry_budgets
from fedfrozen_app.privacy.notes import check_start, model_metadata, opening_lines
from fedfrozen_app.report.console import Progress
from fedfrozen_app.report.curves import read_rows
from fedfrozen_app.report.output import write_outputs
from fedfrozen_app.report.personal import tally, write_personal
from fedfrozen_app.runtime import checkpoint
from fedfrozen_app.runtime.hooks import (
    BestModel,
    Checkpoints,
    MetricsFile,
    PrivacySpent,
    ShowProgress,
    WorkersAlive,
)
from fedfrozen_app.runtime.resident import Resident, make_card
from fedfrozen_app.runtime.track import Tracking
from fedfrozen_app.words import counted
from strategies import STRATEGIES
from strategies.base import Federation, PlannedFedAvg
from strategies.cohort import cohort_size
from strategies.judge import judge_clients
from strategies.robust import Aggregation

log = logging.getLogger(__name__)
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Flower's entry: `flwr run .`, our own simulation, or a deployed federation."""
    prepare_logging()
    overrides = shlex.split(str(context.run_config["overrides"]))
    # The paths of this machine; a site reads the ones above alone.
    overrides += shlex.split(str(context.run_config["server-overrides"]))
    plain = resolved(compose_config(overrides))
    config = read(plain)
    named = str(context.run_config["output-dir"])
    folder = Path(named) if named else get_flwr_home() / "fedfrozen" / f"run-{context.run_id}"
    corpus = load_corpus(config)
    talk = Conversation(grid, {}, card=make_card(corpus, config), hello_timeout=config.runtime.node_timeout)
    num_clients = gather(talk, config)
    shares = share_out(corpus, config, num_clients) if num_clients else server_only(corpus, config)
    resident = Resident(config, corpus, shares=shares)
    talk.roles = resident.roles
    log.info("Results go to %s", folder)
    start = checkpoint.read(Path(config.start_from)) if config.start_from else None
    with clear_end(folder):
        federate(config, plain, overrides, talk, resident, folder, start=start)


def gather(talk: Conversation, config: Config) -> int | None:
    """Wait for the nodes; into how many partitions the data are split, or None for sites with their own."""
    patience = config.runtime.node_timeout
    nodes = talk.wait_for(1, patience)
    if not (splits := talk.num_partitions()):
        talk.wait_for(config.runtime.min_nodes or config.num_clients or 2, patience)
        return None
    if len(splits) > 1:
        raise UserError(f"The nodes disagree on num-partitions ({sorted(splits)}): give all the same number.")
    (count,) = splits
    if config.num_clients is not None and config.num_clients != count:
        raise UserError(
            f"num_clients={config.num_clients} was asked for, but the federation has "
            f"{counted(count, 'node')}: use --federation-config 'num-supernodes={config.num_clients}', "
            "or leave num_clients out."
        )
    if config.num_clients is None:
        log.info(
            "The data are split over the nodes there are (%d); for more, use "
            "--federation-config 'num-supernodes=10'.",
            count,
        )
    if len(nodes) < count:
        talk.wait_for(count, patience)
    return count


@contextmanager
def clear_end(folder: Path) -> Iterator[None]:
    """A full or unwritable disk ends the run with a sentence; checkpoints are whole or absent."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        kept = checkpoint.numbers(folder / "checkpoints")
        again = f"go on with: fedfrozen resume {shlex.quote(str(folder))}" if kept else "start it again."
        raise RunFailed(f"{folder} could not be written ({error}): make room there, then {again}") from error


def announce(strategy: PlannedFedAvg, model: dict[str, Tensor], timeout: float) -> None:
    """What a round will send and how long that takes, before a site is asked for anything."""
    down = sum(value.numel() * value.element_size() for value in model.values()) / 1e6
    log.info(
        "A round sends at most %.1f MB to each site and takes at most %.1f MB back: %.0f s at 10 Mbit/s, "
        "%.0f s at 100, times the sites that share a line, and their training. It closes after %g s.",
        *(down, down, 2 * down * 0.8, 2 * down * 0.08, timeout),
    )


def federate(
    config: Config,
    plain: dict[str, Any],
    overrides: list[str],
    talk: Conversation,
    resident: Resident,
    folder: Path,
    *,
    start: checkpoint.Checkpoint | None = None,
    client_state: Callable[[], dict[str, dict[str, Tensor]]] = dict,
) -> dict[str, Any]:
    """Run the rounds over `talk`, write every output into `folder`, and return the summary."""
    began = time.perf_counter()
    how = Aggregation(**vars(config.aggregation))
    if (parts := resident.shares.partition) is not None:  # of sites, more may come
        check_clients(config, how, len(parts.indices))
    if config.early_stop.patience is not None:
        check_patience(config, resident)
    folder.mkdir(parents=True, exist_ok=True)
    settings = strategy_settings(config)
    plain = plain | {"strategy": {"name": config.strategy["name"], **asdict(settings)}}
    for line in opening_lines(config.privacy):
        log.warning(line)
    draw_labels(resident, folder)

    best = BestModel(folder, config.early_stop.patience, metadata=model_metadata(config.privacy))
    metrics = MetricsFile(folder / "metrics.jsonl")
    model = {name: value.detach().clone() for name, value in resident.exchanged.items()}
    first_round, own_rounds = 1, 0
    if start is None:
        metrics.path.write_text("")
    else:
        check_fits(start.model, model)
        source = Path(config.start_from).parents[1] if config.start_from else folder
        records = source / "privacy" if parts is not None else None
        if parts is not None and STRATEGIES[config.strategy["name"]].personal:  # sites keep their own
            checkpoint.check_private(start, in_process=talk.local)
        check_start(plain, start.config, start.row, records)
        if config.start_from:
            carry_budgets(source / "privacy", folder / "privacy")
        model = {name: start.model[name].to(built) for name, built in model.items()}  # its device and dtype
        talk.ledger.load_state_dict(start.ledger)
        best.go_on(start.hooks["best"], source)
        metrics.go_on_after(start.row, read_rows(source))
        first_round = start.round + 1
        own_rounds = start.round if source.resolve() == folder.resolve() else 0
    for name in ("checkpoints", "uploads"):
        checkpoint.forget_after(folder / name, own_rounds)
    for name in ("summary.json", "personal.json"):  # of rounds that this run replaces, or goes beyond
        (folder / name).unlink(missing_ok=True)

    progress = Progress(config.num_rounds, start_round=first_round - 1)
    tracking = Tracking(config.track, plain, folder, first_round)
    saver = Checkpoints(
        folder / "checkpoints",
        plain,
        overrides,
        config.checkpoint.every,
        config.checkpoint.keep,
        config.num_rounds,
        best,
        client_state,
    )
    private = config.privacy.name != "none"
    spent = [PrivacySpent(config.privacy.unit, config.privacy.seeded_noise)] if private else []
    history = read_rows(folder)  # the rounds before a checkpoint: their time counts, as their bytes do
    began -= sum(row.get("seconds", {}).get("total", 0.0) for row in history)
    for hook in spent:
        hook.look_back(history)
    strategy = STRATEGIES[config.strategy["name"]](
        Federation(talk, config.participation, config.seed, how, upload_keeper(config, folder), private),
        settings,
        hooks=[WorkersAlive(), best, *spent, saver, metrics, ShowProgress(progress), tracking],
        first_round=first_round,
        history=history,
    )
    if start is not None:
        strategy.load_state({name: value.to(resident.device) for name, value in start.strategy.items()})
        strategy.usual_norm = start.row.get("usual_norm")
    if strategy.personal and not talk.local:
        strategy.model = model  # by whose names a plan goes
        if strategy.plan(first_round).private and (line := private_line(config, start, sites=parts is None)):
            log.warning(line)
    status, personal = "failed", None
    if parts is None:
        announce(strategy, model, config.runtime.round_timeout)
    initial = [to_record(model, local=True)]
    del model
    try:
        with progress, tracking:
            strategy.start(
                talk.grid,
                initial.pop(),  # nobody keeps the first model while later ones are trained
                num_rounds=config.num_rounds,
                timeout=config.runtime.round_timeout,
                evaluate_fn=evaluator(strategy, resident),
            )
        if strategy.personal if config.personal is None else config.personal:
            personal = judge_personal(strategy, resident, folder)
        status = "completed" if best.patience is None or best.waited < best.patience else "stopped early"
    except (KeyboardInterrupt, SystemExit):  # Flower exits from a run that was stopped
        status = "interrupted"
        raise
    finally:
        # What was done is kept, however the run ended.
        rows = read_rows(folder)
        trained = [row for row in rows if row["round"] > 0]
        if trained and not any(row["clients_ok"] and "discarded" not in row for row in trained):
            status = "failed"
        summary = write_outputs(
            folder,
            strategy.model,
            rows,
            metadata=best.metadata,
            config=plain,
            status=status,
            seconds=time.perf_counter() - began,
            device=str(resident.device),
            command=shlex.join(["fedfrozen", *overrides]),
            selected_round=best.round,
            personal=personal,
            majority=None if strategy.personal else majority_share(resident.corpus.test.labels),
        )
    if status == "failed":
        if "discarded" in trained[-1]:
            raise RunFailed(f"No round changed the model: {trained[-1]['discarded']}.")
        raise RunFailed(f"No client gave a sound reply in any round: {trained[-1]['failures'][0]}")
    return summary


def private_line(config: Config, start: checkpoint.Checkpoint | None, *, sites: bool) -> str:
    """What becomes of the parts that clients keep, where no checkpoint of ours can hold them."""
    if not sites:
        return "Flower forgets the clients' private parts when it ends: this run cannot be resumed."
    if start is None:
        return ""
    if config.run_id is not None and config.run_id == start.config.get("run_id"):
        return "Sites go on with the private parts they kept; a site without the executor begins them afresh."
    return "from= brings back what is shared: the sites' private parts begin afresh."


def check_clients(config: Config, how: Aggregation, count: int) -> None:
    how.check_cohort(cohort_size(config.participation, count))
    if (watched := config.checkpoint.uploads) is not None and watched not in map(str, range(count)):
        raise UserError(f"checkpoint.uploads={watched} is no client: give a number from 0 to {count - 1}.")


def check_patience(config: Config, resident: Resident) -> None:
    shares_model = resident.has_global or not STRATEGIES[config.strategy["name"]].personal
    if not (shares_model and len(resident.shares.validation)):
        raise UserError(
            "early_stop.patience goes by how the shared model does on the server's validation rows, and this "
            "run has not both: set dataset.validation above 0, take a strategy that shares its model, or "
            "leave early_stop.patience out."
        )


def upload_keeper(
    config: Config, folder: Path
) -> Callable[[int, str, Reply, Mapping[str, Tensor]], None] | None:
    """Writes what one client sent, as the model it makes of the round's base, and that base."""
    if config.checkpoint.uploads is None:
        return None

    def keep(server_round: int, client: str, reply: Reply, model: Mapping[str, Tensor]) -> None:
        if client == config.checkpoint.uploads:
            target = folder / "uploads" / str(server_round)
            target.mkdir(parents=True, exist_ok=True)
            checkpoint.save_tensors(model, target / "base.safetensors")
            checkpoint.save_tensors({**model, **reply.arrays}, target / f"{client}.safetensors")

    return keep


def judge_personal(strategy: PlannedFedAvg, resident: Resident, folder: Path) -> dict[str, Any]:
    """Every client on its own test rows, in `personal.json` and `fairness.png`; the figures over clients."""
    rows = read_rows(folder)
    judged, failed, traffic = judge_clients(strategy, rows[-1]["round"])
    parts = resident.shares.partition
    figures = tally(judged, rows, () if parts is None else parts.names)
    figures |= {"bytes_up": traffic.up, "bytes_down": traffic.down}
    if failed:
        figures["not_judged"] = failed
    write_personal(figures, folder)
    return {key: value for key, value in figures.items() if key != "clients"}


def evaluator(
    strategy: PlannedFedAvg, resident: Resident
) -> Callable[[int, ArrayRecord], MetricRecord | None]:
    """The central evaluation of the full model, on the test set and the server's validation rows."""

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        # Where nothing is shared the server's own model stays what it was built as: no round's result.
        nothing = strategy.personal and not resident.has_global
        if server_round and (nothing or not resident.judges(server_round)):
            return None
        resident.load(to_tensors(arrays), strategy.digests)
        with resident.only_global():
            test, validation = resident.evaluate_test(), resident.evaluate_validation()
        record = MetricRecord()
        record.update({f"test_{key}": value for key, value in test.items()})
        record.update({f"val_{key}": value for key, value in validation.items()})
        return record

    return evaluate


def majority_share(labels: Tensor) -> float | None:
    """The share of the most frequent class; None where a row has several labels, or there is no row."""
    if labels.dim() > 1 or not len(labels):
        return None
    return float(labels.unique(return_counts=True)[1].max()) / len(labels)


def draw_labels(resident: Resident, folder: Path) -> None:
    parts = resident.shares.partition
    if parts is None:
        return
    log.info(parts.note)
    labels, classes = resident.corpus.strata, resident.corpus.stratum_names
    counts = label_counts(labels, parts, len(classes))
    label_picture(counts, classes, parts.names, folder / "labels.png")


def check_fits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    shapes = ({name: tuple(value.shape) for name, value in part.items()} for part in (found, expected))
    if next(shapes) != next(shapes):
        raise UserError(
            "The stored model is not the one these settings make: give the same model and dataset settings."
        )
