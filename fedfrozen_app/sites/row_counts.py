"""How many rows, of how many people, a train request would use."""

from torch import Tensor

from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.local.batches import drawn_rows
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.sites.views import View


def rows_by_phase(worker: Worker, site: str, request: TrainRequest) -> list[Tensor]:
    """The rows of each phase of the round: all of them, or the batches that its few steps draw."""
    rows, client, seed = worker.rows(site).train, worker.config.client, worker.config.seed
    some = client.local_steps is not None and client.local_steps * client.batch_size < len(rows)
    if not some or worker.config.privacy.name != "none":  # a private step draws from all rows
        return [rows]
    return [
        drawn_rows(rows, client, seed, site, request.round, phase, 1)[0]
        for phase, _ in enumerate(request.plan.steps)
    ]


def count_rows(worker: Worker, view: View, rows: Tensor) -> tuple[int, int | None]:
    """(number of rows, number of people; None if the view has no column for people)."""
    if view.unit == "example":  # the steward declares that every row is a different person
        return len(rows), len(rows)
    if view.unit != "patient" or view.column not in worker.corpus.columns:
        return len(rows), None
    return len(rows), len(set(worker.corpus.columns[view.column][rows.numpy()]))


def fewest(counts: list[tuple[int, int | None]]) -> tuple[int, int | None]:
    """The smallest of a round's phases: each phase trains separately."""
    people = [found for _, found in counts if found is not None]
    return min(rows for rows, _ in counts), min(people) if people else None
