"""Metrics of the loaded model on test, validation and held-out rows, and on each client's own rows."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedfrozen_app.config import Config
from fedfrozen_app.models.task import Task

if TYPE_CHECKING:
    from fedfrozen_app.local.worker import Worker


def evaluates_after(config: Config, server_round: int) -> bool:
    """Whether this round ends with an evaluation."""
    return server_round % config.eval_every == 0 or server_round == config.num_rounds


def evaluate_test(worker: "Worker") -> dict[str, float]:
    return worker.task.evaluate(worker.data.test_table)


def evaluate_novel(worker: "Worker") -> dict[str, float]:
    """Metrics on the classes that are not trained; empty if there are none."""
    novel, table = worker.data.corpus.novel, worker.data.novel_table
    if novel is None or table is None:
        return {}
    with worker.wrapper.reading_classes(worker.model, novel.classes):
        return worker.task.evaluate(table)


def evaluate_validation(worker: "Worker") -> dict[str, float]:
    """Metrics on the server's validation rows; empty if it has none."""
    rows = worker.data.shares.validation
    if not len(rows):
        return {}
    return _evaluate_rows(worker, torch.from_numpy(rows).to(worker.device))


def evaluate_personal(worker: "Worker", client: str, *, shares_model: bool = False) -> dict[str, float]:
    """Metrics of a client's personal model on its own test rows, and on the whole test set if the server has
    no model to evaluate."""
    test_rows = worker.data.client_test_rows(client)
    found = {f"personal_{k}": v for k, v in worker.task.evaluate(test_rows).items()} if len(test_rows) else {}
    if not (shares_model or worker.has_global) and len(worker.data.test_table):
        found |= {f"test_{key}": value for key, value in evaluate_test(worker).items()}
    return found


def evaluate_client_validation(worker: "Worker", client: str, when: str) -> dict[str, float]:
    """Metrics on the client's validation rows; empty if it holds none out."""
    rows = worker.data.rows(client).validation
    if not len(rows):
        return {}
    return _client_metrics(worker.task, when, _evaluate_rows(worker, rows))


def evaluate_client_validations(
    worker: "Worker", clients: Sequence[str], when: str, predict: Callable[[list[Tensor]], list[Tensor]]
) -> dict[str, dict[str, float]]:
    """The same for all of these clients with validation rows. `predict` returns their models' predictions on
    each client's rows, with one device synchronisation for all."""
    data, task = worker.data, worker.task
    if not worker.config.dataset.client_validation:
        return {}
    rows = [data.rows(client).validation for client in clients]
    lengths = [own.numel() for own in rows]
    if not any(lengths):
        return {}
    labels = data.train_table.labels[torch.cat(rows).to(worker.device)].cpu().split(lengths)
    return {
        client: _client_metrics(task, when, task.target.measure(its, true, task.classes))
        for client, its, true in zip(clients, predict(rows), labels, strict=True)
        if len(true)
    }


def predict_loaded(worker: "Worker", rows: list[Tensor]) -> list[Tensor]:
    """The loaded model's predictions on each of these lists of rows, on the host."""
    table = worker.data.train_table.take(torch.cat(rows))
    _, predictions = worker.task.predict(table, worker.task.rows_at_once(table))
    return list(predictions.cpu().split([len(own) for own in rows]))


def _evaluate_rows(worker: "Worker", index: Tensor) -> dict[str, float]:
    return worker.task.evaluate(worker.data.train_table.take(index))


def _client_metrics(task: Task, when: str, found: Mapping[str, float]) -> dict[str, float]:
    counts = {"client_val_tokens": found["tokens"]} if "tokens" in found else {}
    own = {f"client_val_{when}": found[task.headline]} if task.headline in found else {}
    return {**own, **counts}
