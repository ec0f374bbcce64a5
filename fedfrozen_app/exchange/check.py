"""Check whether a reply may enter the sum: names, shapes, dtypes, weight, metrics, and its request."""

from collections.abc import Collection, Mapping

from torch import Tensor

from fedfrozen_app.exchange.block import Slice
from fedfrozen_app.exchange.client_metrics import MOST_EXAMPLES, declared_metrics, problem_of_metrics
from fedfrozen_app.exchange.messages import Reply
from fedfrozen_app.exchange.names import is_parameter, parameter_of
from fedfrozen_app.exchange.plan import layers_of
from fedfrozen_app.exchange.role import Role
from fedfrozen_app.exchange.train_request import TrainRequest


def problem_of(
    reply: Reply,
    request: TrainRequest,
    model: Mapping[str, Tensor],
    roles: Mapping[str, Role],
    declared: Collection[str] | None = None,
) -> str | None:
    """Why the reply must be set aside, as the rest of a sentence; None if it is valid. `declared`: the
    allowed metrics; None: those of the request alone, without the strategy's.

    Finiteness is checked when the values are read anyway (`RunningMean.add`).
    """
    if reply.request != request.digest:
        return "answers another request than this round's"
    if request.choosing:
        return problem_of_choice(reply, request, roles)
    declared = declared_metrics(request) if declared is None else declared
    if problem := problem_of_metrics(reply, request, declared):
        return problem
    shared = request.sent_names
    if isinstance(reply.arrays, Slice):
        # Rows of a block have the model's shapes by construction: check only the names.
        same = reply.arrays.block.layout.names == shared
        return None if same else "holds other names than the plan shares"
    if extra := sorted(set(reply.arrays) - set(shared)):
        return f"holds {_some(extra)}, which the plan does not share"
    if request.chooser is not None:
        try:
            part = request.chooser.plan_taken(request.plan, filter(is_parameter, reply.arrays), roles)
        except ValueError as error:
            return str(error)
        shared = request.names_sent(part.shared)
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


def problem_of_choice(reply: Reply, request: TrainRequest, roles: Mapping[str, Role]) -> str | None:
    """The same for a reply that contains only its client's choice of layers."""
    assert request.chooser is not None
    if reply.arrays or reply.metrics or reply.examples:
        return "sent more than its choice of layers"
    if len(reply.chosen) != request.chooser.top_k:
        return f"chose {len(reply.chosen)} layers where {request.chooser.top_k} were asked for"
    known = layers_of(request.plan.trained, roles)
    if not set(reply.chosen) <= set(known) or len(set(reply.chosen)) != len(reply.chosen):
        return "chose layers that the model does not have, or one of them twice"
    return None


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
