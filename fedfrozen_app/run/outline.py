"""The plans of a strategy for a model, without a federation."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

from torch import Tensor

from fedfrozen_app.adapters.rule import make_rule
from fedfrozen_app.config import Config, strategy_settings
from fedfrozen_app.config.codec_checks import down_codec_of
from fedfrozen_app.core import registry
from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.exchange.role import Role
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.server.base import Federation, PlannedFedAvg
from fedfrozen_app.server.coded_broadcast import Broadcast
from fedfrozen_app.server.connection import connect
from fedfrozen_app.server.optimizer import make_optimizer


def planning_strategy(
    config: Config, model: Mapping[str, Tensor], roles: Mapping[str, Role]
) -> PlannedFedAvg:
    """A strategy that plans like the run's own; the model may be on the meta device."""
    federation = Federation(
        connect(cast(Any, None), roles),
        config.participation,
        config.seed,
        config.aggregation,
        private=config.privacy.name != "none",
        optimizer=make_optimizer(config),
        client=config.client,
        secure=config.secure_aggregation,
        rule=make_rule(config),
        exchanged=frozenset(model),
    )
    strategy: PlannedFedAvg = registry.find("strategies", config.strategy["name"])(
        federation, strategy_settings(config)
    )
    connection = federation.connection
    connection.codec, connection.broadcast = config.codec, Broadcast(down_codec_of(config.codec), config.seed)
    strategy.model, strategy.num_rounds = dict(model), config.num_rounds
    return strategy


def requests(strategy: PlannedFedAvg) -> Iterator[TrainRequest]:
    """The requests of the run's rounds, as far as they are known beforehand: one for each distinct plan."""
    known: set[Plan] = set()
    for number in range(1, max(strategy.num_rounds, 1) + 1):
        request = strategy.request(number, {})
        if request.plan not in known:
            known.add(request.plan)
            yield request


def shares_model(config: Config, model: Mapping[str, Tensor], roles: Mapping[str, Role]) -> bool:
    """Whether the clients of this run share a whole model."""
    return planning_strategy(config, model, roles).shares_model


def shared_roles(config: Config, model: Mapping[str, Tensor], roles: Mapping[str, Role]) -> set[str]:
    """The roles, in the words of policies, of all parameters that this run requests from clients."""
    everything = {role.word for name, role in roles.items() if name in model}
    strategy = planning_strategy(config, model, roles)
    found: set[str] = set()
    for server_round in range(1, config.num_rounds + 1):
        found |= {roles[name].word for name in strategy.plan(server_round).shared}
        if found == everything:
            break
    return found
