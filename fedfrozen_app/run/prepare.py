"""How a run begins: whether it is possible, and what it starts from."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedfrozen_app.config import Config
from fedfrozen_app.errors import UserError
from fedfrozen_app.files import checkpoint, disk
from fedfrozen_app.files.checkpoint import Checkpoint
from fedfrozen_app.files.rows import Row, read_rows
from fedfrozen_app.local.fair import check_subgroups
from fedfrozen_app.local.resident import Resident
from fedfrozen_app.models.folds import is_fold
from fedfrozen_app.privacy.budget import carry_budgets
from fedfrozen_app.privacy.cover import cannot_cover, cannot_cover_model, noise_in_sum
from fedfrozen_app.privacy.notes import check_start
from fedfrozen_app.run.job import Job
from fedfrozen_app.run.outline import orders, planning_strategy, shares_model
from fedfrozen_app.server.conversation import Conversation
from fedfrozen_app.server.hooks import BestModel, MetricsFile
from fedfrozen_app.server.robust import check_cohort
from fedfrozen_app.server.sampling import cohort_size

# What a run writes when it ends; the first three must not outlive a round that comes after them.
RESULTS = (
    "summary.json",
    "personal.json",
    "fairness.json",
    "model.safetensors",
    "best.safetensors",
    "report.html",
    "curves.png",
)


@dataclass
class StartingPoint:
    model: list[dict[str, Tensor]]  # of one, which is taken out: nobody keeps the first model in memory
    first_round: int
    history: list[Row]  # the rounds before


def prepare(
    job: Job, conversation: Conversation, resident: Resident, best: BestModel, metrics: MetricsFile
) -> StartingPoint:
    """The model and the rows that the first round finds; the folder holds nothing of a later one."""
    model = {name: value.detach().clone() for name, value in resident.exchanged.items()}
    own_rounds = 0  # of those before, how many are this folder's own
    if job.start is None:
        metrics.path.write_text("")
    else:
        check_fits(job.start.model, model)
        resident.wrapper.check_marks(job.start.metadata)
        folds = {name: value.to(resident.device) for name, value in job.start.model.items() if is_fold(name)}
        model = {name: job.start.model[name].to(built) for name, built in model.items()}  # device and dtype
        model |= folds
        restore_clients(job, job.start, conversation, resident)
        best.resume_from(job.start.hooks["best"], job.source)
        metrics.resume_after(job.start.row, read_rows(job.source))
        own_rounds = job.start.round if job.source.resolve() == job.folder.resolve() else 0
    disk.sweep_parts(job.folder)
    for name in ("checkpoints", "uploads"):
        checkpoint.forget_after(job.folder / name, own_rounds)
    # Of rounds that this run replaces, or goes beyond.
    for name in RESULTS if job.start is None else RESULTS[:3]:
        (job.folder / name).unlink(missing_ok=True)
    return StartingPoint([model], 1 if job.start is None else job.start.round + 1, read_rows(job.folder))


def restore_clients(job: Job, start: Checkpoint, conversation: Conversation, resident: Resident) -> None:
    """What a checkpoint says of the clients: what they hold, and what they have spent."""
    simulated = resident.shares.partition is not None  # sites keep what is theirs
    strategy = planning_strategy(job.config, resident.exchanged, resident.roles)
    if simulated and strategy.clients_keep(start.round + 1):
        checkpoint.check_private(start, in_process=conversation.local)
    check_start(job.resolved_config, start.config, start.row, job.source / "privacy" if simulated else None)
    if job.config.start_from:
        carry_budgets(job.source / "privacy", job.folder / "privacy")
    conversation.ledger.load_state_dict(start.ledger)


def check_possible(job: Job, resident: Resident) -> None:
    config = job.config
    if (parts := resident.shares.partition) is not None:  # of sites, more may come
        check_clients(config, len(parts.indices))
    check_subgroups(resident)
    if config.early_stop.patience is not None:
        check_patience(config, resident)
    if config.privacy.name != "none":  # here, where no site has been asked for anything yet
        if (reason := cannot_cover_model(resident.model)) is not None:
            raise UserError(reason)
        for order in orders(planning_strategy(config, resident.exchanged, resident.roles)):
            if (reason := cannot_cover(order)) is not None:
                raise UserError(reason)
            if order.choice is not None and noise_in_sum(config):
                raise UserError(
                    "secure_aggregation.noise=sum covers one sum over all clients, and here each chooses its "
                    "own layers: choose another strategy, or secure_aggregation.noise=site."
                )


def check_clients(config: Config, count: int) -> None:
    size, secure = cohort_size(config.participation, count), config.secure_aggregation
    check_cohort(config.aggregation, size)
    if secure.name == "on" and size < secure.min_cohort:
        raise UserError(
            f"secure_aggregation.min_cohort={secure.min_cohort} clients make a sum at least, and a round has "
            f"{size}: raise num_clients or participation, or lower it."
        )
    if strange := [client for client in config.adapter.ranks if str(client) not in map(str, range(count))]:
        raise UserError(f"adapter.ranks.{strange[0]} is no client: give a number from 0 to {count - 1}.")
    if (client := config.checkpoint.uploads) is not None and client not in map(str, range(count)):
        raise UserError(f"checkpoint.uploads={client} is no client: give a number from 0 to {count - 1}.")
    if (client := config.privacy.audited) is not None and client not in map(str, range(count)):
        raise UserError(f"privacy.audited={client} is no client: give a number from 0 to {count - 1}.")


def check_patience(config: Config, resident: Resident) -> None:
    shared = resident.has_global or shares_model(config, resident.exchanged, resident.roles)
    if not (shared and len(resident.shares.validation)):
        raise UserError(
            "early_stop.patience goes by how the shared model does on the server's validation rows, and this "
            "run has not both: set dataset.validation above 0, take a strategy that shares its model, or "
            "leave early_stop.patience out."
        )


def private_parts_note(job: Job, *, sites: bool) -> str:
    """What becomes of the parts that clients keep, where no checkpoint of ours can hold them."""
    if not sites:
        return "Flower forgets the clients' private parts when it ends: this run cannot be resumed."
    if job.start is None:
        return ""
    if job.config.run_id is not None and job.config.run_id == job.start.config.get("run_id"):
        return "Sites go on with the private parts they kept; a site without the executor begins them afresh."
    return "from= brings back what is shared: the sites' private parts begin afresh."


def check_fits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    own = {name: value for name, value in found.items() if not is_fold(name)}
    shapes = ({name: tuple(value.shape) for name, value in part.items()} for part in (own, expected))
    if next(shapes) != next(shapes):
        raise UserError(
            "The stored model is not the one these settings make: give the same model and dataset settings."
        )
