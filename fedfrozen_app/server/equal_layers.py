"""Masked rounds in which clients choose layers: one cohort for each choice.

The server knows each client's choice. A layer sent by fewer than `fewest` clients of a sum would reveal their
updates: so all clients of a cohort send the same layers, and a client with a rare choice gets another one.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from fedfrozen_app.exchange.count import Traffic
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.server.connection import Connection
from fedfrozen_app.server.masked import Cohort, MaskedRound
from fedfrozen_app.server.round_trip import Members, RoundTrip

Layers = tuple[int, ...]


def groups_of(choices: Mapping[str, Layers], fewest: int) -> dict[Layers, list[str]]:
    """The layers of each group, and its clients: at least `fewest` if the cohort has that many.

    Clients with the same choice form a group. The clients of all smaller groups together take the layers that
    most of them chose; if even these are too few, each joins the group whose layers have most in common with
    its own, the smallest one in a tie.
    """
    same: dict[Layers, list[str]] = {}
    for client, layers in choices.items():
        same.setdefault(layers, []).append(client)
    groups = {layers: clients for layers, clients in same.items() if len(clients) >= fewest}
    sizes = {layers: len(clients) for layers, clients in groups.items()}
    rest = {client: layers for client, layers in choices.items() if layers not in groups}
    if rest and (len(rest) >= fewest or not groups):
        groups.setdefault(most_chosen(rest), []).extend(rest)
        return groups
    for client, own in rest.items():
        nearest = max(sizes, key=lambda layers: (len({*layers} & {*own}), -sizes[layers], layers))
        groups[nearest].append(client)
    return groups


def most_chosen(choices: Mapping[str, Layers]) -> Layers:
    """The most chosen layers, as many as each client chose; in a tie, the higher layers."""
    votes = Counter(layer for layers in choices.values() for layer in layers)
    count = len(next(iter(choices.values())))
    return tuple(sorted(sorted(votes, key=lambda layer: (votes[layer], layer), reverse=True)[:count]))


def grouped_round(
    connection: Connection,
    request: TrainRequest,
    masked: Callable[[TrainRequest], TrainRequest],
    members: Members,
    model: Mapping[str, Tensor],
    traffic: Traffic,
    fewest: int,
    patience: float,
) -> MaskedRound:
    """Ask the clients for their choices. The request includes the model, which they keep for training."""
    began = time.perf_counter()
    choices: dict[str, Layers] = {}
    failures: dict[str, str] = {}
    trip = RoundTrip(connection, replace(request, choosing=True), model, traffic)
    for client, reply in trip.replies(members):
        if isinstance(reply, str):
            failures[client] = reply
        else:
            choices[client] = tuple(sorted(reply.chosen))
    cohorts = []
    for layers, clients in groups_of(choices, fewest).items():
        plan = request.plan.keep_layers(layers, connection.roles)
        own = [(client, node) for client, node in members if client in clients]
        cohorts.append(Cohort(masked(replace(request, plan=plan)), own, model))
    seconds = {"choices": time.perf_counter() - began}
    return MaskedRound(
        *(connection, cohorts, model, traffic, patience), apart=True, failures=failures, seconds=seconds
    )
