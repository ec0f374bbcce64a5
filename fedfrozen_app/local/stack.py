"""Clients of several runs in one step: runs of one shape, such as seeds of one setting, advance together.

A small step is bound by launching it, so that more rows cost little. Every run brings a round's work as its
own cohort runner would train it: the same clients in the same slots, in the same order. The slots of all runs
lie beside one another, and what a run does not train is held once for it (local/step.py).
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from fedfrozen_app.devices import sent
from fedfrozen_app.exchange.order import Order
from fedfrozen_app.local.cohort import CohortRunner, Trained, Work, enter
from fedfrozen_app.local.slots import Schedule, Turn
from fedfrozen_app.local.step import Step
from fedfrozen_app.models.meanwhile import training
from fedfrozen_app.seeds import seeded

if TYPE_CHECKING:
    from fedfrozen_app.local.resident import Resident

KEPT = 2  # steps: before and after the freeze


class Stack:
    """Trains the work of up to `runs` runs at once, and keeps the recorded steps between rounds."""

    def __init__(self, runs: int) -> None:
        self.runs = runs
        self._steps: list[tuple[Any, Step]] = []  # the one used last is the last
        self._fits: int | None = None

    def train(self, works: Sequence[Work]) -> list[list[Trained]]:
        """For each work, of one `kind`: what each of its blocks trained."""
        step = self._step(works)
        each = step.size // step.runs
        for place, work in enumerate(works):
            step.begin(work.order, work.base, place, work.resident)
        schedule, owners = laid_together(works, each, step.size)

        def enter_all(turns: Sequence[Turn]) -> None:
            for place, group in groupby(sorted(turns, key=lambda turn: turn.slot), lambda t: t.slot // each):
                enter(step, works[place], [owners[turn.client][1] for turn in group], place * each)

        with training(step.resident.model):
            values, losses = step.finish(schedule.turns, schedule, enter_all)
        # From the order in which all are through to each work's own.
        row = {owners[turn.client]: number for number, turn in enumerate(schedule.turns)}
        own = torch.tensor([row[p, turn] for p, work in enumerate(works) for turn in work.schedule.turns])
        own = sent(own, values.device)
        values, losses = values[own], losses[own]
        sizes = [len(turns) for work in works for turns in work.blocks()]
        parts = iter(zip(values.split(sizes), losses.split(sizes), strict=True))
        return [[next(parts) for _ in work.blocks()] for work in works]

    def fits(self, measure: Callable[[], int]) -> int:
        """How many clients of one run fit, where all runs have as many. Measured once."""
        if self._fits is None:
            self._fits = measure()
        return max(1, self._fits // self.runs)

    def _step(self, works: Sequence[Work]) -> Step:
        """One that has room for these: a run that has left leaves its slots idle, up to half of all."""
        lead, slots = works[0], max(work.slots for work in works)
        # One that was resumed goes on as it began, and takes those beside it along.
        mode = max(works, key=lambda work: work.mode != "captured").mode
        key = (lead.order.kind, max(work.schedule.index.shape[2] for work in works), mode)
        for number, (other, step) in enumerate(self._steps):
            roomy = step.runs >= len(works) > step.runs // 2 and step.size // step.runs >= slots
            if other == key and roomy:
                self._steps.append(self._steps.pop(number))
                return step
        # Also the one of this kind that has become too large or too small.
        self._steps = [(other, step) for other, step in self._steps if other != key][-KEPT + 1 :]
        made = Step(
            lead.resident,
            lead.layouts,
            len(works) * slots,
            lead.order,
            mode=mode,
            runs=len(works),
        )
        self._steps.append((key, made))
        return made


def laid_together(works: Sequence[Work], each: int, slots: int) -> tuple[Schedule, list[tuple[int, Turn]]]:
    """One schedule in which every work has `each` slots of its own, and whose turn each of its clients is:
    the place of the work, and the turn within it."""
    owners = [(place, turn) for place, work in enumerate(works) for turn in work.schedule.turns]
    turns = [
        Turn(number, place * each + turn.slot, turn.begin, turn.end)
        for number, (place, turn) in enumerate(owners)
    ]
    turns.sort(key=lambda turn: (turn.end, turn.slot))
    steps, width = (max(work.schedule.index.shape[axis] for work in works) for axis in (0, 2))
    first = works[0].schedule
    index = first.index.new_zeros(steps, slots, width)
    mask = first.mask.new_zeros(steps, slots, width)
    phases: dict[int, dict[frozenset[str], list[int]]] = {}
    for place, work in enumerate(works):
        own, begin = work.schedule, place * each
        length, count, broad = own.index.shape
        index[:length, begin : begin + count, :broad] = own.index
        mask[:length, begin : begin + count, :broad] = own.mask
        for step, switches in own.phases.items():
            for names, where in switches.items():
                phases.setdefault(step, {}).setdefault(names, []).extend(begin + slot for slot in where)
    return Schedule(turns, index, mask, phases), owners


class StackedRunner(CohortRunner):
    """The cohort runner of one of several runs: `ask` has its work trained beside that of the others."""

    def __init__(
        self,
        resident: "Resident",
        typical: Sequence[str],
        stack: Stack,
        ask: Callable[[Work], list[Trained]],
    ) -> None:
        super().__init__(resident, typical)
        self._stack, self._ask = stack, ask

    def _trained(self, work: Work) -> Iterator[Trained]:
        yield from self._ask(work)

    @property
    def begins_ahead(self) -> bool:
        return False  # others wait for its order

    def _may_run_ahead(self, order: Order) -> bool:
        return False  # all its blocks come at once

    def _fitting(self, client: str, order: Order) -> int:
        return self._stack.fits(lambda: self._measure(client, order))


def draws_at_random(resident: "Resident") -> bool:
    """Whether training draws random numbers, such as for dropout: beside other clients it draws others."""
    row = {name: value[:1] for name, value in resident.train_table.inputs.items()}
    on_gpu = resident.device.type == "cuda"
    generator = (
        torch.cuda.default_generators[resident.device.index or 0] if on_gpu else torch.default_generator
    )
    with seeded(0, resident.device), torch.no_grad(), training(resident.model):
        before = generator.get_state()
        resident.model(**resident.task.prepare(row))
        return not torch.equal(before, generator.get_state())
