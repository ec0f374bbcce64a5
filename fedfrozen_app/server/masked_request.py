"""A strategy's request for clients that mask what they send, and the bytes of its replies."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.exchange.train_request import Masking, TrainRequest
from fedfrozen_app.secure.sum_up import new_session
from fedfrozen_app.secure.work import bytes_by_role, layout_of, settings_of

# Metrics that clients send under every strategy: see `Worker` and `train_client`.
CLIENT_METRICS = (
    *("train_loss", "client_val_before", "client_val_after", "client_seconds"),
    *(f"{which}_{metric}" for which in ("personal", "test") for metric in ("loss", "accuracy", "f1")),
)


class MaskingStrategy(Protocol):
    """What its masked requests read of a strategy."""

    @property
    def federation(self) -> Any: ...

    @property
    def equal(self) -> Sequence[str]: ...

    def client_plan(self, server_round: int) -> Plan: ...

    def client_metric_names(self) -> Collection[str]: ...


def masked_request(strategy: MaskingStrategy, request: TrainRequest) -> TrainRequest:
    """The same request for clients that mask what they send, for one attempt at its round."""
    secure = strategy.federation.secure
    own = [name for name in request.method.losses_reported() if name not in CLIENT_METRICS]
    own += [*request.method.metric_names, *strategy.client_metric_names()]
    names = dict.fromkeys((*CLIENT_METRICS, *own))
    proposal = (strategy.federation.connection.ticket or {}).get("proposal", "")
    words = tuple(names), tuple(strategy.equal)
    masking = Masking(new_session(), settings_of(secure), *words, strategy.federation.sums.clip, proposal)
    return replace(request, masking=masking)


def masked_bytes(
    strategy: MaskingStrategy, request: TrainRequest, model: Mapping[str, Tensor]
) -> Counter[str]:
    """By role, those of one client's reply to this request, masked; from shapes alone."""
    secure = strategy.federation.secure
    if request.choice is not None and secure.choices == "groups":  # a group's request has its layers alone
        request = replace(request, plan=strategy.client_plan(request.round), choice=None)
    layout = layout_of(masked_request(strategy, request), model)
    return bytes_by_role(layout, secure.bits, strategy.federation.roles)
