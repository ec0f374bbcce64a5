"""A request for clients that mask what they send, and the bytes of its replies."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from fedfrozen_app.exchange.role import Role
from fedfrozen_app.exchange.train_request import Masking, TrainRequest
from fedfrozen_app.secure.sum_up import new_session
from fedfrozen_app.secure.work import bytes_by_role, layout_of, settings_of
from fedfrozen_app.server.federation import Federation

# Metrics that clients send under every strategy: see `Worker` and `train_client`.
CLIENT_METRICS = (
    *("train_loss", "client_val_before", "client_val_after", "client_seconds"),
    *(f"{which}_{metric}" for which in ("personal", "test") for metric in ("loss", "accuracy", "f1")),
)


def masked_request(
    federation: Federation, request: TrainRequest, metric_names: Sequence[str], equal: Sequence[str]
) -> TrainRequest:
    """The same request for clients that mask their replies, for one attempt at the round. `metric_names` and
    `equal` are the strategy's."""
    own = [name for name in request.method.losses_reported() if name not in CLIENT_METRICS]
    names = dict.fromkeys((*CLIENT_METRICS, *own, *request.method.metric_names, *metric_names))
    proposal = (federation.connection.ticket or {}).get("proposal", "")
    words = tuple(names), tuple(equal)
    masking = Masking(new_session(), settings_of(federation.secure), *words, federation.sums.clip, proposal)
    return replace(request, masking=masking)


def masked_bytes(
    request: TrainRequest, model: Mapping[str, Tensor], roles: Mapping[str, Role]
) -> Counter[str]:
    """Bytes by role of one client's reply to this masked request, from shapes alone."""
    assert request.masking is not None
    return bytes_by_role(layout_of(request, model), request.masking.settings["bits"], roles)
