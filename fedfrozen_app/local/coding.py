"""Encode a client's update for the wire, and keep the residual for error feedback."""

from collections.abc import Mapping

from flwr.app import Context
from torch import Tensor

from fedfrozen_app.core.seeds import seed_for
from fedfrozen_app.exchange.codec import ClientSide
from fedfrozen_app.exchange.names import is_parameter, namespace_of, parameter_of, with_namespace
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.local.client_state import held_arrays
from fedfrozen_app.local.worker import Worker

RESIDUAL = "residual"  # namespace of unsent values in the client state


def encode_update(
    context: Context,
    worker: Worker,
    client: str,
    request: TrainRequest,
    arrays: Mapping[str, Tensor],
    base: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The arrays to send in place of these, and the residual to keep for the next update. Without a codec
    both are unchanged; `base` holds the arrays from the start of the round.
    """
    coder = request.coder
    if coder is None or request.masking is not None:
        return dict(arrays), {}
    residual = residual_of(context, worker, request) if coder.error_feedback else {}
    side = ClientSide(seed_for(worker.config.seed, "codec", client, request.round), residual)
    sent = coder.encode(arrays, base, worker.roles, side)
    return sent, {with_namespace(RESIDUAL, name): value for name, value in side.residual.items()}


def residual_of(context: Context, worker: Worker, request: TrainRequest) -> dict[str, Tensor]:
    """By parameter, what earlier rounds have not sent; for all parameters, whatever this round shares."""
    found = held_arrays(context, worker, request)
    return {
        parameter_of(name): value
        for name, value in found.items()
        if not is_parameter(name) and namespace_of(name) == RESIDUAL
    }
