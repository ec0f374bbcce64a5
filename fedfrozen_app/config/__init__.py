"""The configuration of a run: its schema, its composition by Hydra, and its validation.

`compose_run` gives a run's `ComposedConfig`: Hydra composes `conf/`, and `read` turns the result into the
dataclasses of `schema` or raises a `UserError`.
Values from another machine are never passed to Hydra: `read_strict` (in `strict_values`) reads them. Both
readers share the bounds declared at each field (`setting`) and the rules in `checks`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedfrozen_app.config.checks import check_config
    from fedfrozen_app.config.client_checks import require_client
    from fedfrozen_app.config.compose import (
        absolute_paths,
        compose_config,
        quoted,
        resolved,
        with_hydra,
    )
    from fedfrozen_app.config.composed import ComposedConfig, compose_run
    from fedfrozen_app.config.keys import check_keys, keys_of, known_keys
    from fedfrozen_app.config.named_settings import server_optimizer_settings, strategy_settings
    from fedfrozen_app.config.read_values import read
    from fedfrozen_app.config.runtime_checks import device_of, stack_runs
    from fedfrozen_app.config.schema import (
        DEFAULT_CLIENTS,
        AdapterConfig,
        AggregationConfig,
        CheckpointConfig,
        ClientConfig,
        ClockConfig,
        CodecConfig,
        Config,
        DatasetConfig,
        DebugConfig,
        EarlyStopConfig,
        ModelConfig,
        PacingConfig,
        PartitionConfig,
        PrivacyConfig,
        RuntimeConfig,
        SecureAggregationConfig,
        TrackConfig,
        excluded_clients,
    )
    from fedfrozen_app.config.sentences import sentence
    from fedfrozen_app.config.settings import check_settings, setting

__all__ = [
    "DEFAULT_CLIENTS",
    "AdapterConfig",
    "AggregationConfig",
    "CheckpointConfig",
    "ClientConfig",
    "ClockConfig",
    "CodecConfig",
    "ComposedConfig",
    "Config",
    "DatasetConfig",
    "DebugConfig",
    "EarlyStopConfig",
    "ModelConfig",
    "PacingConfig",
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
    "compose_run",
    "device_of",
    "excluded_clients",
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
    "with_hydra",
]

# Modules in the order in which they are searched for a name: those that do not import Hydra come first.
QUICKEST_FIRST = (
    *("settings", "schema", "keys", "runtime_checks"),
    *("sentences", "compose", "named_settings", "client_checks", "checks", "read_values", "composed"),
)


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: a typo should not wait for Hydra."""
    if name in __all__:
        for module in QUICKEST_FIRST:
            found = importlib.import_module(f"{__name__}.{module}")
            if hasattr(found, name):
                globals()[name] = getattr(found, name)
                return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
