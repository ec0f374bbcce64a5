"""A client codes its update for the wire, and keeps what it has not sent."""

from collections.abc import Mapping

from flwr.app import Context
from torch import Tensor

from fedfrozen_app.core.seeds import seed_for
from fedfrozen_app.exchange.codec import ClientSide
from fedfrozen_app.exchange.names import is_parameter, namespace_of, parameter_of, with_namespace
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.local.client_state import held_arrays
from fedfrozen_app.local.worker import Worker

RESIDUAL = "residual"  # namespace of what was not sent, in the client's state


def encode_update(
    context: Context,
    worker: Worker,
    client: str,
    request: TrainRequest,
    arrays: Mapping[str, Tensor],
    base: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What travels in place of these arrays, and what the client keeps for its next update.

    Without a codec both are as they were; `base` holds the arrays with which the round began.
    """
    coder = request.coder
    if coder is None or request.masking is not None:
        return dict(arrays), {}
    residual = residual_of(context, worker, request) if coder.error_feedback else {}
    side = ClientSide(seed_for(worker.config.seed, "codec", client, request.round), residual)
    sent = coder.encode(arrays, base, worker.roles, side)
    return sent, {with_namespace(RESIDUAL, name): value for name, value in side.residual.items()}


def residual_of(context: Context, worker: Worker, request: TrainRequest) -> dict[str, Tensor]:
    """By parameter, what earlier rounds have not sent; of all parameters, whatever this round shares."""
    found = held_arrays(context, worker, request)
    return {
        parameter_of(name): value
        for name, value in found.items()
        if not is_parameter(name) and namespace_of(name) == RESIDUAL
    }
