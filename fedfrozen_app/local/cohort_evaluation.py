"""The metrics that clients of a stacked round report: on held-out rows before and after training, and of
their personal models."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from fedfrozen_app.exchange.block import Block
from fedfrozen_app.exchange.names import parameters_in
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.local.algorithm import ByNamespace, Finished
from fedfrozen_app.local.block_results import own_arrays
from fedfrozen_app.local.model_evaluation import (
    evaluate_client_validation,
    evaluate_client_validations,
    evaluate_personal,
    evaluates_after,
    predict_loaded,
)
from fedfrozen_app.local.round_work import RoundWork
from fedfrozen_app.local.stacked_calls import predict
from fedfrozen_app.models.wrapper import Wrapper

if TYPE_CHECKING:
    from fedfrozen_app.local.worker import Worker

ByClient = dict[str, dict[str, float]]


def evaluates_one_by_one(worker: "Worker", request: TrainRequest) -> bool:
    """Whether clients are evaluated one by one, each with its own model loaded: if they have personal models,
    or if the model reports metrics. Others are evaluated together."""
    return request.is_personal or type(worker.wrapper).metrics is not Wrapper.metrics


def evaluate_before(
    worker: "Worker", clients: Sequence[str], request: TrainRequest, kept: Sequence[Mapping[str, Tensor]]
) -> ByClient:
    """For each client with validation rows: its metrics as the round begins, with what it keeps."""
    if not evaluates_one_by_one(worker, request):
        return evaluate_client_validations(worker, clients, "before", partial(predict_loaded, worker))
    found = {}
    for client, arrays in zip(clients, kept, strict=True):
        if len(worker.rows(client).validation):
            worker.load(parameters_in(arrays), {})
            found[client] = evaluate_client_validation(worker, client, "before")
    return found


def evaluate_block(
    work: RoundWork, block: Block, held: Tensor, done: Finished | None
) -> list[dict[str, float]]:
    """For each client of the block: its metrics after training, with those from before."""
    worker, layouts = work.worker, work.layouts
    if evaluates_one_by_one(worker, work.request):
        own = partial(own_arrays, layouts, block, held, done)
        found = [
            _evaluate_one(work, block, number, layouts.untrained(held[number]), own)
            for number in range(len(block.clients))
        ]
        # Clients without kept arrays start from the round's model.
        worker.load(parameters_in(layouts.trained.views(work.start)), {})
        return found
    predictions = partial(predict, worker, layouts, block.values, held)
    after = evaluate_client_validations(worker, block.clients, "after", predictions)
    return [{**work.before.get(c, {}), **after.get(c, {})} for c in block.clients]


def _evaluate_one(
    work: RoundWork,
    block: Block,
    number: int,
    untrained: Mapping[str, Tensor],
    own: Callable[[int], ByNamespace],
) -> dict[str, float]:
    """The same metrics as the sequential runner's, with the client's model loaded."""
    worker, request, client = work.worker, work.request, block.clients[number]
    personal = request.is_personal
    if client not in work.before and not personal:
        return {}
    trained = parameters_in(block.slice(number))
    worker.load({**untrained, **trained}, {})
    metrics = worker.figures()
    if client in work.before:
        metrics |= {**work.before[client], **evaluate_client_validation(worker, client, "after")}
    if personal and evaluates_after(worker.config, request.round):
        if request.method.is_personal():
            worker.load(request.method.personal(trained, own(number)), {})
        metrics |= evaluate_personal(worker, client, shares_model=not request.plan.private)
    return metrics
