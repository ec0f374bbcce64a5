"""Who trains in which slot of the cohort runner, and when; and the rows that each slot sees in each step.

A step trains as many clients as there are slots. A client that has taken its own last step makes room for the
next one at once, so that clients of unequal size leave few slots idle: padding is not work.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedfrozen_app.devices import sent
from fedfrozen_app.exchange.order import Order
from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.local.sequential import drawn_examples

if TYPE_CHECKING:
    from fedfrozen_app.local.resident import Resident

OVERHEAD = 2.0  # what launching a step costs, in clients' steps: measured with the ViT of model=vit_cifar


@dataclass(frozen=True)
class Turn:
    """One client's time in a slot: the steps from `begin` up to `end`."""

    client: int  # its place among the clients of the round
    slot: int
    begin: int
    end: int


def take_turns(counts: Sequence[int], slots: int) -> list[Turn]:
    """For clients with `counts` batches: the longest first, each where a slot is free first. By their end."""
    free = [(0, slot) for slot in range(slots)]
    turns = []
    for client in sorted(range(len(counts)), key=lambda client: -counts[client]):
        begin, slot = heapq.heappop(free)
        turns.append(Turn(client, slot, begin, begin + counts[client]))
        heapq.heappush(free, (turns[-1].end, slot))
    return sorted(turns, key=lambda turn: (turn.end, turn.slot))


def cheapest_size(counts: Sequence[int], limit: int) -> int:
    """How many slots, up to `limit`, cost least: a step costs its slots plus the OVERHEAD of launching it."""
    best, lowest = 1, float("inf")
    for slots in range(1, min(limit, len(counts)) + 1):
        steps = take_turns(counts, slots)[-1].end
        if steps * (slots + OVERHEAD) <= lowest:
            best, lowest = slots, steps * (slots + OVERHEAD)
        if steps == max(counts):  # more slots cannot end sooner
            break
    return best


@dataclass(frozen=True)
class Schedule:
    """Which rows each slot sees in each step."""

    turns: list[Turn]  # by their end
    index: Tensor  # (steps, slots, batch) for `Resident.take`; padding repeats row 0
    mask: Tensor  # (steps, slots, batch) 1 for an example, 0 for padding
    # By step, where a round has phases: the names that train from it on, and in which slots.
    phases: dict[int, dict[frozenset[str], list[int]]] = field(default_factory=dict)

    @cached_property
    def entering(self) -> dict[int, list[Turn]]:
        """By step, the turns that begin with it."""
        found: dict[int, list[Turn]] = {}
        for turn in self.turns:
            found.setdefault(turn.begin, []).append(turn)
        return found


def batch_counts(resident: "Resident", clients: Iterable[str], plan: Plan) -> list[int]:
    """How many steps each of these clients takes in a round."""
    return [sum(counts) for counts in phase_batches(resident, clients, plan)]


def phase_batches(resident: "Resident", clients: Iterable[str], plan: Plan) -> Iterator[list[int]]:
    """How many steps each of these clients takes in each phase of its round."""
    settings = resident.config.client
    times = [settings.local_epochs if phase.epochs is None else phase.epochs for phase in plan.steps]
    most = settings.local_steps
    for client in clients:
        epoch = -(-resident.rows(client).train.numel() // settings.batch_size)
        yield [count * epoch if most is None else min(count * epoch, most) for count in times]


def lay_out(resident: "Resident", clients: Sequence[str], order: Order, slots: int) -> Schedule:
    """The clients' batches, laid out on the host and sent to the device in one go."""
    settings = resident.config.client
    width = settings.batch_size
    if resident.device.type != "cuda":  # nothing is captured, so that the width is free
        width = min(width, max(resident.rows(client).train.numel() for client in clients))
    phases = order.plan.steps
    turns = take_turns(batch_counts(resident, clients, order.plan), slots)
    shape = (turns[-1].end, slots, width)
    rows, lengths, starts = [], [], []
    for turn in turns:
        for number, phase in enumerate(phases):
            client = clients[turn.client]
            drawn, sizes = drawn_examples(resident, client, order.round, number, phase.epochs)
            rows.append(drawn.numpy())
            lengths += sizes
        # Where each batch begins in the flattened (steps, slots, batch).
        starts += [(step * slots + turn.slot) * width for step in range(turn.begin, turn.end)]
    before = np.cumsum(lengths) - lengths  # examples in the batches before
    places = np.arange(sum(lengths)) + np.repeat(np.array(starts) - before, lengths)
    index, mask = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=bool)
    index.reshape(-1)[places] = np.concatenate(rows)
    mask.reshape(-1)[places] = True
    numbers, real = (sent(torch.from_numpy(array), resident.device) for array in (index, mask))
    switches = _switches(resident, clients, order.plan, turns) if len(phases) > 1 else {}
    return Schedule(turns, numbers, real.to(resident.task.dtype), switches)


def _switches(
    resident: "Resident", clients: Sequence[str], plan: Plan, turns: Sequence[Turn]
) -> dict[int, dict[frozenset[str], list[int]]]:
    found: dict[int, dict[frozenset[str], list[int]]] = {}
    by_phase = phase_batches(resident, (clients[turn.client] for turn in turns), plan)
    for turn, counts in zip(turns, by_phase, strict=True):
        step = turn.begin
        for phase, count in zip(plan.steps, counts, strict=True):
            found.setdefault(step, {}).setdefault(frozenset(phase.trained), []).append(turn.slot)
            step += count
    return found
