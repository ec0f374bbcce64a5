"""The metrics that a client may send: declared by name, within bounds. Others make a reply invalid.

Declared are the metrics that every client sends (below), those of the request's algorithm (`losses_reported`,
`metric_names`), and those of the strategy (`client_metric_names`).
"""

import math
import re
from collections.abc import Collection, Iterable

from fedfrozen_app.core.formatting import printable
from fedfrozen_app.exchange.messages import Reply
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.tasks.target import metric_names

MOST = 20_000  # of a client's evaluation, by class and subgroup; a training round has some tens
SHOWN = 60  # characters of a name in a message
LONGEST = 400  # characters of a name, which may contain a subgroup's values
MOST_EXAMPLES = 2**53  # larger floats are not exact integers, and beyond 1e38 not float32
# The largest metric, and norm of an update times its weight: far below float32's maximum, so that no sum over
# clients overflows.
TOO_LARGE = 1e32
ROUND = ("client_val_before", "client_val_after", "client_val_tokens", "client_seconds")
PRIVACY = ("epsilon", "delta")
NEEDED = ("train_rows", "test_rows")  # required in an evaluation
EVALUATION = (*NEEDED, "global", "personal", "after", "base", "novel")
# Metrics of an evaluation by group, MODEL/COLUMN/VALUE/METRIC: see census/fairness_groups.py.
BY_GROUP = re.compile(
    r"fair/(global|personal|after)/[^/]+/[^/]*/(rows|people|accuracy|f1|auroc|ece|from|confidence|right)"
)
# Bounds by the last word of a name.
COUNTS = ("_rows", "_people", "_tokens", "_seconds", "_epsilon")
SHARES = (
    *("_accuracy", "_f1", "_f1_macro", "_c_index", "_auroc", "_ece"),
    *("_delta", "_from", "_confidence", "_right"),
)


def declared_metrics(request: TrainRequest, strategy_names: Iterable[str] = ()) -> frozenset[str]:
    """The metrics that a reply to this request may have, except for an evaluation's metrics by group."""
    if request.evaluate:
        return frozenset(EVALUATION)
    quality = metric_names()  # the metrics of `Task.evaluate`
    found = {*ROUND, *(f"personal_{name}" for name in quality)}
    found |= {*request.method.losses_reported(), *request.method.metric_names, *strategy_names}
    if request.plan.private:
        found |= {f"test_{name}" for name in quality}  # only clients have a model to evaluate
    if request.participations:  # only a private run sends clients their number of rounds
        found |= {*PRIVACY}
    return frozenset(found)


def problem_of_metrics(reply: Reply, request: TrainRequest, declared: Collection[str]) -> str | None:
    """Why the reply is invalid, as the rest of a sentence."""
    if len(reply.metrics) > MOST:
        return f"sent {len(reply.metrics)} figures, and {MOST} are the most"
    for name, value in reply.metrics.items():
        if name not in declared and not (request.evaluate and _is_by_group(name)):
            shown = printable(name[:SHOWN])
            return f"sent the figure {shown}, which neither its algorithm nor its strategy declares"
        if not abs(value) < TOO_LARGE:
            return f"sent the figure {name}, which is {'too large' if math.isfinite(value) else 'not finite'}"
        if problem := _out_of_bounds(name, value):
            return f"sent the figure {name}, which is {value:g}: {problem}"
    if ("epsilon" in reply.metrics) != ("delta" in reply.metrics):
        return "tells only one of epsilon and delta"
    if request.evaluate and (missing := [name for name in NEEDED if name not in reply.metrics]):
        return f"did not send the figure {missing[0]}"
    return None


def _is_by_group(name: str) -> bool:
    return len(name) <= LONGEST and name.isprintable() and BY_GROUP.fullmatch(name) is not None


def _out_of_bounds(name: str, value: float) -> str | None:
    """Bounds by the last word of the name: an accuracy is a share, rows are counts."""
    last = name.rpartition("/")[2]
    if f"_{last}".endswith(COUNTS) and not 0 <= value <= MOST_EXAMPLES:
        return "it must be a number from 0 on"
    if f"_{last}".endswith(SHARES) and not -1e-6 <= value <= 1 + 1e-6:
        return "it must be between 0 and 1"
    return None
