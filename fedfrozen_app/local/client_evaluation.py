"""Evaluate one client on its own test rows: the global model, its personal model, and its personal model
after one more round of training."""

from typing import TYPE_CHECKING

from fedfrozen_app.census.fairness_groups import flat
from fedfrozen_app.data.table import Table
from fedfrozen_app.exchange.names import by_namespace
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.local.algorithm import Start
from fedfrozen_app.local.fair import group_metrics
from fedfrozen_app.local.model_evaluation import evaluate_novel, evaluate_test
from fedfrozen_app.local.sequential import LocalSteps, train_client
from fedfrozen_app.models.task import Task

if TYPE_CHECKING:
    from fedfrozen_app.local.worker import Worker


def headline_as(name: str, task: Task, rows: Table) -> dict[str, float]:
    """The headline metric of the loaded model, under this name; empty if it is undefined on these rows."""
    found = task.evaluate(rows)
    return {name: found[task.headline]} if task.headline in found else {}


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
            metrics |= headline_as("global", task, test_rows)
            metrics |= flat("global", group_metrics(worker, client))
    worker.load(request.method.personal(start.anchor, start.client_state), {})
    metrics |= headline_as("personal", task, test_rows)
    metrics |= flat("personal", group_metrics(worker, client))
    if worker.data.novel_table is not None:  # a personal model may lose accuracy on other rows
        metrics["base"] = evaluate_test(worker)[task.headline]
        metrics["novel"] = evaluate_novel(worker)[task.headline]
    if request.plan.trained:
        result = train_client(worker, client, request, start, steps)
        own = {**start.client_state, **by_namespace(result.own)}
        worker.load({**result.trained, **request.method.personal(result.trained, own)}, {})
        metrics |= headline_as("after", task, test_rows)
        metrics |= flat("after", group_metrics(worker, client))
    return metrics
