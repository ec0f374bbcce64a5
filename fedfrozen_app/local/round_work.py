"""One run's local work of one round: prepared by the cohort runner, trained alone or with other runs'."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedfrozen_app.exchange.names import parameters_in
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.local.client_starts import ClientStarts
from fedfrozen_app.local.layouts import Layouts
from fedfrozen_app.local.slots import Schedule, SlotAssignment
from fedfrozen_app.local.stacked_calls import adapt_rows
from fedfrozen_app.local.start_values import start_loss_and_gradient
from fedfrozen_app.local.step import Step

if TYPE_CHECKING:
    from fedfrozen_app.local.worker import Worker

# One block's result: (clients, width) trained rows, and (clients, reported losses) means over the steps.
Trained = tuple[Tensor, Tensor]


@dataclass
class RoundWork:
    worker: "Worker"
    clients: Sequence[str]
    request: TrainRequest
    base: Mapping[str, Tensor]  # the arrays from the request or already held
    layouts: Layouts
    slots: int
    schedule: Schedule
    start: Tensor  # (width,) the start of a client without kept arrays
    starts: ClientStarts
    # By client: its metrics on its validation rows at the start of the round.
    before: Mapping[str, Mapping[str, float]]
    mode: str  # of the step

    def blocks(self) -> Iterator[list[SlotAssignment]]:
        """The assignments sorted by their end, in blocks of as many as there are slots."""
        for first in range(0, len(self.clients), self.slots):
            yield self.schedule.assignments[first : first + self.slots]

    @property
    def from_server(self) -> Tensor:
        """(width,) the request's arrays other than parameters."""
        names = self.layouts.from_server.names
        return self.layouts.from_server.flatten(self.base) if names else self.start.new_zeros(0)


def enter(step: Step, work: RoundWork, assignments: Sequence[SlotAssignment], first_slot: int = 0) -> None:
    """Admit these clients to their slots, each with the round's model and its own kept arrays."""
    starts, worker = work.starts, work.worker
    begin = [starts.begin(one.client) for one in assignments]
    slots = [first_slot + one.slot for one in assignments]
    class_weights = step.arrays.class_weights
    if worker.config.client.class_weights:
        for slot, one in zip(slots, assignments, strict=True):
            train = worker.rows(work.clients[one.client]).train
            class_weights[slot] = worker.data.class_weights(train)
    if work.request.method.evaluates_start():
        begin = [
            starts.replace(one.client, row, _start_values(work, one.client, row))
            for one, row in zip(assignments, begin, strict=True)
        ]
    if work.request.method.adapts():
        first, own_slots = assignments[0].begin, [one.slot for one in assignments]
        batches = work.schedule.index[first, own_slots], work.schedule.mask[first, own_slots]
        held = torch.stack([starts.held[one.client] for one in assignments])
        model = {**worker.parameters, **parameters_in(work.layouts.trained.views(work.start))}
        common = (worker, work.layouts, model, work.from_server, work.request)
        adapted = adapt_rows(*common, torch.stack(begin), held, class_weights[slots], *batches)
        begin = [
            starts.replace(one.client, row, own)
            for one, row, own in zip(assignments, begin, adapted, strict=True)
        ]
    step.admit(slots, begin, [starts.held[one.client] for one in assignments])


def _start_values(work: RoundWork, number: int, row: Tensor) -> dict[str, Tensor]:
    """The loss and gradient of one client's start, by their names in its held row."""
    layouts, worker = work.layouts, work.worker
    model = parameters_in(layouts.trained.views(row)) | layouts.untrained(work.starts.held[number])
    return layouts.start_values(
        *start_loss_and_gradient(worker, work.clients[number], model, work.request.method, layouts.names)
    )
