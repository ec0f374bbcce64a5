"""A task whose parameters are mapped over by `vmap`."""

from typing import TYPE_CHECKING

from torch import Tensor

from fedfrozen_app.models.attention_mask import with_attention_mask
from fedfrozen_app.models.task import Inputs, Parameters, Task, call_model

if TYPE_CHECKING:
    from fedfrozen_app.local.worker import Worker

NOTHING: Parameters = {}


def mapped_task(
    worker: "Worker", model: Parameters, rounded: Parameters = NOTHING, of: Parameters = NOTHING
) -> Task:
    """The task for mapped parameters; a call takes missing ones from `model`.
    `rounded` replaces the arrays of `model` and `of` when the model is called with these same objects. Arrays
    that an algorithm has computed (a mixture) are rounded here; otherwise their products would be in float32.
    """
    exact = {**model, **of}

    def call(parameters: Parameters, inputs: Inputs) -> Tensor:
        whole = {**model, **parameters}
        whole |= {name: part for name, part in rounded.items() if whole[name] is exact[name]}
        whole |= {name: whole[name].bfloat16() for name in worker.rounded}
        ready = with_attention_mask(inputs, worker.model)
        return call_model(worker.model, whole, ready)

    return worker.task.with_call(call)
