"""Evaluate one client on its own test rows: the global model, its personal model, and that after one more
round of training."""

from typing import TYPE_CHECKING

from fedfrozen_app.census.fairness_groups import flat
from fedfrozen_app.exchange.names import by_namespace
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.local.algorithm import Start
from fedfrozen_app.local.fair import group_metrics
from fedfrozen_app.local.model_evaluation import evaluate_novel, evaluate_test
from fedfrozen_app.local.sequential import LocalSteps, train_client

if TYPE_CHECKING:
    from fedfrozen_app.local.worker import Worker


def evaluate_client(
    worker: "Worker",
    client: str,
    request: TrainRequest,
    start: Start,
    steps: LocalSteps | None = None,
) -> dict[str, float]:
    """The headline metric of each model on the client's own test rows. The result of the additional training
    is discarded."""
    test_rows, task = worker.data.client_test_rows(client), worker.task
    metrics: dict[str, float] = {"test_rows": len(test_rows), "train_rows": len(worker.rows(client).train)}
    if not len(test_rows):
        return metrics
    worker.load(start.model, request.base)
    if not request.plan.private or worker.has_global:
        with worker.only_global():
            metrics["global"] = task.evaluate(test_rows)[task.headline]
            metrics |= flat("global", group_metrics(worker, client))
    worker.load(request.method.personal(start.anchor, start.client_state), {})
    metrics["personal"] = task.evaluate(test_rows)[task.headline]
    metrics |= flat("personal", group_metrics(worker, client))
    if worker.data.novel_table is not None:  # a model may lose elsewhere what it gains on its own rows
        metrics["base"] = evaluate_test(worker)[task.headline]
        metrics["novel"] = evaluate_novel(worker)[task.headline]
    if request.plan.trained:
        result = train_client(worker, client, request, start, steps)
        own = {**start.client_state, **by_namespace(result.own)}
        worker.load({**result.trained, **request.method.personal(result.trained, own)}, {})
        metrics["after"] = task.evaluate(test_rows)[task.headline]
        metrics |= flat("after", group_metrics(worker, client))
    return metrics
