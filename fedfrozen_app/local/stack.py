"""Train clients of several runs in one step: runs of the same shape, such as seeds of one setting, together.
A small step is bound by its kernel launches, so more rows cost little. Each run contributes a round's work as
its own cohort runner would train it: the same clients in the same slots, in the same order. The slots of all
runs share one step, and a run's frozen arrays are stored once for it (local/step_arrays.py).
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from fedfrozen_app.core.seeds import seeded
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.local.cohort import CohortRunner
from fedfrozen_app.local.round_work import RoundWork, Trained, enter
from fedfrozen_app.local.slots import Schedule, SlotAssignment
from fedfrozen_app.local.step import Step
from fedfrozen_app.vmap.devices import sent
from fedfrozen_app.vmap.model_modes import training

if TYPE_CHECKING:
    from fedfrozen_app.local.worker import Worker

KEPT = 2  # steps: before and after the freeze


class Stack:
    """Trains the work of up to `runs` runs at once, and keeps the recorded steps between rounds."""

    def __init__(self, runs: int) -> None:
        self.runs = runs
        self._steps: list[tuple[Any, Step]] = []  # most recently used last
        self._fits: int | None = None

    def train(self, works: Sequence[RoundWork]) -> list[list[Trained]]:
        """For each work, all of the same `kind`: the results of its blocks."""
        step = self._step(works)
        each = step.size // step.runs
        for place, work in enumerate(works):
            step.begin(work.request, work.base, place, work.worker)
        schedule, owners = join_schedules(works, each, step.size)

        def enter_all(assignments: Sequence[SlotAssignment]) -> None:
            for place, group in groupby(
                sorted(assignments, key=lambda one: one.slot), lambda t: t.slot // each
            ):
                enter(step, works[place], [owners[one.client][1] for one in group], place * each)

        with training(step.worker.model):
            values, losses = step.finish(schedule.assignments, schedule, enter_all)
        # From the common order of finishing to each work's own.
        row = {owners[one.client]: number for number, one in enumerate(schedule.assignments)}
        own = torch.tensor([row[p, one] for p, work in enumerate(works) for one in work.schedule.assignments])
        own = sent(own, values.device)
        values, losses = values[own], losses[own]
        sizes = [len(assignments) for work in works for assignments in work.blocks()]
        parts = iter(zip(values.split(sizes), losses.split(sizes), strict=True))
        return [[next(parts) for _ in work.blocks()] for work in works]

    def fits(self, measure: Callable[[], int]) -> int:
        """How many clients per run fit if all runs have equally many. Measured once."""
        if self._fits is None:
            self._fits = measure()
        return max(1, self._fits // self.runs)

    def _step(self, works: Sequence[RoundWork]) -> Step:
        """A step with room for these: finished runs leave their slots idle, up to half of all slots."""
        lead, slots = works[0], max(work.slots for work in works)
        # A resumed run keeps its mode, and so do the runs stacked with it.
        mode = max(works, key=lambda work: work.mode != "captured").mode
        key = (lead.request.kind, max(work.schedule.index.shape[2] for work in works), mode)
        for number, (other, step) in enumerate(self._steps):
            roomy = step.runs >= len(works) > step.runs // 2 and step.size // step.runs >= slots
            if other == key and roomy:
                self._steps.append(self._steps.pop(number))
                return step
        # Also drops the step of this kind that has become too large or too small.
        self._steps = [(other, step) for other, step in self._steps if other != key][-KEPT + 1 :]
        made = Step(
            lead.worker,
            lead.layouts,
            len(works) * slots,
            lead.request,
            mode=mode,
            runs=len(works),
        )
        self._steps.append((key, made))
        return made


def join_schedules(
    works: Sequence[RoundWork], each: int, slots: int
) -> tuple[Schedule, list[tuple[int, SlotAssignment]]]:
    """One schedule in which every work has `each` slots of its own; and for each of its clients, the index of
    the work and the assignment within it."""
    owners = [(place, one) for place, work in enumerate(works) for one in work.schedule.assignments]
    assignments = [
        SlotAssignment(number, place * each + one.slot, one.begin, one.end)
        for number, (place, one) in enumerate(owners)
    ]
    assignments.sort(key=lambda one: (one.end, one.slot))
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
    return Schedule(assignments, index, mask, phases), owners


class StackedRunner(CohortRunner):
    """The cohort runner of one of several runs: `ask` trains its work together with that of the others."""

    def __init__(
        self,
        worker: "Worker",
        typical: Sequence[str],
        stack: Stack,
        ask: Callable[[RoundWork], list[Trained]],
    ) -> None:
        super().__init__(worker, typical)
        self._stack, self._ask = stack, ask

    def _trained(self, work: RoundWork) -> Iterator[Trained]:
        yield from self._ask(work)

    @property
    def can_prefetch(self) -> bool:
        return False  # other runs wait for its request

    def _may_run_ahead(self, request: TrainRequest) -> bool:
        return False  # all its blocks come at once

    def _fitting(self, client: str, request: TrainRequest) -> int:
        fitting = super()._fitting
        return self._stack.fits(lambda: fitting(client, request))


def draws_at_random(worker: "Worker") -> bool:
    """Whether training draws random numbers, such as for dropout: stacked with other runs they differ."""
    row = {name: value[:1] for name, value in worker.train_table.inputs.items()}
    on_gpu = worker.device.type == "cuda"
    generator = torch.cuda.default_generators[worker.device.index or 0] if on_gpu else torch.default_generator
    with seeded(0, worker.device), torch.no_grad(), training(worker.model):
        before = generator.get_state()
        worker.model(**worker.task.prepare(row))
        return not torch.equal(before, generator.get_state())
