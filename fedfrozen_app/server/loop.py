"""The loop around a strategy's rounds: Flower's interface, and closing a round."""

import time
from typing import Any

from flwr.serverapp.strategy import Strategy

from fedfrozen_app.exchange.arrays import to_record
from fedfrozen_app.files.rows import Row
from fedfrozen_app.server.federation import Evaluate


def _not_used(self: Any, *args: Any, **kwargs: Any) -> Any:
    raise TypeError("a planned strategy runs its rounds in start(), not through Flower's own loop")


class OwnLoop(Strategy):
    """Replaces Flower's own loop, which keeps only the arrays of the last replies and collects all replies in
    a list. `start` is ours, and the methods of Flower's loop are not available."""

    configure_train = aggregate_train = configure_evaluate = aggregate_evaluate = summary = _not_used


def close_round(strategy: Any, row: Row, began: float, evaluate_fn: Evaluate | None) -> bool:
    """Evaluate, then call the hooks; returns whether one of them asks to stop."""
    seconds = row.setdefault("seconds", {})
    evaluating = time.perf_counter()
    # Clients with personal models have evaluated them already.
    if evaluate_fn is not None and "test_loss" not in row:
        row.update(evaluate_fn(row["round"], to_record(strategy.model, local=True)) or {})
    seconds["evaluate"] = time.perf_counter() - evaluating
    seconds["total"] = time.perf_counter() - began
    stops = []
    for hook in strategy.hooks:
        stop, more = hook.after_round(strategy, row)
        row.update(more)
        stops.append(stop)
    return any(stops)
