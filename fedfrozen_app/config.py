"""The configuration of a run: its schema, and the sentences for values that cannot work.

Hydra composes `conf/`; `read` turns the result into the dataclasses below or raises a `UserError`.
"""

import difflib
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser  # internal
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedfrozen_app import registry
from fedfrozen_app.arguments import Arguments
from fedfrozen_app.errors import UserError

# torch and the strategies take seconds to import, and whoever only lists runs needs neither.
if TYPE_CHECKING:
    import torch

DEFAULT_CLIENTS = 10
# Where Hydra keeps its own files: in output_dir too, and not in a second folder that may not be writable.
OmegaConf.register_new_resolver(
    "run_folder", lambda named, usual: str(Path(named).expanduser()) if named else usual, replace=True
)


@dataclass
class ModelConfig:
    name: str = MISSING
    source: str = MISSING
    path: str | None = None
    model_type: str | None = None
    dtype: str = "float32"
    config: dict[str, Any] = field(default_factory=dict)


@dataclass
class DatasetConfig:
    name: str = MISSING
    kind: str = MISSING
    task: str | None = None
    path: str | None = None
    train_split: str = "train"
    test_split: str = "test"
    image_column: str | None = None
    text_column: str | None = None
    label_column: str | None = None
    unit_column: str | None = None
    top_labels: int | None = None
    image_size: int | None = None
    channels: int | None = None
    max_tokens: int = 128
    test_fraction: float = 0.2
    split_seed: int = 0
    limit: int | None = None
    keep_classes: list[str] | None = None
    validation: float = 0.1
    client_validation: float = 0.1
    align: float = 0.0
    mean: list[float] | None = None
    std: list[float] | None = None


@dataclass
class PartitionConfig:
    name: str = MISSING
    alpha: float = 0.3
    column: str | None = None
    min_size: int = 10
    clients_per_domain: int = 1


@dataclass
class ClientConfig:
    optimizer: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.0
    momentum: float = 0.0
    local_epochs: int = 1
    local_steps: int | None = None
    batch_size: int = 16
    lr_schedule: str = "constant"
    lr_final: float = 0.0
    clip: float | None = None
    precision: str = "float32"
    class_weights: bool = False
    head_lr: float | None = None
    fusion_lr: float | None = None


@dataclass
class PrivacyConfig:
    name: str = "none"
    epsilon: float = 8.0
    delta: float | None = None
    max_grad_norm: float = 1.0
    unit: str = "example"
    unit_column: str | None = None
    examples: int | None = None
    accountant: str = "prv"
    selection: str = "noisy"
    selection_share: float = 0.1
    selection_every: int = 5
    selection_rate: float = 0.25
    clipping: str = "per_example"
    physical_batch: int = 64
    seeded_noise: bool = False


@dataclass
class AggregationConfig:
    name: str = "mean"
    trim: float = 0.2
    malicious: int = 0
    far_out: float | None = None
    quorum: float = 0.0


@dataclass
class RuntimeConfig:
    name: str = "inprocess"
    runner: str = "auto"
    max_block: int | None = None
    compile: bool = True
    capture: bool = True
    threads: int | None = None
    cpus_per_client: int = 1
    gpus_per_client: float = 0.0
    round_timeout: float = 3600
    node_timeout: float = 300
    min_nodes: int | None = None
    server_kit: str | None = None
    cache_dir: str | None = None
    cache_gb: float = 4.0


@dataclass
class CheckpointConfig:
    every: int = 1
    keep: int = 2
    uploads: str | None = None


@dataclass
class EarlyStopConfig:
    patience: int | None = None


@dataclass
class TrackConfig:
    tensorboard: bool = True
    wandb: bool = False
    mlflow: bool = False
    project: str = "fedfrozen"


@dataclass
class Config:
    # A strategy knows its own settings: its class checks these (see strategies/).
    strategy: dict[str, Any] = field(default_factory=dict)
    model: ModelConfig = field(default_factory=ModelConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    client: ClientConfig = field(default_factory=ClientConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    aggregation: AggregationConfig = field(default_factory=AggregationConfig)
    # So does a server optimiser (see server/optimizer.py).
    server_optimizer: dict[str, Any] = field(default_factory=lambda: {"name": "none"})
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    num_clients: int | None = None
    num_rounds: int = 40
    participation: float = 1.0
    eval_every: int = 1
    personal: bool | None = None
    seed: int = 0
    device: str = "auto"
    run_id: str | None = None
    output_dir: str | None = None
    start_from: str | None = None  # the key is `from`, which Python keeps for itself
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    early_stop: EarlyStopConfig = field(default_factory=EarlyStopConfig)
    track: TrackConfig = field(default_factory=TrackConfig)


def conf_dir() -> Path:
    """`conf/` of a checkout or a Flower bundle; inside the package when installed from a wheel."""
    package = Path(__file__).resolve().parent
    for folder in (package.parent / "conf", package / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise UserError(f"The folder conf/ is missing beside {package}: install fedfrozen again.")


def compose_config(overrides: str | list[str]) -> DictConfig:
    """Compose as the command line would, for those who have no command line (Flower's apps, tests)."""
    words = shlex.split(overrides) if isinstance(overrides, str) else overrides
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_dir()), version_base=None):
            return compose("config", overrides=words)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(sentence(error)) from error
    except ValueError as error:
        _refuse_null_group(error)
        raise


def with_hydra(
    job: Callable[[DictConfig], float | None], arguments: list[str], *, name: str = "config", verb: str = ""
) -> None:
    """Let Hydra read the command line and call `job`; what it cannot compose is a `UserError`."""
    program = f"fedfrozen {verb}".rstrip()
    # Hydra's own parser, asked first: Hydra itself would print its usage.
    Arguments(prog=program, parents=[get_args_parser()], add_help=False).parse_args(arguments)
    sys.argv = [program, *arguments]
    try:
        hydra.main(config_path=str(conf_dir()), config_name=name, version_base="1.3")(job)()
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(sentence(error)) from error
    except ValueError as error:
        _refuse_null_group(error)
        raise


def _refuse_null_group(error: ValueError) -> None:
    """Hydra answers strategy=null and strategy=5 with a plain ValueError."""
    if str(error).startswith("Config group override must be"):
        raise UserError(
            "A group such as strategy takes the name of one of its files, not null or a number: "
            "`fedfrozen --help` lists them."
        ) from error


def resolved(composed: DictConfig) -> dict[str, Any]:
    """The nested plain dictionary that summaries and checkpoints keep."""
    try:
        resolved_config = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise UserError(sentence(error)) from error
    assert isinstance(resolved_config, dict)
    return {str(key): value for key, value in resolved_config.items() if key not in ("hydra", "experiment")}


def read(resolved_config: dict[str, Any]) -> Config:
    """The typed configuration, checked: types first, then values and combinations."""
    renamed = {("start_from" if key == "from" else key): value for key, value in resolved_config.items()}
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), renamed)
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise UserError(sentence(error)) from error
    assert isinstance(config, Config)
    _check(config)
    return config


def strategy_settings(config: Config) -> Any:
    """The settings dataclass of the chosen strategy, checked by itself."""
    return _own_settings("strategy", config.strategy, "strategies", config.num_rounds)


def server_optimizer_settings(config: Config) -> Any:
    return _own_settings("server_optimizer", config.server_optimizer, "server_optimizers", config.num_rounds)


def _own_settings(key: str, told: dict[str, Any], group: str, num_rounds: int) -> Any:
    """What was told under this key, as the `Settings` of the class that it names."""
    settings = dict(told)
    found = registry.find(group, str(settings.pop("name", None)))
    try:
        typed = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(found.Settings), settings))
    except OmegaConfBaseException as error:
        raise UserError(sentence(error, within=f"{key}.")) from error
    for name, value in vars(typed).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{key}.{name}={value:g} is out of range: it must be finite.")
    return typed.checked(num_rounds)  # type: ignore[union-attr]


def device_of(name: str) -> "torch.device":
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda was asked for, but torch sees no GPU: use device=cpu or device=auto.")
    return torch.device(name)


_CHOICES = {
    "device": ("auto", "cpu", "cuda"),
    "client.optimizer": ("adamw", "sgd"),
    "client.lr_schedule": ("constant", "linear", "cosine"),
    "client.precision": ("float32", "tf32", "bf16"),
    "runtime.name": ("inprocess", "flower", "deployed"),
    "runtime.runner": ("auto", "sequential", "cohort"),
    "aggregation.name": ("mean", "trimmed_mean", "median", "krum"),
    "partition.name": ("dirichlet", "iid", "natural", "domain"),
    "privacy.name": ("none", "dp_sgd"),
    "privacy.unit": ("example", "document", "patient"),
    "privacy.accountant": ("prv", "rdp"),
    "privacy.clipping": ("per_example", "ghost"),
    "privacy.selection": ("noisy", "public", "unaccounted"),
}
# key: (smallest allowed, whether that value itself is allowed, largest allowed)
_RANGES: dict[str, tuple[float, bool, float]] = {
    "num_clients": (1, True, float("inf")),
    "num_rounds": (0, True, float("inf")),
    "participation": (0, False, 1),
    "eval_every": (1, True, float("inf")),
    "seed": (0, True, float("inf")),
    "client.lr": (0, False, float("inf")),
    "client.head_lr": (0, False, float("inf")),
    "client.fusion_lr": (0, False, float("inf")),
    "client.weight_decay": (0, True, float("inf")),
    "client.momentum": (0, True, 1),
    "client.local_epochs": (1, True, float("inf")),
    "client.local_steps": (1, True, float("inf")),
    "client.batch_size": (1, True, float("inf")),
    "client.lr_final": (0, True, 1),
    "client.clip": (0, False, float("inf")),
    "dataset.test_fraction": (0, False, 0.9),
    "dataset.validation": (0, True, 0.9),
    "dataset.client_validation": (0, True, 0.9),
    "dataset.align": (0, True, 0.9),
    "dataset.split_seed": (0, True, float("inf")),
    "dataset.max_tokens": (1, True, float("inf")),
    "dataset.limit": (1, True, float("inf")),
    "dataset.top_labels": (2, True, float("inf")),
    "partition.alpha": (0, False, float("inf")),
    "partition.min_size": (1, True, float("inf")),
    "partition.clients_per_domain": (1, True, float("inf")),
    "checkpoint.every": (0, True, float("inf")),
    "checkpoint.keep": (1, True, float("inf")),
    "early_stop.patience": (1, True, float("inf")),
    "privacy.epsilon": (0.01, True, 1000),
    "privacy.delta": (0, False, 0.5),
    "privacy.max_grad_norm": (0, False, float("inf")),
    "privacy.examples": (1, True, float("inf")),
    "privacy.selection_share": (0, False, 0.9),
    "privacy.selection_every": (1, True, float("inf")),
    "privacy.selection_rate": (0, False, 1),
    "privacy.physical_batch": (1, True, float("inf")),
    "runtime.max_block": (1, True, float("inf")),
    "runtime.threads": (1, True, float("inf")),
    "runtime.cpus_per_client": (1, True, float("inf")),
    "runtime.gpus_per_client": (0, True, float("inf")),
    "runtime.round_timeout": (0, False, float("inf")),
    "runtime.node_timeout": (0, False, float("inf")),
    "runtime.min_nodes": (1, True, float("inf")),
    "aggregation.trim": (0, True, 0.49),
    "aggregation.malicious": (0, True, float("inf")),
    "aggregation.quorum": (0, True, 1),
    "aggregation.far_out": (1, True, float("inf")),
    "runtime.cache_gb": (0, True, float("inf")),
}


def _value(config: Config, key: str) -> Any:
    found: Any = config
    for part in key.split("."):
        found = getattr(found, part)
    return found


def _check(config: Config) -> None:
    for key, choices in _CHOICES.items():
        if (value := _value(config, key)) not in choices:
            raise UserError(f"{key}={value} is unknown: choose one of {', '.join(choices)}.")
    for key, (low, inclusive, high) in _RANGES.items():
        value = _value(config, key)
        if value is None or (low < value <= high and math.isfinite(value)) or (inclusive and value == low):
            continue
        bound = f"at least {low:g}" if inclusive else f"above {low:g}"
        limit = " and finite" if high == float("inf") else f" and at most {high:g}"
        raise UserError(f"{key}={value} is out of range: it must be {bound}{limit}.")
    if config.runtime.name != "inprocess" and config.runtime.runner == "cohort":
        raise UserError(
            "Flower hands out one client a message, so runtime.runner=cohort cannot work there: "
            "use runtime=inprocess, or runtime.runner=auto."
        )
    if config.client.precision == "bf16" and config.model.dtype == "float64":
        raise UserError(
            "client.precision=bf16 would change nothing with model.dtype=float64, which autocast leaves as "
            "it is: use model.dtype=float32, or client.precision=float32."
        )
    if config.privacy.name != "none":
        _check_private(config)
    strategy_settings(config)
    server_optimizer_settings(config)
    device_of(config.device)
    # A missing folder is better said now than after the model has been built.
    for key, local in (
        ("dataset.path", config.dataset.kind != "hub"),
        ("model.path", config.model.source == "checkpoint"),
        ("start_from", True),
        ("runtime.server_kit", True),
    ):
        path = _value(config, key)
        if path is not None and local and not Path(path).expanduser().exists():
            name = "from" if key == "start_from" else key
            raise UserError(f"{name}={path} does not exist: give the path of a folder or file that does.")


def _check_private(config: Config) -> None:
    if config.personal:
        raise UserError(
            "personal=true tells how each client's model does on its own rows, which privacy=dp_sgd does not "
            "cover: leave personal=null."
        )
    if config.client.class_weights:
        raise UserError(
            "client.class_weights=true tells a client's label counts, which privacy=dp_sgd does not cover: "
            "set client.class_weights=false."
        )
    if config.client.clip is not None:
        raise UserError(
            f"client.clip={config.client.clip:g} clips whole steps, and privacy=dp_sgd each example's part: "
            "set client.clip=null and privacy.max_grad_norm."
        )
    if config.model.dtype == "bfloat16":
        raise UserError(
            "model.dtype=bfloat16 cannot measure a gradient's norm well enough to clip it for "
            "privacy=dp_sgd: use model.dtype=float32 (client.precision=bf16 still computes in bfloat16)."
        )
    if config.privacy.clipping == "ghost" and config.client.precision == "bf16":
        raise UserError(
            "privacy.clipping=ghost cannot measure norms well enough with client.precision=bf16: use "
            "client.precision=float32, or privacy.clipping=per_example."
        )


def absolute_paths(resolved_config: dict[str, Any]) -> dict[str, str]:
    """Overrides that make every local path absolute, for processes with another working directory."""
    found = {}
    if resolved_config["dataset"]["path"] is not None and resolved_config["dataset"]["kind"] != "hub":
        found["dataset.path"] = resolved_config["dataset"]["path"]
    if resolved_config["model"]["path"] is not None and resolved_config["model"]["source"] == "checkpoint":
        found["model.path"] = resolved_config["model"]["path"]
    for key, value in (
        ("from", resolved_config["from"]),
        ("output_dir", resolved_config["output_dir"]),
        ("runtime.cache_dir", resolved_config["runtime"]["cache_dir"]),
        ("runtime.server_kit", resolved_config["runtime"]["server_kit"]),
    ):
        if value is not None:
            found[key] = value
    return {key: str(Path(value).expanduser().resolve()) for key, value in found.items()}


def settled(composed: DictConfig, overrides: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """What a run keeps of its configuration: resolved, and as overrides; both with absolute paths.

    Whoever resumes or evaluates the run from another directory means the same files.
    """
    resolved_config, words = resolved(composed), list(overrides)
    found = {key: path for key, path in absolute_paths(resolved_config).items() if key != "output_dir"}
    for key, path in found.items():
        group, _, name = key.rpartition(".")
        place = resolved_config[group] if group else resolved_config
        if place[name] != path:
            place[name] = path
            words.append(quoted(key, path))
    return resolved_config, words


def quoted(key: str, value: str) -> str:
    """A Hydra override whose value may hold spaces, commas, braces or quotes."""
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"{key}='{escaped}'"


def _known_keys(node: Any, prefix: str = "") -> list[str]:
    keys = []
    for key, value in node.items():
        keys.append(prefix + key)
        if isinstance(value, dict):
            keys += _known_keys(value, f"{prefix}{key}.")
    return keys


def sentence(error: Exception, within: str = "") -> str:
    """One sentence out of Hydra's and OmegaConf's several lines; `within` is where its keys lie."""
    if isinstance(error, OverrideParseException):
        return f"'{error.override}' cannot be read: write KEY=VALUE, without spaces, or quote the value."
    if (swept := re.search(r"Ambiguous value for argument '(.*)'", str(error))) is not None:
        return f"{swept[1]} gives several values: add -m to run each of them, or write a list as [a,b]."
    if isinstance(error, ConfigCompositionException) and isinstance(
        error.__cause__, (HydraException, OmegaConfBaseException)
    ):
        return _unknown_key(error) or sentence(error.__cause__)
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        options = ", ".join(option for option in sorted(error.options) if option != "base")
        return f"Unknown {group} '{name}': choose one of {options}."
    unknown = _unknown_key(error, within)
    if unknown:
        return unknown
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    key = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("full_key:")), "")
    if "Missing mandatory value" in str(error):
        return f"{key} is not set: add {key}=VALUE to the command."
    told = lines[0].rstrip(".")
    return f"{within}{key}: {told}." if key else f"{told}."


def _unknown_key(error: Exception, within: str = "") -> str:
    found = re.search(r"Could not override '([^']+)'|Key '([^']+)' (?:is )?not in", str(error))
    if not found:
        return ""
    key = within + (found[1] or found[2])
    if key.startswith("model.config"):
        return f"The model's file does not set '{key}': write +{key}=VALUE to add it."
    resolved_config = OmegaConf.to_container(OmegaConf.structured(Config))
    known = [*_known_keys(resolved_config), "from"]
    for owner, group in (("strategy", "strategies"), ("server_optimizer", "server_optimizers")):
        classes = [registry.find(group, name) for name in registry.names(group)]
        known += [f"{owner}.{name}" for each in classes for name in vars(each.Settings())]
    if key in known:  # another file of the group has it
        group = key.partition(".")[0]
        return f"The chosen {group} has no key '{key}': leave it out, or choose another {group}."
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "`fedfrozen --cfg job` lists the keys."
    return f"There is no key '{key}' in this configuration: {hint}"
