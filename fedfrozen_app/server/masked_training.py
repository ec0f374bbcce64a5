"""A strategy's round under secure aggregation: its request with masks, in one cohort or several."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor

from fedfrozen_app.config import SecureAggregationConfig
from fedfrozen_app.exchange.count import Traffic
from fedfrozen_app.exchange.names import is_parameter
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.secure.layout import FEW, Sums
from fedfrozen_app.secure.work import problem_of_noise
from fedfrozen_app.server.equal_layers import grouped_round
from fedfrozen_app.server.masked import Cohort, MaskedRound
from fedfrozen_app.server.masked_request import masked_request
from fedfrozen_app.server.round_trip import Members
from fedfrozen_app.server.seams import StrategySeams

RATE = 0.2  # of the geometric step towards a quantile, as in Andrew et al.


def request_of(strategy: StrategySeams, request: TrainRequest) -> TrainRequest:
    return masked_request(strategy.federation, request, strategy.client_metric_names(), strategy.equal)


def masked_round(
    strategy: StrategySeams,
    request: TrainRequest,
    members: Members,
    arrays: Mapping[str, Tensor],
    traffic: Traffic,
) -> MaskedRound:
    """A masked round with one cohort, or with one per choice of layers, which clients then send first."""
    connection, secure = strategy.federation.connection, strategy.federation.secure
    if request.choice is not None and secure.choices == "groups":
        limits = secure.min_cohort, secure.step_timeout

        def masked(part: TrainRequest) -> TrainRequest:
            return request_of(strategy, part)

        found = grouped_round(connection, request, masked, members, arrays, traffic, *limits)
    elif strategy.federation.in_batches:
        found = batched_round(strategy, request, members, arrays, traffic)
    else:
        cohort = Cohort(request_of(strategy, request), members, arrays)
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
    """A masked round with one cohort per fixed batch of clients, which has a sum only if it is complete."""
    federation = strategy.federation
    nodes = dict(members)
    cohorts = [
        Cohort(
            request_of(strategy, request),
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


def renewed_clip(secure: SecureAggregationConfig, sums: Sums | None, before: float) -> float:
    """The next round's clipping bound per weight, from public values: the sums of this round.

    A multiple of the root mean square of the round's updates. If more values were clipped than expected for
    rotated updates, the root mean square itself is biased by clipping, and the bound is doubled instead. For
    a quantile, the bound shrinks while more than that share of clients stay within it, and grows while fewer
    do (Andrew et al. 2021, arXiv 1905.03871), based only on their count, which may have noise.
    """
    if sums is None:
        return before
    if secure.quantile is not None:
        return min(before * math.exp(-RATE * (share_within(sums) - secure.quantile)), secure.clip)
    assert secure.renew is not None
    names = [name for name, weight in sums.weights.items() if is_parameter(name) and weight]
    values = sums.replies * sum(sums.arrays[name].numel() for name in names)
    if sums.clipped > FEW * values:
        return min(2 * before, secure.clip)
    means = (sums.squares[name] / (sums.weights[name] * max(sums.arrays[name].numel(), 1)) for name in names)
    largest = max(means, default=0.0)
    return min(secure.renew * math.sqrt(largest), secure.clip) if largest else before


def share_within(sums: Sums) -> float:
    """The share of a sum's clients whose updates stay within its bound."""
    return min(max(sums.within / max(sums.replies, 1), 0.0), 1.0)


def bound_of_next_round(strategy: StrategySeams, masked: MaskedRound, before: float) -> float:
    """The next bound from this round's sums, but never one into which the next round's noise does not fit."""
    federation = strategy.federation
    wanted = renewed_clip(federation.secure, masked.sums, before)
    if federation.secure.noise != "sum" or masked.sums is None:
        return wanted
    cohort = masked.cohorts[0]
    assert cohort.request.masking is not None
    request = replace(cohort.request, masking=replace(cohort.request.masking, clip=wanted))
    owed = federation.sums.owed(cohort.request.round + 1)
    problem = problem_of_noise(request, strategy.model, cohort.roster, cohort.carriers, owed)
    return before if problem else wanted
