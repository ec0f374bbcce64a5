"""Every setting of a run: one file per group, one dataclass per section, one field per key. See `setting`.

The YAML files in `conf/` inherit these defaults as their `base` and set only what they change.
"""

from fedfrozen_app.config.schema.adapter_section import AdapterConfig
from fedfrozen_app.config.schema.aggregation_section import AggregationConfig
from fedfrozen_app.config.schema.client_section import ClientConfig
from fedfrozen_app.config.schema.clock_section import ClockConfig
from fedfrozen_app.config.schema.codec_section import CodecConfig
from fedfrozen_app.config.schema.dataset_section import DatasetConfig
from fedfrozen_app.config.schema.model_section import ModelConfig
from fedfrozen_app.config.schema.output_sections import (
    CheckpointConfig,
    DebugConfig,
    EarlyStopConfig,
    TrackConfig,
)
from fedfrozen_app.config.schema.pacing_section import PacingConfig
from fedfrozen_app.config.schema.partition_section import PartitionConfig
from fedfrozen_app.config.schema.privacy_section import PrivacyConfig
from fedfrozen_app.config.schema.run_config import (
    DEFAULT_CLIENTS,
    GROUPS,
    NAMED,
    Config,
    defaults,
    excluded_clients,
    key_of,
    root_defaults,
    sections,
)
from fedfrozen_app.config.schema.runtime_section import RuntimeConfig
from fedfrozen_app.config.schema.secure_section import SecureAggregationConfig

__all__ = [
    "DEFAULT_CLIENTS",
    "GROUPS",
    "NAMED",
    "AdapterConfig",
    "AggregationConfig",
    "CheckpointConfig",
    "ClientConfig",
    "ClockConfig",
    "CodecConfig",
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
    "defaults",
    "excluded_clients",
    "key_of",
    "root_defaults",
    "sections",
]
