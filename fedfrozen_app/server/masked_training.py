"""A strategy's round under secure aggregation: its request with masks, in one cohort or several."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial

from torch import Tensor

from fedfrozen_app.exchange.count import Traffic
from fedfrozen_app.exchange.train_request import Masking, TrainRequest
from fedfrozen_app.secure.sum_up import new_session
from fedfrozen_app.server.equal_layers import grouped_round
from fedfrozen_app.server.masked import Cohort, MaskedRound
from fedfrozen_app.server.round_trip import Members
from fedfrozen_app.server.seams import StrategySeams

# Metrics that clients send under every strategy: see `Worker` and `train_client`.
CLIENT_METRICS = (
    *("train_loss", "client_val_before", "client_val_after", "client_seconds"),
    *(f"{which}_{metric}" for which in ("personal", "test") for metric in ("loss", "accuracy", "f1")),
)


def masked_request(strategy: StrategySeams, request: TrainRequest) -> TrainRequest:
    """The same request for clients that mask what they send, for one attempt at its round."""
    settings = {key: value for key, value in asdict(strategy.federation.secure).items() if key != "name"}
    own = [name for name in request.method.losses_reported() if name not in CLIENT_METRICS]
    own += [*request.method.metric_names, *strategy.client_metric_names()]
    names = dict.fromkeys((*CLIENT_METRICS, *own))
    proposal = (strategy.federation.connection.ticket or {}).get("proposal", "")
    masking = Masking(new_session(), settings, tuple(names), tuple(strategy.equal), proposal)
    return replace(request, masking=masking)


def masked_round(
    strategy: StrategySeams,
    request: TrainRequest,
    members: Members,
    arrays: Mapping[str, Tensor],
    traffic: Traffic,
) -> MaskedRound:
    """With one cohort; or with one for each choice of layers, which clients then send first."""
    connection, secure = strategy.federation.connection, strategy.federation.secure
    if request.choice is not None and secure.choices == "groups":
        limits = secure.min_cohort, secure.step_timeout

        def masked(part: TrainRequest) -> TrainRequest:
            return masked_request(strategy, part)

        found = grouped_round(connection, request, masked, members, arrays, traffic, *limits)
    elif strategy.federation.in_batches:
        found = batched_round(strategy, request, members, arrays, traffic)
    else:
        cohort = Cohort(masked_request(strategy, request), members, arrays)
        found = MaskedRound(connection, [cohort], arrays, traffic, secure.step_timeout)
    for cohort in found.cohorts:
        cohort.trust = connection.trust
        cohort.on_survivors = partial(strategy.federation.sums.add, cohort.request)
    return found


def batched_round(
    strategy: StrategySeams,
    request: TrainRequest,
    members: Members,
    arrays: Mapping[str, Tensor],
    traffic: Traffic,
) -> MaskedRound:
    """With one cohort for each fixed batch of clients, which gives a sum only if it is complete."""
    federation = strategy.federation
    nodes = dict(members)
    cohorts = [
        Cohort(
            masked_request(strategy, request),
            [(client, nodes[client]) for client in batch],
            arrays,
            whole=True,
        )
        for batch in federation.batches(nodes)
        if set(batch) <= set(nodes)
    ]
    return MaskedRound(
        *(federation.connection, cohorts, arrays, traffic, federation.secure.step_timeout),
        without_cohorts="no batch of clients is complete",
    )
