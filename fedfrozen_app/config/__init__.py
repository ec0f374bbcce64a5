"""The configuration of a run: its schema, and the sentences for values that cannot work.

Hydra composes `conf/`; `read` turns the result into the dataclasses of `schema` or raises a `UserError`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedfrozen_app.config.checks import (
        check_config,
        device_of,
        devices_of,
        read,
        require_client,
        server_optimizer_settings,
        stack_runs,
        strategy_settings,
    )
    from fedfrozen_app.config.compose import (
        absolute_paths,
        compose_config,
        quoted,
        resolved,
        with_absolute_paths,
        with_hydra,
    )
    from fedfrozen_app.config.keys import check_keys, keys_of, known_keys
    from fedfrozen_app.config.schema import (
        DEFAULT_CLIENTS,
        AdapterConfig,
        AggregationConfig,
        CheckpointConfig,
        ClientConfig,
        Config,
        DatasetConfig,
        DebugConfig,
        EarlyStopConfig,
        ModelConfig,
        PartitionConfig,
        PrivacyConfig,
        RuntimeConfig,
        SecureAggregationConfig,
        TrackConfig,
    )
    from fedfrozen_app.config.sentences import sentence
    from fedfrozen_app.config.settings import check_settings, setting

__all__ = [
    "DEFAULT_CLIENTS",
    "AdapterConfig",
    "AggregationConfig",
    "CheckpointConfig",
    "ClientConfig",
    "Config",
    "DatasetConfig",
    "DebugConfig",
    "EarlyStopConfig",
    "ModelConfig",
    "PartitionConfig",
    "PrivacyConfig",
    "RuntimeConfig",
    "SecureAggregationConfig",
    "TrackConfig",
    "absolute_paths",
    "check_config",
    "check_keys",
    "check_settings",
    "compose_config",
    "device_of",
    "devices_of",
    "keys_of",
    "known_keys",
    "quoted",
    "read",
    "require_client",
    "resolved",
    "sentence",
    "server_optimizer_settings",
    "setting",
    "stack_runs",
    "strategy_settings",
    "with_absolute_paths",
    "with_hydra",
]

QUICKEST_FIRST = ("settings", "schema", "keys", "sentences", "compose", "checks")


def __getattr__(name: str) -> Any:
    """Found when it is asked for: the last three modules import Hydra, which a typo should not wait for."""
    if name in __all__:
        for module in QUICKEST_FIRST:
            found = importlib.import_module(f"{__name__}.{module}")
            if hasattr(found, name):
                globals()[name] = getattr(found, name)
                return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
