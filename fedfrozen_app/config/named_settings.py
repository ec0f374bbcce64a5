"""The settings of the strategy and the server optimiser: their classes declare them as `Settings`."""

import json
from functools import lru_cache
from typing import Any

from fedfrozen_app.config.convert import convert
from fedfrozen_app.config.schema import NAMED, Config
from fedfrozen_app.config.settings import check_settings
from fedfrozen_app.core import registry


def strategy_settings(config: Config) -> Any:
    """The settings of the chosen strategy, as its class checked them and with its defaults filled in."""
    return _settings_of("strategy", config)


def server_optimizer_settings(config: Config) -> Any:
    """The same for the chosen server optimiser."""
    return _settings_of("server_optimizer", config)


def _settings_of(key: str, config: Config) -> Any:
    settings = dict(getattr(config, key))
    name = str(settings.pop("name", None))
    found = registry.find(NAMED[key], name)
    registry.check_current(NAMED[key], name, found)
    return _checked(found.Settings, key, json.dumps(settings), config.num_rounds)


@lru_cache(maxsize=64)  # every round asks for them
def _checked(kind: type, key: str, settings: str, num_rounds: int) -> Any:
    found = convert(kind, json.loads(settings), f"{key}.")
    check_settings(found, f"{key}.")
    return found.checked(num_rounds)
