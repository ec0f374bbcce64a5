"""Check the settings of `client` that a strategy and its algorithm allow."""

from typing import Any

from fedfrozen_app.config.named_settings import strategy_settings
from fedfrozen_app.config.schema import Config
from fedfrozen_app.core import registry
from fedfrozen_app.core.errors import UserError


def require_client(config: Config, because: str, **wanted: Any) -> None:
    """For a strategy's `check`: raise a `UserError` for other values of these keys of `client`."""
    for key, value in wanted.items():
        if (found := getattr(config.client, key)) != value:
            needed = "null" if value is None else value
            raise UserError(
                f"strategy={config.strategy['name']} {because}, so client.{key}={found} would make it wrong: "
                f"set client.{key}={needed}, or choose another strategy."
            )


def check_algorithm(config: Config) -> None:
    """The strategy's client algorithm must fit its settings; one with a `step` of its own replaces
    `client.optimizer` and all its settings."""
    strategy, settings = registry.find("strategies", str(config.strategy["name"])), strategy_settings(config)
    name = strategy.algorithm_for(settings)
    algorithm, sent = registry.find("algorithms", name), strategy.client_settings(settings, config.client)
    try:
        algorithm(**sent)
    except TypeError as error:
        raise UserError(
            f"client_settings of strategy={config.strategy['name']} returns {', '.join(sent) or 'nothing'}, "
            f"which does not fit the fields of the client algorithm '{name}' ({error}): use the same names."
        ) from error
    if not algorithm.has_step():
        return
    because = "takes its own local steps"
    require_client(config, because, optimizer="sgd", momentum=0, weight_decay=0, head_lr=None, fusion_lr=None)
    if algorithm.trainable_state:
        raise UserError(
            f"The algorithm {name} has a step of its own, which updates the parameters alone, and also "
            f"trains {', '.join(algorithm.trainable_state)}: leave step or trainable_state out."
        )
    secure = config.secure_aggregation
    conflicts = {
        f"privacy.audited={config.privacy.audited}": config.privacy.audited is not None,
        "secure_aggregation.noise=sum": secure.name == "on" and secure.noise == "sum",
    }
    for words in (words for words, is_set in conflicts.items() if is_set):
        raise UserError(
            f"strategy={config.strategy['name']} {because}, and {words} knows those of plain SGD alone: "
            "leave one of the two out."
        )
