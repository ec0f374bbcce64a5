"""What stacked clients compute outside their steps, under `vmap`: predictions, `adapt` and `finish`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn.functional import pad

from fedfrozen_app.data.augment import taken
from fedfrozen_app.exchange.names import flattened, parameters_in
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.local.algorithm import Finished
from fedfrozen_app.local.client_optimizer import learning_rate
from fedfrozen_app.local.layouts import Layouts
from fedfrozen_app.local.loss_errors import checked_finish
from fedfrozen_app.local.mapped_task import mapped_task
from fedfrozen_app.models.task import Batch, Parameters
from fedfrozen_app.vmap.attention import folded
from fedfrozen_app.vmap.convolution import as_products
from fedfrozen_app.vmap.model_modes import evaluation_mode

if TYPE_CHECKING:
    from fedfrozen_app.local.worker import Worker


@torch.no_grad()
def predict(
    worker: "Worker", layouts: Layouts, values: Tensor, held: Tensor, rows: Sequence[Tensor]
) -> list[Tensor]:
    """Each client's predictions on its own rows, on the host."""
    module, table = worker.model, worker.train_table
    model = {name: value.detach() for name, value in worker.parameters.items()}
    longest = max(len(own) for own in rows)
    index = torch.stack([pad(own, (0, longest - len(own))) for own in rows]).to(worker.device)

    def one(row: Tensor, held: Tensor, index: Tensor) -> Tensor:
        task = mapped_task(worker, {**model, **layouts.untrained(held)})
        batch = Batch(*taken(table.inputs, table.labels, index, augmented=False))
        return task.predictions(task.logits(parameters_in(layouts.trained.views(row)), batch))

    with evaluation_mode(module), folded(module), as_products(module, layouts.names):
        pieces = index.split(max(1, worker.task.rows_at_once(table) // len(rows)), dim=1)
        predictions = torch.cat([vmap(one)(values, held, piece) for piece in pieces], dim=1).cpu()
    return [predictions[number, : len(own)] for number, own in enumerate(rows)]


@torch.no_grad()
def adapt_rows(
    worker: "Worker",
    layouts: Layouts,
    model: Parameters,
    from_server: Tensor,
    request: TrainRequest,
    values: Tensor,
    held: Tensor,
    weights: Tensor,
    index: Tensor,
    mask: Tensor,
) -> list[dict[str, Tensor]]:
    """For each client, what the algorithm's `adapt` returns for its first batch: arrays by
    `namespace/name`."""
    module, config = worker.model, worker.config
    method, rate = request.method, learning_rate(config.client, request.round, config.num_rounds)

    def loss(
        shift: Tensor, row: Tensor, held: Tensor, weights: Tensor, index: Tensor, mask: Tensor
    ) -> Tensor:
        task = mapped_task(worker, {**model, **layouts.untrained(held)})
        batch = Batch(*worker.take(index), weights, mask)
        return method.first_batch_loss(shift, batch, task, layouts.start(model, row, held, from_server))

    def adapt(gradient: Tensor, row: Tensor, held: Tensor) -> dict[str, Tensor]:
        return flattened(method.adapt(gradient, layouts.start(model, row, held, from_server), rate))

    with evaluation_mode(module), folded(module), as_products(module, layouts.names), torch.enable_grad():
        # Outside the vmap, like a step's gradients: folded attention has no gradient inside.
        shifts = values.new_zeros(len(values), requires_grad=True)
        losses = vmap(loss)(shifts, values, held, weights, index, mask)
        (gradients,) = torch.autograd.grad(losses.sum(), shifts)
    found = vmap(adapt)(gradients, values, held)
    return [{name: value[number] for name, value in found.items()} for number in range(len(values))]


@torch.no_grad()
def finish_rows(
    layouts: Layouts,
    model: Parameters,
    from_server: Tensor,
    request: TrainRequest,
    values: Tensor,
    held: Tensor,
    steps: Tensor,
    rate: float,
) -> Finished:
    """What the algorithm's `finish` returns for these clients: one row per client in every array."""

    def one(row: Tensor, held: Tensor, steps: Tensor) -> tuple[Any, ...]:
        start = layouts.start(model, row, held, from_server)
        trained = parameters_in(layouts.trained.views(row))
        done = checked_finish(request.method, start, trained, steps, rate)
        return dict(done.client_state), dict(done.to_server), dict(done.model), dict(done.metrics)

    return Finished(*vmap(one)(values, held, steps))
