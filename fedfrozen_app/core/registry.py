"""The registry of objects that a configuration can name. Nothing is imported before it is used.

Built-in objects are in the table below. Other installed packages add theirs through entry points of the
groups `fedfrozen.strategies`, `fedfrozen.algorithms` and so on: name = "module:object".
"""

import difflib
import importlib
import importlib.util
from dataclasses import fields
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from fedfrozen_app.core.built_in_table import DECLARED
from fedfrozen_app.core.errors import UserError

BUILT_IN: dict[str, dict[str, str]] = {
    "strategies": {
        "apfl": "strategies.apfl:APFL",
        "ditto": "strategies.ditto:Ditto",
        "fedavg": "strategies.fedavg:FedAvg",
        "fedbabu": "strategies.fedbabu:FedBABU",
        "feddyn": "strategies.feddyn:FedDyn",
        "fedfrozen": "strategies.fedfrozen:FedFrozen",
        "fednova": "strategies.fednova:FedNova",
        "fedotp": "strategies.fedotp:FedOTP",
        "fedpart": "strategies.fedpart:FedPart",
        "fedper": "strategies.fedper:FedPer",
        "fedpgp": "strategies.fedpgp:FedPGP",
        "fedprox": "strategies.fedprox:FedProx",
        "fedrep": "strategies.fedrep:FedRep",
        "local": "strategies.local:Local",
        "local_momentum": "strategies.local_momentum:LocalMomentum",
        "mimelite": "strategies.mimelite:MimeLite",
        "moon": "strategies.moon:Moon",
        "pfeddc": "strategies.pfeddc:PFedDC",
        "pfedmoap": "strategies.pfedmoap:PFedMoAP",
        "private_attention": "strategies.private_attention:PrivateAttention",
        "qfedavg": "strategies.qfedavg:QFedAvg",
        "safl": "strategies.safl:SAFL",
        "scaffold": "strategies.scaffold:Scaffold",
        "schedule": "strategies.schedule:Schedule",
        "term": "strategies.term:TERM",
    },
    "algorithms": {
        "apfl": "clients.apfl:APFL",
        "ditto": "clients.ditto:Ditto",
        "fedavg": "clients.fedavg:FedAvg",
        "feddyn": "clients.feddyn:FedDyn",
        "fednova": "clients.fednova:FedNova",
        "fedpgp": "clients.fedpgp:FedPGP",
        "fedprox": "clients.fedprox:FedProx",
        "local_momentum": "clients.local_momentum:LocalMomentum",
        "mimelite": "clients.mimelite:MimeLite",
        "moon": "clients.moon:Moon",
        "qfedavg": "clients.qfedavg:QFedAvg",
        "scaffold": "clients.scaffold:Scaffold",
        "term": "clients.term:TERM",
    },
    "choices": {
        "attention": "clients.safl:ByAttention",
        "gradient": "clients.safl:ByGradient",
        "random": "clients.safl:AtRandom",
    },
    "codecs": {
        "keep": "fedfrozen_app.exchange.prune:Prune",
        "float16": "fedfrozen_app.exchange.codecs.halves:Float16",
        "bfloat16": "fedfrozen_app.exchange.codecs.halves:BFloat16",
        "int8": "fedfrozen_app.exchange.codecs.quantised:Int8",
        "int4": "fedfrozen_app.exchange.codecs.quantised:Int4",
        "topk": "fedfrozen_app.exchange.codecs.sparse:TopK",
        "randomk": "fedfrozen_app.exchange.codecs.sparse:RandomK",
        "lowrank": "fedfrozen_app.exchange.codecs.lowrank:LowRank",
    },
    # By model.source: a callable from a ModelSpec to a module.
    "models": {
        "config": "fedfrozen_app.models.transformer:from_config",
        "checkpoint": "fedfrozen_app.models.transformer:from_checkpoint",
        "hub": "fedfrozen_app.models.transformer:from_hub",
        "aligned": "fedfrozen_app.align.tiny:no_classifier",
        "linear": "fedfrozen_app.models.table_models:linear",
        "mlp": "fedfrozen_app.models.table_models:mlp",
        "ft_transformer": "fedfrozen_app.models.ft_transformer:ft_transformer",
        "unet": "fedfrozen_app.models.unet:unet",
        "vit_segmenter": "fedfrozen_app.models.vit_segmenter:vit_segmenter",
        "cnn": "fedfrozen_app.models.pixels:cnn",
        "lenet": "fedfrozen_app.models.pixels:lenet",
        "moderate_cnn": "fedfrozen_app.models.pixels:moderate_cnn",
    },
    # What is predicted: a Target (tasks/target.py), by the name that `data.json` has for it.
    "tasks": {
        "image": "fedfrozen_app.tasks.classification:ImageClass",
        "text": "fedfrozen_app.tasks.classification:TextClass",
        "table": "fedfrozen_app.tasks.classification:TextClass",
        "multilabel": "fedfrozen_app.tasks.multilabel:Multilabel",
        "tokens": "fedfrozen_app.tasks.entity_tags:Entities",
        "language": "fedfrozen_app.tasks.language:Language",
        "regression": "fedfrozen_app.tasks.regression:Regression",
        "survival": "fedfrozen_app.tasks.time_to_event:Cox",
        "survival_discrete": "fedfrozen_app.tasks.time_to_event:DiscreteTime",
        "segmentation": "fedfrozen_app.tasks.segmentation:Segmentation",
    },
    # By adapter.name: a Wrapper (models/wrapper.py) of the adapter's settings. `none` is no entry.
    "adapters": {
        "lora": "fedfrozen_app.adapters.adapted:Adapted",
    },
    # By adapter.rule: how clients' adapters are aggregated.
    "adapter_rules": {
        "average": "fedfrozen_app.adapters.rules.average:Average",
        "ffa": "fedfrozen_app.adapters.rules.ffa:FFA",
        "fedex": "fedfrozen_app.adapters.rules.fedex:FedEx",
        "stack": "fedfrozen_app.adapters.rules.flora:Stack",
    },
    # By dataset.kind: a callable from a DatasetSpec to the rows found.
    "datasets": {
        "digits": "fedfrozen_app.data.sources.digits:read_digits",
        "digit_words": "fedfrozen_app.data.sources.digits:read_digits",
        "images": "fedfrozen_app.data.sources.masks:read_pictures",
        "parquet": "fedfrozen_app.data.sources.parquet_tables:read_parquet",
        "text": "fedfrozen_app.data.sources.tabular:read_text",
        "hub": "fedfrozen_app.data.sources.parquet_tables:read_hub",
        "conll": "fedfrozen_app.data.sources.conll:read_conll",
        "brat": "fedfrozen_app.data.sources.brat:read_brat",
        "i2b2": "fedfrozen_app.data.sources.i2b2:read_i2b2",
        "mimic": "fedfrozen_app.data.sources.mimic:read_mimic",
        "synthetic": "fedfrozen_app.data.sources.synthetic:read_synthetic",
        "dicom": "fedfrozen_app.data.sources.medical:read_dicom",
        "nifti": "fedfrozen_app.data.sources.masks:read_volumes",
        "omop": "fedfrozen_app.data.sources.omop:read_omop",
        "table": "fedfrozen_app.data.sources.columns:read_table",
        "arrays": "fedfrozen_app.data.sources.numpy_files:read_arrays",
        "instructions": "fedfrozen_app.data.sources.instructions:read_instructions",
    },
    # By model.source: a callable that builds a dual encoder's folder from a configuration and its data.
    "backbones": {
        "aligned": "fedfrozen_app.align.tiny:aligned_folder",
    },
    "server_optimizers": {
        "none": "fedfrozen_app.server.optimizer:NoOptimizer",
        "avgm": "fedfrozen_app.server.optimizers.avgm:AvgM",
        "adam": "fedfrozen_app.server.optimizers.adam:Adam",
        "yogi": "fedfrozen_app.server.optimizers.yogi:Yogi",
        "adagrad": "fedfrozen_app.server.optimizers.adagrad:Adagrad",
    },
}
_ONE = {
    "strategies": "strategy",
    "algorithms": "client algorithm",
    "server_optimizers": "server optimiser",
    "models": "model.source",
    "adapter_rules": "adapter.rule",
    "datasets": "dataset.kind",
    "tasks": "dataset.task",
}
# The folders of methods beside this package: one file per name.
_FOLDERS = {"strategies": "strategies", "algorithms": "clients"}
# What this process has added for itself, by group and name: it comes before everything else.
REGISTERED: dict[tuple[str, str], Any] = {}


@lru_cache(maxsize=16)  # looking through every installed package takes a while
def places(group: str) -> dict[str, str]:
    """By name, "module:object" of everything in a group; what is built in cannot be replaced by a package."""
    others = {found.name: found.value for found in entry_points(group=f"fedfrozen.{group}")}
    built_in = BUILT_IN.get(group, {})
    return built_in | others | built_in  # in the table's order, followed by other packages'


def register(group: str, name: str, thing: Any) -> None:
    """Let a configuration of this process name `thing`, without a package around it.

    Under a new name: requests that were parsed are cached by name.
    """
    REGISTERED[group, name] = thing


def not_in_table(group: str, name: str) -> str:
    """The sentence for someone who has written `strategies/NAME.py` and not yet listed it; "" otherwise."""
    folder = _FOLDERS.get(group, "")
    if not folder or not name.isidentifier() or name in places(group) or name.startswith("_"):
        return ""
    if not (Path(__file__).resolve().parents[2] / folder / f"{name}.py").is_file():
        return ""
    return (
        f'{folder}/{name}.py is not in the table of names yet: add "{name}": "{folder}.{name}:CLASS" to '
        f'BUILT_IN["{group}"] in fedfrozen_app/core/registry.py, then run `python -m '
        "fedfrozen_app.config.built_in`."
    )


def names(group: str) -> list[str]:
    """All names: in the table's order, then those of packages, then those added by this process."""
    return list(dict.fromkeys([*places(group), *(name for other, name in REGISTERED if other == group)]))


def described(group: str, name: str) -> tuple[str, str]:
    """What it does (the first line of its docstring) and whose method it is (its `paper`)."""
    if (known := _in_table(group, name)) is not None:
        return known["says"], known["paper"]
    return _described_by(find(group, name))


def settings_of(group: str, name: str) -> dict[str, Any]:
    """Key -> default of its settings."""
    if (known := _in_table(group, name)) is not None:
        return dict(known["settings"])
    return _settings_by(find(group, name))


def declared_by(thing: Any) -> dict[str, Any]:
    """A class's entry in the table of built-in methods."""
    says, paper = _described_by(thing)
    return {"says": says, "paper": paper, "settings": _settings_by(thing)}


def check_current(group: str, name: str, thing: Any) -> None:
    """For someone who changes a built-in method: its defaults come from the table, which must be current."""
    known = _in_table(group, name)
    if known is not None and known["settings"] != _settings_by(thing):
        raise UserError(
            f"The settings of {_ONE.get(group, group)} '{name}' have changed: run `python -m "
            "fedfrozen_app.config.built_in`, which writes the table of their defaults."
        )


def _in_table(group: str, name: str) -> dict[str, Any] | None:
    """The entry of a built-in method, which need not be imported; None for everything else."""
    return None if (group, name) in REGISTERED else DECLARED.get(group, {}).get(name)


def _described_by(thing: Any) -> tuple[str, str]:
    paper = vars(thing).get("paper", "")  # its own, not inherited
    return (thing.__doc__ or "").strip().partition("\n")[0], paper


def _settings_by(thing: Any) -> dict[str, Any]:
    plain = thing.Settings()
    return {one.name: getattr(plain, one.name) for one in fields(plain)}


def check_not_hidden(package: str) -> None:
    """`strategies` and `clients` are common names: another package of that name may come before ours."""
    ours = Path(__file__).resolve().parents[2] / package
    spec = importlib.util.find_spec(package)
    found = [Path(place).resolve() for place in (spec and spec.submodule_search_locations) or ()]
    if found and ours not in found:
        raise UserError(
            f"Another package called '{package}' ({found[0]}) hides the one of fedfrozen: remove it from the "
            "path, or start in another folder."
        )


def find(group: str, name: str) -> Any:
    """The object of that name; a `UserError` where there is none, or where it cannot be imported."""
    if (group, name) in REGISTERED:
        return REGISTERED[group, name]
    known = places(group)
    if name not in known:
        if unlisted := not_in_table(group, str(name)):
            raise UserError(unlisted)
        near = difflib.get_close_matches(str(name), names(group), n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(names(group))}."
        raise UserError(f"Unknown {_ONE.get(group, group.removesuffix('s'))} '{name}': {hint}")
    module, _, attribute = known[name].partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        if name in BUILT_IN.get(group, {}):
            check_not_hidden(module.partition(".")[0])
            raise
        raise UserError(
            f"The installed package that offers the {_ONE.get(group, group)} '{name}' cannot be imported "
            f"({error}): mend or remove it."
        ) from error
