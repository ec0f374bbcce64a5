"""Whether a reply may enter the sum: names, shapes, dtypes, weight, figures, and the order it answers."""

import math
import re
from collections.abc import Collection, Mapping

from torch import Tensor

from fedfrozen_app.exchange.block import Slice
from fedfrozen_app.exchange.messages import Reply
from fedfrozen_app.exchange.names import is_parameter, parameter_of
from fedfrozen_app.exchange.order import Order
from fedfrozen_app.exchange.plan import layers_of
from fedfrozen_app.models.roles import Role

# What the server finds out itself, such as who chose what: a client that sent such a figure would speak in
# its place. What a strategy adds of its own is in its `tells`.
SERVER_FIGURES = re.compile(
    "round|stage|seconds|drift|private|failures|discarded|by_client|usual_norm|effective_clients|"
    "trained_params|epsilon_max|selection|layers|layer_scores|secure|clients.*|bytes_.*|val_.*|novel_.*"
)
MOST_EXAMPLES = 2**53  # a weight beyond is no whole number any more, and one beyond 1e38 no float32
# Of a figure, and of an update's norm times its weight: far below what float32 holds, so that no sum over
# clients overflows.
TOO_LARGE = 1e32


def problem_of(
    reply: Reply, order: Order, model: Mapping[str, Tensor], roles: Mapping[str, Role]
) -> str | None:
    """Why the reply must be set aside, as the rest of a sentence; None when it is sound.

    Finiteness is checked where the values are read anyway (`RunningMean.add`).
    """
    if reply.order != order.digest:
        return "answers another order than this round's"
    if order.choosing:
        return problem_of_choice(reply, order, roles)
    if problem := problem_of_figures(reply, order):
        return problem
    shared = order.sent_names
    if isinstance(reply.arrays, Slice):
        # Rows of a block have the model's shapes by construction; whether these are the plan's names is all.
        same = reply.arrays.block.layout.names == shared
        return None if same else "holds other names than the plan shares"
    if extra := sorted(set(reply.arrays) - set(shared)):
        return f"holds {_some(extra)}, which the plan does not share"
    if order.chooser is not None:
        try:
            part = order.chooser.plan_taken(order.plan, filter(is_parameter, reply.arrays), roles)
        except ValueError as error:
            return str(error)
        shared = order.names_sent(part.shared)
    if missing := [name for name in shared if name not in reply.arrays]:
        return f"lacks {_some(missing)}, which the plan shares"
    for name, tensor in reply.arrays.items():
        expected = model[parameter_of(name)]
        if tensor.shape != expected.shape:
            return f"has the shape {tuple(tensor.shape)} for {name}, not {tuple(expected.shape)}"
        if tensor.dtype != expected.dtype:
            return f"has the type {tensor.dtype} for {name}, not {expected.dtype}"
    if not 0 < reply.examples <= MOST_EXAMPLES:
        return f"claims {reply.examples:g} examples"
    return None


def problem_of_choice(reply: Reply, order: Order, roles: Mapping[str, Role]) -> str | None:
    """The same for a reply that is to tell which layers its client takes, and nothing else."""
    assert order.chooser is not None
    if reply.arrays or reply.metrics or reply.examples:
        return "sent more than its choice of layers"
    if len(reply.chosen) != order.chooser.top_k:
        return f"chose {len(reply.chosen)} layers where {order.chooser.top_k} were asked for"
    known = layers_of(order.plan.trained, roles)
    if not set(reply.chosen) <= set(known) or len(set(reply.chosen)) != len(reply.chosen):
        return "chose layers that the model does not have, or one of them twice"
    return None


def problem_of_figures(reply: Reply, order: Order) -> str | None:
    for name, value in reply.metrics.items():
        if not abs(value) < TOO_LARGE:
            return f"sent the figure {name}, which is {'too large' if math.isfinite(value) else 'not finite'}"
        # The test set is the server's to judge by, but for personal models, which only their owners have.
        is_test_figure = name.startswith("test_") and not (order.plan.private or order.judge)
        if is_test_figure or SERVER_FIGURES.fullmatch(name):
            return f"sent the figure {name}, which is not a client's to tell"
    if ("epsilon" in reply.metrics) != ("delta" in reply.metrics):
        return "tells only one of epsilon and delta"
    return None


def problem_of_names(reply: Reply, taken: Collection[str]) -> str | None:
    """The same for figures that the strategy tells itself."""
    for name in reply.metrics:
        if name in taken:
            return f"sent the figure {name}, which is not a client's to tell"
    return None


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
