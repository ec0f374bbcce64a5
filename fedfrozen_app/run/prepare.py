"""Prepare a run: check that it is possible, and load its starting point."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedfrozen_app.adapters.merged_deltas import is_merged_delta
from fedfrozen_app.config import Config, excluded_clients
from fedfrozen_app.core.client_order import Numbered
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.files import checkpoint, disk
from fedfrozen_app.files.checkpoint import Checkpoint
from fedfrozen_app.files.rows import Row, read_rows, rows_to_keep, write_rows
from fedfrozen_app.local.fair import check_subgroups
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.privacy.budget import carry_budgets
from fedfrozen_app.privacy.coverage import noise_in_sum, reason_model_not_covered, reason_not_covered
from fedfrozen_app.privacy.start_check import check_start
from fedfrozen_app.run.job import Job
from fedfrozen_app.run.outline import planning_strategy, requests, shares_model
from fedfrozen_app.server.connection import Connection
from fedfrozen_app.server.hooks import BestModel, MetricsFile
from fedfrozen_app.server.pacer import replies_of_a_step
from fedfrozen_app.server.robust import check_cohort
from fedfrozen_app.server.sampling import cohort_size

# Files about the last round: removed before any later round.
OF_LAST_ROUND = (
    *("summary.json", "personal.json", "fairness.json", "calibration.json", "sites.json", "baselines.json"),
)
RESULTS = (  # files written at the end of a run
    *OF_LAST_ROUND,
    "model.safetensors",
    "best.safetensors",
    "report.html",
    "curves.png",
    "samples.png",
)


@dataclass
class StartingPoint:
    model: list[dict[str, Tensor]]  # one element, popped so that the initial model can be freed
    first_round: int
    history: list[Row]  # the rounds before


def prepare(
    job: Job, connection: Connection, worker: Worker, best: BestModel, metrics: MetricsFile
) -> StartingPoint:
    """The initial model and rows of the first round; removes files of later rounds from the folder."""
    model = {name: value.detach().clone() for name, value in worker.exchanged.items()}
    own_rounds = 0  # earlier rounds in this folder
    if job.start is None:
        write_rows(metrics.path, [])
    else:
        check_fits(job.start.model, model)
        worker.check_marks(job.start.metadata)
        merged_deltas = {
            name: value.to(worker.device) for name, value in job.start.model.items() if is_merged_delta(name)
        }
        model = {name: job.start.model[name].to(built) for name, built in model.items()}  # device and dtype
        model |= merged_deltas
        restore_clients(job, job.start, connection, worker)
        best.resume_from(job.start.hooks["best"], job.source)
        metrics.resume_after(job.start.row, rows_to_keep(job.source, replaced=job.resumes_itself))
        own_rounds = job.start.round if job.source.resolve() == job.folder.resolve() else 0
    disk.sweep_parts(job.folder)
    for name in ("checkpoints", "uploads"):
        checkpoint.forget_after(job.folder / name, own_rounds)
    # Of rounds that this run replaces or continues.
    for name in RESULTS if job.start is None else OF_LAST_ROUND:
        disk.remove_file(job.folder / name)
    return StartingPoint([model], 1 if job.start is None else job.start.round + 1, read_rows(job.folder))


def restore_clients(job: Job, start: Checkpoint, connection: Connection, worker: Worker) -> None:
    """Restore the clients' state from a checkpoint: the arrays that they hold, and the privacy spent."""
    simulated = worker.shares.partition is not None  # sites keep their own state
    strategy = planning_strategy(job.config, worker.exchanged, worker.roles)
    if simulated and strategy.clients_keep(start.round + 1):
        checkpoint.check_private(start, in_process=connection.transport.local)
    check_start(job.resolved_config, start.config, start.row, job.source / "privacy" if simulated else None)
    if job.config.start_from:
        carry_budgets(job.source / "privacy", job.folder / "privacy")
    connection.membership.ledger.load_state_dict(start.ledger)


def check_possible(job: Job, worker: Worker) -> None:
    config = job.config
    if (parts := worker.shares.partition) is not None:  # more sites may join
        check_clients(config, len(parts.indices))
    check_subgroups(worker)
    if config.early_stop.patience is not None:
        check_patience(config, worker)
    if config.privacy.name != "none":  # before any site is asked
        if (reason := reason_model_not_covered(worker.model)) is not None:
            raise UserError(reason)
        for request in requests(planning_strategy(config, worker.exchanged, worker.roles)):
            if (reason := reason_not_covered(request)) is not None:
                raise UserError(reason)
            if request.choice is not None and noise_in_sum(config):
                raise UserError(
                    "secure_aggregation.noise=sum covers one sum over all clients, and here each chooses its "
                    "own layers: choose another strategy, or secure_aggregation.noise=site."
                )


def check_clients(config: Config, count: int) -> None:
    excluded = excluded_clients(config)
    clients = Numbered(count)
    if strange := sorted(client for client in excluded if client not in clients):
        raise UserError(f"exclude_clients={strange[0]} is no client: give numbers from 0 to {count - 1}.")
    if len(excluded) == count:
        raise UserError(f"exclude_clients names all {count} clients: leave one to train.")
    size = cohort_size(config.participation, count - len(excluded))
    secure = config.secure_aggregation
    check_cohort(config.aggregation, size)
    if (config.pacing.concurrency or 0) > count - len(excluded):
        raise UserError(
            f"pacing.concurrency={config.pacing.concurrency} clients cannot be at work in a run of "
            f"{count - len(excluded)}: lower it, or raise num_clients."
        )
    if (config.pacing.buffer or 0) > (config.pacing.concurrency or size):
        raise UserError(
            f"pacing.buffer={config.pacing.buffer} replies cannot be in while {size} clients are at work: "
            "lower it, or raise participation."
        )
    if secure.name == "on":
        check_masked_cohort(config, size)
    if strange := [client for client in config.adapter.ranks if str(client) not in clients]:
        raise UserError(f"adapter.ranks.{strange[0]} is no client: give a number from 0 to {count - 1}.")
    if (client := config.checkpoint.uploads) is not None and client not in clients:
        raise UserError(f"checkpoint.uploads={client} is no client: give a number from 0 to {count - 1}.")
    if (client := config.privacy.audited) is not None and client not in clients:
        raise UserError(f"privacy.audited={client} is no client: give a number from 0 to {count - 1}.")


def check_masked_cohort(config: Config, size: int) -> None:
    """Check that enough clients are summed together for masks; `size`: the number of requests."""
    secure, pacing, what = config.secure_aggregation, config.pacing, "num_clients or participation"
    if pacing.name == "buffered":
        what, size = "pacing.buffer", replies_of_a_step(pacing, pacing.concurrency or size)
    if size < secure.min_cohort:
        raise UserError(
            f"secure_aggregation.min_cohort={secure.min_cohort} clients make a sum at least, and a round has "
            f"{size}: raise {what}, or lower it."
        )


def check_patience(config: Config, worker: Worker) -> None:
    shared = worker.has_global or shares_model(config, worker.exchanged, worker.roles)
    if not (shared and len(worker.shares.validation)):
        raise UserError(
            "early_stop.patience goes by how the shared model does on the server's validation rows, and this "
            "run has not both: set dataset.validation above 0, take a strategy that shares its model, or "
            "leave early_stop.patience out."
        )


def private_parts_note(job: Job, *, sites: bool) -> str:
    """A note about clients' private parts, if our checkpoints cannot contain them."""
    if not sites:
        return "Flower forgets the clients' private parts when it ends: this run cannot be resumed."
    if job.start is None:
        return ""
    if job.config.run_id is not None and job.config.run_id == job.start.config.get("run_id"):
        return "Sites go on with the private parts they kept; a site without the executor begins them afresh."
    return "from= brings back what is shared: the sites' private parts begin afresh."


def check_fits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    own = {name: value for name, value in found.items() if not is_merged_delta(name)}
    shapes = ({name: tuple(value.shape) for name, value in part.items()} for part in (own, expected))
    if next(shapes) != next(shapes):
        raise UserError(
            "The stored model is not the one these settings make: give the same model and dataset settings."
        )
