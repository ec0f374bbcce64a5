"""Arrays besides parameters that the server keeps and sends with every request, such as SCAFFOLD's c."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedfrozen_app.core.digests import digests
from fedfrozen_app.exchange.names import flattened
from fedfrozen_app.exchange.train_request import TrainRequest

ServerState = dict[str, dict[str, Tensor]]  # {namespace: {parameter name: array}}


def follow(server_state: ServerState, request: TrainRequest, model: Mapping[str, Tensor]) -> ServerState:
    """The arrays that the request's algorithm needs, for every shared name; new ones are zero.

    Frozen names are dropped.
    """
    found: ServerState = {}
    for space in request.method.from_server:
        known = server_state.get(space, {})
        found[space] = {
            name: known[name] if name in known else torch.zeros_like(model[name])
            for name in request.plan.shared
        }
    return found


def add_to(
    request: TrainRequest, model: dict[str, Tensor], server_state: ServerState
) -> tuple[TrainRequest, dict[str, Tensor]]:
    """The request with these arrays in its base, and all arrays that may have to be sent with it."""
    arrays = flattened(server_state)
    if not arrays:
        return request, model
    return replace(request, base={**request.base, **digests(arrays)}), {**model, **arrays}
