"""From a composed configuration to the dataclasses; a `UserError` for values that cannot work."""

import json
import pickle
from copy import copy, deepcopy
from dataclasses import fields, make_dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedfrozen_app import registry
from fedfrozen_app.config.schema import NAMED, Config, key_of, sections
from fedfrozen_app.config.sentences import sentence
from fedfrozen_app.config.settings import check_settings
from fedfrozen_app.errors import UserError
from fedfrozen_app.words import counted

# torch and the strategies take seconds to import, and whoever only lists runs needs neither.
if TYPE_CHECKING:
    import torch


def read(resolved_config: dict[str, Any], *, here: bool = True) -> Config:
    """The typed configuration, checked: types first, then values and combinations; and where it is to run
    `here`, that this machine has the files and the device that it names."""
    renamed = {("start_from" if key == "from" else key): value for key, value in resolved_config.items()}
    try:
        config = _by_section(renamed)
    except OmegaConfBaseException:
        config = _in_one_piece(renamed)  # which names the whole key that is wrong
    check_config(config, here=here)
    return config


def _by_section(settings: dict[str, Any]) -> Config:
    """OmegaConf takes 50 ms for a whole configuration, and most sections are those of the run before."""
    if any(not isinstance(settings.get(name), dict) for name in sections()):
        return _in_one_piece(settings)
    own = {name: deepcopy(_section(name, pickle.dumps(settings[name]))) for name in sections()}
    others = {key: value for key, value in settings.items() if key not in own}
    return Config(**vars(OmegaConf.to_object(OmegaConf.merge(_beside_sections(), others))), **own)


@lru_cache(maxsize=256)
def _section(name: str, settings: bytes) -> Any:
    plain = pickle.loads(settings)  # noqa: S301 - what the caller has just packed
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(sections()[name]), plain))


@cache  # `merge` works on a copy
def _beside_sections() -> DictConfig:
    kinds = get_type_hints(Config)
    own = [(one.name, kinds[one.name], copy(one)) for one in fields(Config) if one.name not in sections()]
    return OmegaConf.structured(make_dataclass("BesideSections", own))


def _in_one_piece(settings: dict[str, Any]) -> Config:
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), settings))
    except OmegaConfBaseException as error:
        raise UserError(sentence(error)) from error
    assert isinstance(config, Config)
    return config


def strategy_settings(config: Config) -> Any:
    """The settings dataclass of the chosen strategy, checked by itself."""
    return _own_settings("strategy", config)


def server_optimizer_settings(config: Config) -> Any:
    return _own_settings("server_optimizer", config)


def _own_settings(key: str, config: Config) -> Any:
    """What is set under this key, as the `Settings` of the class that it names."""
    settings = dict(getattr(config, key))
    found = registry.find(NAMED[key], str(settings.pop("name", None)))
    return _typed(found.Settings, key, json.dumps(settings), config.num_rounds)


@lru_cache(maxsize=64)  # every round asks for them
def _typed(kind: type, key: str, settings: str, num_rounds: int) -> Any:
    try:
        typed: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), json.loads(settings)))
    except OmegaConfBaseException as error:
        raise UserError(sentence(error, within=f"{key}.")) from error
    check_settings(typed, f"{key}.")
    return typed.checked(num_rounds)


def require_client(config: Config, because: str, **wanted: Any) -> None:
    """For a strategy's `check`: refuse other values of these keys of `client`."""
    for key, value in wanted.items():
        if (found := getattr(config.client, key)) != value:
            needed = "null" if value is None else value
            raise UserError(
                f"strategy={config.strategy['name']} {because}, so client.{key}={found} would make it wrong: "
                f"set client.{key}={needed}, or choose another strategy."
            )


def device_of(name: str) -> "torch.device":
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda was asked for, but torch sees no GPU: use device=cpu or device=auto.")
    return torch.device(name)


def devices_of(config: Config) -> "list[torch.device]":
    """Those that the clients of a round are spread over, the first one first."""
    import torch

    first, asked = device_of(config.device), config.runtime.gpus
    if asked == 1:
        return [first]
    if asked > (there := torch.cuda.device_count() if first.type == "cuda" else 0):
        raise UserError(
            f"runtime.gpus={asked} was asked for, and torch sees {counted(there, 'GPU')}: set runtime.gpus=1"
            + (f", or up to {there}." if there > 1 else ".")
        )
    return [first, *(torch.device("cuda", number) for number in range(1, asked))]


def _check_gpus(config: Config) -> None:
    devices_of(config)
    runtime = config.runtime
    if runtime.gpus == 1:
        return
    alone = {
        "runtime=inprocess": runtime.name != "inprocess",
        "runtime.runner=auto or cohort": runtime.runner == "sequential",
        "privacy=none": config.privacy.name != "none",
        "model.gradient_checkpointing=false": config.model.gradient_checkpointing,
        "adapters of one rank (adapter.ranks={})": bool(config.adapter.ranks),
        "runtime.stack_runs=auto or off": (stack_runs(config) or 1) > 1,
    }
    if needed := next((word for word, lacks in alone.items() if lacks), None):
        raise UserError(
            f"runtime.gpus={runtime.gpus} spreads the clients of one run that train together, which needs "
            f"{needed}: set that, or runtime.gpus=1."
        )


def _value(config: Config, key: str) -> Any:
    found: Any = config
    for part in key.split("."):
        found = getattr(found, part)
    return found


def stack_runs(config: Config) -> int | None:
    """How many runs are to train side by side, 1 for `off`; None for `auto`."""
    word = config.runtime.stack_runs
    if word in ("auto", "off"):
        return 1 if word == "off" else None
    if not word.isascii() or not word.isdigit() or int(word) < 1:
        raise UserError(
            f"runtime.stack_runs={word} is unknown: give a number of runs from 1 on, auto or off."
        )
    return int(word)


def check_config(config: Config, *, here: bool = True) -> None:
    """A `UserError` for values and combinations that cannot work; or that cannot `here`."""
    check_settings(config)
    for name in sections():
        check_settings(getattr(config, name), f"{name}.")
    if config.runtime.name != "inprocess" and config.runtime.runner == "cohort":
        raise UserError(
            "Flower hands out one client a message, so runtime.runner=cohort cannot work there: "
            "use runtime=inprocess, or runtime.runner=auto."
        )
    stack_runs(config)
    if config.client.precision == "bf16" and config.model.dtype == "float64":
        raise UserError(
            "client.precision=bf16 would change nothing with model.dtype=float64, which autocast leaves as "
            "it is: use model.dtype=float32, or client.precision=float32."
        )
    if config.model.gradient_checkpointing and config.runtime.runner == "cohort":
        raise UserError(
            "model.gradient_checkpointing=true computes activations again, which clients that train together "
            "cannot: use runtime.runner=auto or sequential."
        )
    if config.privacy.name != "none":
        _check_private(config)
    elif config.privacy.audited is not None:
        raise UserError(
            f"privacy.audited={config.privacy.audited} needs a claim to audit: add privacy=dp_sgd."
        )
    if config.secure_aggregation.name == "on":
        _check_masked(config)
    if config.adapter.name != "none":
        _check_adapter(config)
    registry.find("strategies", str(config.strategy["name"])).check(strategy_settings(config), config)
    server_optimizer_settings(config)
    if here:
        _check_gpus(config)
        _check_files(config)


def _check_files(config: Config) -> None:
    """A missing folder is better said now than after the model has been built."""
    for key, local in (
        ("dataset.path", config.dataset.kind != "hub" and "://" not in (config.dataset.path or "")),
        ("model.path", config.model.source == "checkpoint"),
        ("model.roles", True),
        ("adapter.path", True),
        ("partition.path", True),
        ("partition.census", True),
        ("start_from", True),
        ("runtime.server_kit", True),
    ):
        path = _value(config, key)
        if path is not None and local and not Path(path).expanduser().exists():
            raise UserError(
                f"{key_of(key)}={path} does not exist: give the path of a folder or file that does."
            )


def _check_adapter(config: Config) -> None:
    """What a rule for adapters says of the frozen weights holds for the plain mean of plain replies."""
    adapter, name = config.adapter, str(config.strategy["name"])
    registry.find("adapters", adapter.name)
    rule, strategy = registry.find("adapter_rules", adapter.rule), registry.find("strategies", name)
    if config.model.dtype == "bfloat16" and config.client.precision != "bf16":
        raise UserError(
            f"model.dtype=bfloat16 with adapter={adapter.name} is for frozen weights; adapters and head "
            f"stay float32: set client.precision=bf16, in which they meet (it is {config.client.precision})."
        )
    settings = strategy_settings(config)
    algorithm = registry.find("algorithms", strategy.algorithm_for(settings))
    own = algorithm.has_arrays() or not algorithm.adds_nothing()
    steps = strategy.step is not registry.find("strategies", "fedavg").step
    if rule.moves_base:
        others = {
            f"server_optimizer={config.server_optimizer['name']}": config.server_optimizer["name"] != "none",
            f"aggregation={config.aggregation.name}": config.aggregation.name != "mean",
            "strategy.zero_fill=true": bool(getattr(settings, "zero_fill", False)),
            f"strategy={name}": steps,
        }
        for words in (words for words, does in others.items() if does):
            raise UserError(
                f"adapter.rule={adapter.rule} makes the model the plain mean of the clients' models, and "
                f"{words} would make it another: leave that out, or use adapter.rule=average or ffa."
            )
        if own:
            raise UserError(
                f"adapter.rule={adapter.rule} adds to the frozen weights in every round, and strategy={name} "
                "has arrays of its own for adapters as they were before: use adapter.rule=average or ffa."
            )
    if adapter.ranks:
        others = {
            "privacy=dp_sgd adds noise to": config.privacy.name != "none",
            "secure_aggregation=on masks": config.secure_aggregation.name == "on",
            f"strategy={name} encodes": strategy.codec_for(settings) is not None,
            f"strategy={name} has arrays beside": own,
        }
        for words in (words for words, does in others.items() if does):
            raise UserError(
                f"adapter.ranks gives clients adapters of unlike sizes, and {words} all of one: leave one of "
                "the two out."
            )


def _check_masked(config: Config) -> None:
    """What looks at clients one by one does not go with sums."""
    if config.secure_aggregation.bits % 8:
        raise UserError(
            f"secure_aggregation.bits={config.secure_aggregation.bits} are no whole bytes: use 16, 24 or 32."
        )
    strategy, settings = registry.find("strategies", str(config.strategy["name"])), strategy_settings(config)
    looks = {
        f"aggregation={config.aggregation.name} compares": config.aggregation.name != "mean",
        f"aggregation.far_out={config.aggregation.far_out} measures": config.aggregation.far_out is not None,
        f"checkpoint.uploads={config.checkpoint.uploads} keeps": config.checkpoint.uploads is not None,
        f"privacy.audited={config.privacy.audited} watches": config.privacy.audited is not None,
        f"strategy={config.strategy['name']} {strategy.one_by_one}": bool(strategy.one_by_one),
    }
    if config.adapter.name != "none":
        rule = registry.find("adapter_rules", config.adapter.rule)
        looks[f"adapter.rule={config.adapter.rule} {rule.one_by_one}"] = bool(rule.one_by_one)
    for words in (words for words, does in looks.items() if does):
        raise UserError(
            f"{words} updates one by one, and secure_aggregation=on shows the server their sum alone: "
            "leave that out, or use secure_aggregation=off."
        )
    if config.secure_aggregation.noise == "sum":
        _check_noise_in_sum(config)
    if config.secure_aggregation.choices == "groups" and config.privacy.name != "none":
        raise UserError(
            "secure_aggregation.choices=groups has a client tell its choice of layers before it trains, and "
            f"privacy={config.privacy.name} pays for both as one: use secure_aggregation.choices=union."
        )
    if config.personal:
        raise UserError(
            "personal=true tells how each client's model does on its own rows, and secure_aggregation=on "
            "tells sums alone: leave personal=null, or use secure_aggregation=off."
        )
    if (codec := strategy.codec_for(settings)) is not None:
        raise UserError(
            f"strategy.{codec[0]}={codec[1]} sends some values and says which, and masks hide both at full "
            f"size: leave strategy.{codec[0]} out, or use secure_aggregation=off."
        )


def _check_noise_in_sum(config: Config) -> None:
    """Noise on a sum covers one plain step: what follows a step must not depend on it in some other way."""
    if config.privacy.name == "none":
        raise UserError("secure_aggregation.noise=sum is the noise of privacy=dp_sgd: add that, or use site.")
    needed = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "head_lr": None, "fusion_lr": None}
    for key, value in needed.items():
        if (found := getattr(config.client, key)) != value:
            wanted = "null" if value is None else value
            raise UserError(
                f"secure_aggregation.noise=sum adds clipped gradients up, and client.{key}={found} would "
                f"make something else of them: set client.{key}={wanted}. A server_optimizer may follow."
            )


def _check_private(config: Config) -> None:
    if config.personal:
        raise UserError(
            "personal=true tells how each client's model does on its own rows, which privacy=dp_sgd does not "
            "cover: leave personal=null."
        )
    if config.privacy.audited is not None and config.privacy.canaries and config.privacy.clipping == "ghost":
        raise UserError(
            "privacy.clipping=ghost takes no canaries, which are gradients and no rows: set "
            "privacy.canaries=0, and noise, clipped sums and accounts are audited without them; or use "
            "privacy.clipping=per_example."
        )
    if config.dataset.augment != "none":
        raise UserError(
            f"dataset.augment={config.dataset.augment} is not made for privacy=dp_sgd, whose steps draw "
            "their own samples: set dataset.augment=none."
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
    if config.model.gradient_checkpointing:
        raise UserError(
            "model.gradient_checkpointing=true hides activations that privacy=dp_sgd needs, for each "
            "example's gradient: set it to false, and lower privacy.physical_batch instead."
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
