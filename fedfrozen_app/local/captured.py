"""A client's local steps on a GPU as replays of one recorded step: a small step is bound by kernel launches.

The recorded step is the cohort runner's, with one client in it: there is one pure step, whoever runs it.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from fedfrozen_app.exchange.names import by_namespace, flattened, parameters_in, with_namespace
from fedfrozen_app.exchange.order import Order
from fedfrozen_app.local.algorithm import Start
from fedfrozen_app.local.sequential import LocalSteps, Stepped, eager_steps
from fedfrozen_app.local.slots import Turn, lay_out
from fedfrozen_app.local.step import START, Layouts, Step, loaded
from fedfrozen_app.models.meanwhile import training
from fedfrozen_app.seeds import seed_for, seeded

if TYPE_CHECKING:
    from fedfrozen_app.local.resident import Resident


def steps_for(resident: "Resident") -> LocalSteps:
    """How this worker takes local steps: recorded on a GPU, unless `runtime.capture=false`, or where
    activations are computed again, which a recorded step cannot."""
    again = resident.config.model.gradient_checkpointing
    if resident.device.type != "cuda" or not resident.config.runtime.capture or again:
        return eager_steps
    if resident.recorder is None:
        resident.recorder = Recorder()
    return resident.recorder


class Recorder:
    """Holds the step that was recorded last.

    A recording costs as much as several steps: where every client chooses its own parameters, none is worth
    it. Nothing but the order decides, so that a resumed run takes the very steps of an unbroken one.
    """

    def __init__(self) -> None:
        self._key: Any = None
        self._step: Step | None = None

    def __call__(self, resident: "Resident", client: str, order: Order, start: Start) -> Stepped:
        if order.choice is not None:
            return eager_steps(resident, client, order, start)
        key = (order.plan, order.algorithm, json.dumps(dict(order.settings), sort_keys=True))
        if self._step is None or key != self._key:
            self._step = None  # its memory is the new one's
            layouts = Layouts.of(resident, order, order.plan.trained)
            self._key, self._step = key, Step(resident, layouts, 1, order, mode="captured")
        step, schedule = self._step, lay_out(resident, [client], order, 1)
        layout, own = step.layout, flattened(start.own)
        began = {with_namespace(START, name): value for name, value in start.model.items()}

        def enter(turns: Sequence[Turn]) -> None:
            row = layout.flatten({**start.model, **own}) if own else loaded(resident, layout)
            step.admit([0], [row], [step.layouts.held.flatten({**own, **began})])
            if resident.config.client.class_weights:
                step.class_weights[0] = resident.class_weights(resident.rows(client).train)

        seed = seed_for(resident.config.seed, "dropout", client, order.round)
        with training(resident.model), seeded(seed, resident.device):
            step.begin(order, flattened(start.order))
            rows, losses = step.finish(schedule.turns, schedule, enter)  # (1, width), (1,)
        trained = layout.views(rows[0])
        with torch.no_grad():
            for name, value in parameters_in(trained).items():
                resident.parameters[name].copy_(value)
        return Stepped(losses[0], schedule.turns[0].end, by_namespace(trained))
