"""Run one client's local steps on a GPU as replays of a CUDA graph: small steps are bound by kernel launches.
The recorded step is the cohort runner's, with one slot.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from fedfrozen_app.core.seeds import seed_for, seeded
from fedfrozen_app.exchange.names import by_namespace, flattened, parameters_in, with_namespace
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.local.algorithm import Start
from fedfrozen_app.local.layouts import START, Layouts, loaded_row
from fedfrozen_app.local.sequential import LocalSteps, Stepped, eager_steps
from fedfrozen_app.local.slots import SlotAssignment, lay_out
from fedfrozen_app.local.step import Step
from fedfrozen_app.vmap.model_modes import training

if TYPE_CHECKING:
    from fedfrozen_app.local.worker import Worker


def steps_for(worker: "Worker") -> LocalSteps:
    """How this worker takes local steps: as a CUDA graph on a GPU, unless `runtime.capture=false` or gradient
    checkpointing is on, which cannot be captured."""
    again = worker.config.model.gradient_checkpointing
    if worker.device.type != "cuda" or not worker.config.runtime.capture or again:
        return eager_steps
    return worker.kept.for_worker(Recorder)


class Recorder:
    """Holds the last recorded step.

    Recording costs as much as several steps, so nothing is recorded if every client chooses its own layers.
    Only the request decides, so that a resumed run takes the same steps as an unbroken one.
    """

    def __init__(self) -> None:
        self._key: Any = None
        self._step: Step | None = None

    def __call__(self, worker: "Worker", client: str, request: TrainRequest, start: Start) -> Stepped:
        if request.choice is not None:
            return eager_steps(worker, client, request, start)
        key = (request.plan, request.algorithm, json.dumps(dict(request.settings), sort_keys=True))
        if self._step is None or key != self._key:
            self._step = None  # frees its memory for the new one
            layouts = Layouts.of(worker.parameters, request, request.plan.trained)
            self._key, self._step = key, Step(worker, layouts, 1, request, mode="captured")
        step, schedule = self._step, lay_out(worker, [client], request, 1)
        layout, own = step.layout, flattened(start.client_state)
        began = {with_namespace(START, name): value for name, value in start.model.items()}
        began |= step.layouts.start_values(start.loss, start.gradient)

        def enter(assignments: Sequence[SlotAssignment]) -> None:
            row = loaded_row(worker.parameters, layout)
            if own:
                row = layout.flatten({**layout.views(row), **start.model, **own})
            step.admit([0], [row], [step.layouts.held.flatten({**own, **began})])
            if worker.config.client.class_weights:
                step.arrays.class_weights[0] = worker.data.class_weights(worker.rows(client).train)

        seed = seed_for(worker.config.seed, "dropout", client, request.round)
        with training(worker.model), seeded(seed, worker.device):
            step.begin(request, flattened(start.from_server))
            rows, losses = step.finish(schedule.assignments, schedule, enter)  # (1, …) each
        trained = layout.views(rows[0])
        with torch.no_grad():
            for name, value in parameters_in(trained).items():
                worker.parameters[name].copy_(value)
        return Stepped(losses[0], schedule.assignments[0].end, by_namespace(trained))
