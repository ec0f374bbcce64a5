"""Schedule the cohort runner: which client trains in which slot and when, and the rows of each slot per step.
A step trains as many clients as there are slots. A client that has taken its last step frees its slot for the
next one at once, so that clients of unequal size leave few slots idle.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.local.batches import drawn_examples
from fedfrozen_app.local.client_data import ClientData
from fedfrozen_app.vmap.devices import sent

if TYPE_CHECKING:
    from fedfrozen_app.local.worker import Worker

OVERHEAD = 2.0  # what launching a step costs, in clients' steps: measured with the ViT of model=vit_cifar
NO_LIMITS: Mapping[str, int] = {}
PhaseSwitches = dict[int, dict[frozenset[str], list[int]]]  # by step: trained names, and their slots


@dataclass(frozen=True)
class SlotAssignment:
    """One client's time in a slot: the steps from `begin` up to `end`."""

    client: int  # its index among the round's clients
    slot: int
    begin: int
    end: int


def assign_slots(counts: Sequence[int], slots: int) -> list[SlotAssignment]:
    """Assign clients with `counts` batches to slots: the longest first, each to the slot that is free first.
    Sorted by their end."""
    free = [(0, slot) for slot in range(slots)]
    assignments = []
    for client in sorted(range(len(counts)), key=lambda client: -counts[client]):
        begin, slot = heapq.heappop(free)
        assignments.append(SlotAssignment(client, slot, begin, begin + counts[client]))
        heapq.heappush(free, (assignments[-1].end, slot))
    return sorted(assignments, key=lambda one: (one.end, one.slot))


def cheapest_size(counts: Sequence[int], limit: int) -> int:
    """The cheapest number of slots up to `limit`: a step costs its slots plus its launch OVERHEAD."""
    best, lowest = 1, float("inf")
    groups = sorted(Counter(counts).items(), reverse=True)
    for slots in range(1, min(limit, len(counts)) + 1):
        steps = _last_end(groups, slots)
        if steps * (slots + OVERHEAD) <= lowest:
            best, lowest = slots, steps * (slots + OVERHEAD)
        if steps == max(counts):  # more slots cannot finish earlier
            break
    return best


def _last_end(groups: Sequence[tuple[int, int]], slots: int) -> int:
    """The last end of `assign_slots`. `groups`: (count, number of clients), the largest count first. Slots
    that become free at the same step are filled together: a cohort of thousands has few distinct counts."""
    free = {0: slots}  # number of slots by the step at which they become free
    times = [0]
    for count, clients in groups:
        while clients:
            time = times[0]
            taken = min(clients, free[time])
            clients -= taken
            free[time] -= taken
            if not free[time]:
                del free[heapq.heappop(times)]
            if time + count not in free:
                free[time + count] = 0
                heapq.heappush(times, time + count)
            free[time + count] += taken
    return max(times)


@dataclass(frozen=True)
class Schedule:
    """The rows that each slot reads in each step."""

    assignments: list[SlotAssignment]  # by their end
    index: Tensor  # (steps, slots, batch) for `ClientData.take`; padding repeats row 0
    mask: Tensor  # (steps, slots, batch) 1 for an example, 0 for padding
    phases: PhaseSwitches = field(default_factory=dict)  # empty for a round without phases

    @cached_property
    def entering(self) -> dict[int, list[SlotAssignment]]:
        """By step, the assignments that begin at it."""
        found: dict[int, list[SlotAssignment]] = {}
        for assignment in self.assignments:
            found.setdefault(assignment.begin, []).append(assignment)
        return found


def batch_counts(
    data: ClientData, clients: Iterable[str], plan: Plan, most_steps: Mapping[str, int] = NO_LIMITS
) -> list[int]:
    """The number of steps of each of these clients in a round."""
    return [sum(counts) for counts in phase_batches(data, clients, plan, most_steps)]


def phase_batches(
    data: ClientData, clients: Iterable[str], plan: Plan, most_steps: Mapping[str, int] = NO_LIMITS
) -> Iterator[list[int]]:
    """The number of steps of each of these clients, by phase; `most_steps`: limits of single clients."""
    settings = data.config.client
    times = [settings.local_epochs if phase.epochs is None else phase.epochs for phase in plan.steps]
    most = settings.local_steps
    for client in clients:
        epoch = -(-data.rows(client).train.numel() // settings.batch_size)
        limits = [limit for limit in (most, most_steps.get(client)) if limit is not None]
        yield [min(count * epoch, *limits) if limits else count * epoch for count in times]


def lay_out(worker: "Worker", clients: Sequence[str], request: TrainRequest, slots: int) -> Schedule:
    """The clients' batches, laid out on the host and sent to the device together."""
    data = worker.data
    width = worker.config.client.batch_size
    if worker.device.type != "cuda":  # nothing is captured, so the width need not be fixed
        width = min(width, max(data.rows(client).train.numel() for client in clients))
    phases = request.plan.steps
    limits = request.most_steps
    assignments = assign_slots(batch_counts(data, clients, request.plan, limits), slots)
    shape = (assignments[-1].end, slots, width)
    rows, lengths, starts = [], [], []
    for one in assignments:
        client = clients[one.client]
        for number, phase in enumerate(phases):
            own = limits.get(client)
            drawn, sizes = drawn_examples(data, client, request.round, number, phase.epochs, own)
            rows.append(drawn.numpy())
            lengths += sizes
        # Where each batch begins in the flattened (steps, slots, batch).
        starts += [(step * slots + one.slot) * width for step in range(one.begin, one.end)]
    before = np.cumsum(lengths) - lengths  # examples in the batches before
    places = np.arange(sum(lengths)) + np.repeat(np.array(starts) - before, lengths)
    index, mask = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=bool)
    index.reshape(-1)[places] = np.concatenate(rows)
    mask.reshape(-1)[places] = True
    numbers, real = (sent(torch.from_numpy(array), worker.device) for array in (index, mask))
    switches = _switches(data, clients, request, assignments) if len(phases) > 1 else {}
    return Schedule(assignments, numbers, real.to(worker.task.dtype), switches)


def _switches(
    data: ClientData, clients: Sequence[str], request: TrainRequest, assignments: Sequence[SlotAssignment]
) -> PhaseSwitches:
    found: PhaseSwitches = {}
    plan, named = request.plan, (clients[one.client] for one in assignments)
    by_phase = phase_batches(data, named, plan, request.most_steps)
    for assignment, counts in zip(assignments, by_phase, strict=True):
        step = assignment.begin
        for phase, count in zip(plan.steps, counts, strict=True):
            found.setdefault(step, {}).setdefault(frozenset(phase.trained), []).append(assignment.slot)
            step += count
    return found
