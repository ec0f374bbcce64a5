"""`Config`: every setting of a run, one section per group, and the keys that belong to no section."""

from dataclasses import MISSING as NO_DEFAULT
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from fedfrozen_app.config.needs import only_with
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
from fedfrozen_app.config.schema.runtime_section import RuntimeConfig
from fedfrozen_app.config.schema.secure_section import SecureAggregationConfig
from fedfrozen_app.config.settings import MISSING, setting

DEFAULT_CLIENTS = 10
# Groups whose keys belong to the class that is named, and the registry's group of these classes.
NAMED = {"strategy": "strategies", "server_optimizer": "server_optimizers"}
# Sections for which a file is chosen (model=vit_tiny). The others are part of the root.
GROUPS = (
    *("model", "adapter", "dataset", "partition", "client", "privacy", "aggregation"),
    *("secure_aggregation", "codec", "runtime", "clock", "pacing"),
)


@dataclass
class Config:
    # A strategy's class declares and checks its own settings (see strategies/).
    strategy: dict[str, Any] = field(default_factory=dict)
    model: ModelConfig = field(default_factory=ModelConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    client: ClientConfig = field(default_factory=ClientConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    aggregation: AggregationConfig = field(default_factory=AggregationConfig)
    secure_aggregation: SecureAggregationConfig = field(default_factory=SecureAggregationConfig)
    codec: CodecConfig = field(default_factory=CodecConfig)
    # The same for a server optimiser (see server/optimizer.py).
    server_optimizer: dict[str, Any] = field(default_factory=lambda: {"name": "none"})
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    clock: ClockConfig = field(default_factory=ClockConfig)
    pacing: PacingConfig = field(default_factory=PacingConfig)
    num_clients: int | None = setting(
        None,
        "Number of clients. `null`: 10, or one for each node under plain `flwr run`, or as many as "
        "`partition=natural` and `partition=domain` find",
        least=1,
    )
    num_rounds: int = setting(32, "Rounds of training", least=0)
    participation: float = setting(1.0, "Share of the clients drawn for each round", above=0, most=1)
    exclude_clients: Any = setting(
        None,
        "Clients that take no part, by number or site name: `exclude_clients=[3,7]`. All others keep their "
        "rows; `fedfrozen forget` sets it",
    )
    eval_every: int = setting(
        1, "Evaluate the global model every so many rounds, and after the last", least=1
    )
    personal: bool | None = setting(
        None,
        "At the end, evaluate every client on test rows of its own (`personal.json`, `fairness.png`). "
        "`null`: where clients have models of their own",
    )
    baseline: Any = setting(
        "auto",
        "At the end, fit a linear model (of entities a dictionary) on the rows of all clients together, and "
        "say if it does better. `auto`: on 2,000 rows at most, a second or two, where one process has them "
        "all; `true`: on 10,000",
        choices=("auto", "true", "false"),
        needs=(
            only_with("runtime", "inprocess", "ray"),
            only_with("privacy", "none"),
            only_with("secure_aggregation", "off"),
        ),
    )
    seed: int = setting(0, "Fixes partitions, cohorts, initial weights, batch order and dropout", least=0)
    device: str = setting("auto", "`auto` takes a GPU where there is one", choices=("auto", "cpu", "cuda"))
    run_id: str | None = setting(
        None,
        "The sites' name for a deployed run, also when it is resumed. `null`: drawn at its start",
        needs=only_with("runtime", "deployed"),
    )
    output_dir: str | None = setting(
        None, "Where the results go. `null`: Hydra's folder, `outputs/DATE/TIME`"
    )
    overwrite: bool = setting(
        False, "`true`: replace a run that the folder already holds. `false`: refuse to start"
    )
    start_from: str | None = setting(  # the key is `from`, which Python keeps for itself
        None, "Start from another run's checkpoint: `RUN/checkpoints/N`"
    )
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    early_stop: EarlyStopConfig = field(default_factory=EarlyStopConfig)
    track: TrackConfig = field(default_factory=TrackConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)


def key_of(name: str) -> str:
    """How a field of `Config` is written in a configuration."""
    return "from" if name == "start_from" else name


def sections() -> dict[str, type]:
    """The dataclass of every section of a run, by its key."""
    found: dict[str, type] = {}
    for one in fields(Config):
        if isinstance(one.default_factory, type) and is_dataclass(one.default_factory):
            found[one.name] = one.default_factory
    return found


def defaults(kind: type) -> dict[str, Any]:
    """Key -> default of a section, as plain values for YAML files to inherit; `???` where there is none."""
    values = {}
    for found in fields(kind):
        if found.default_factory is not NO_DEFAULT:
            values[found.name] = found.default_factory()
        else:
            values[found.name] = MISSING if found.default is NO_DEFAULT else found.default
    return values


def excluded_clients(config: Config) -> frozenset[str]:
    """The clients that take no part, by name."""
    value = config.exclude_clients
    return frozenset(map(str, value if isinstance(value, list) else [] if value is None else [value]))


def root_defaults() -> dict[str, Any]:
    """What `conf/config.yaml` inherits: every key that belongs to no group."""
    nested = sections()
    top_level = {
        key_of(found.name): found.default for found in fields(Config) if found.default is not NO_DEFAULT
    }
    return top_level | {name: defaults(kind) for name, kind in nested.items() if name not in GROUPS}
