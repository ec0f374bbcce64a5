"""Python objects in place of names: a dataset, a module, or a strategy or client algorithm class.

Each is registered under a name that ends with its content, so that equal objects make equal runs."""

import copy
import re
from dataclasses import MISSING, dataclass, fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from torch import nn

from fedfrozen_app.commands.api.content import digest_of_class, digest_of_module
from fedfrozen_app.config import ClientConfig, DatasetConfig, setting
from fedfrozen_app.config.settings import KEY
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.own_objects import keep
from fedfrozen_app.data.sources.python_rows import FORMS, given_rows
from fedfrozen_app.local.algorithm import Algorithm
from fedfrozen_app.models.spec import ModelSpec
from fedfrozen_app.server.base import PlannedFedAvg

WANTED = {
    "dataset": FORMS,
    "model": "an nn.Module",
    "strategy": "a class derived from fedfrozen.Strategy",
    "algorithm": "a class derived from fedfrozen.Algorithm",
}


def overrides_for(group: str, thing: Any) -> list[str]:
    """The overrides that select `thing` for a configuration group; a string is the name of a file."""
    if isinstance(thing, str):
        if group == "algorithm":
            raise UserError(
                f"algorithm={thing}: name a strategy instead, which brings its clients' algorithm."
            )
        return [f"{group}={thing}"]
    if group == "dataset" and not isinstance(thing, (bool, int, float, type(None))):
        return own_dataset(thing)
    if group == "model" and isinstance(thing, nn.Module):
        return own_model(thing)
    if group == "strategy" and isinstance(thing, type) and issubclass(thing, PlannedFedAvg):
        return own_strategy(thing, "strategy")
    if group == "algorithm" and isinstance(thing, type) and issubclass(thing, Algorithm):
        return own_strategy(strategy_around(thing), "algorithm")
    if isinstance(thing, (PlannedFedAvg, Algorithm)):
        raise UserError(
            f"{group}={type(thing).__name__}(...) is an object: give the class, without brackets."
        )
    asked = f"the name of one, or {WANTED[group]}" if group in WANTED else "a name"
    kind = f"the class {thing.__name__}" if isinstance(thing, type) else type(thing).__name__
    raise UserError(f"{group}={kind} cannot be used: give {asked}.")


def is_settings(group: str, thing: Any) -> bool:
    """Whether a dictionary holds settings of a group; for `dataset` it may also hold rows."""
    if not isinstance(thing, dict) or group != "dataset":
        return isinstance(thing, dict)
    plain = (str, int, float, bool, type(None), Path)
    known = {one.name for one in fields(DatasetConfig)}
    return known.issuperset(thing) or all(isinstance(one, plain) for one in thing.values())


def plain_word(word: str) -> str:
    """HeadLater -> head_later."""
    return re.sub(r"\W+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", word)).strip("_").lower() or "own"


def own_dataset(thing: Any) -> list[str]:
    rows = given_rows(thing)
    name = keep("dataset", "datasets", "own_dataset", rows.what, rows.digest, rows)
    # Images and texts each have a dataset file that selects a suitable model.
    group = ["dataset=digits"] if rows.has_pictures else ["dataset=text", "dataset.path=null"]
    return [*group, f"dataset.kind={name}", "dataset.name=own_dataset"]


@dataclass(frozen=True)
class Copies:
    """Copies the module, so that every run starts with the weights that it had when it was passed."""

    module: nn.Module

    def __call__(self, spec: ModelSpec) -> nn.Module:
        model = copy.deepcopy(self.module)
        return model if spec.weights else model.to("meta")


def own_model(module: nn.Module) -> list[str]:
    word, digest = plain_word(type(module).__name__), digest_of_module(module)
    what = f"the module {type(module).__name__}"
    name = keep("model", "models", word, what, digest, Copies(copy.deepcopy(module)))
    return ["model=linear", f"model.source={name}", f"model.name={word}"]


def own_strategy(thing: type[PlannedFedAvg], argument: str) -> list[str]:
    own: Any = thing.algorithm
    if isinstance(own, type):
        if not issubclass(own, Algorithm):
            raise UserError(
                f"{thing.__name__}.algorithm is the class {own.__name__}: give {WANTED['algorithm']}, or the "
                "name of a built-in one."
            )
        keep_algorithm(own)
    name = keep(
        argument,
        "strategies",
        plain_word(thing.__name__),
        f"the class {thing.__name__}",
        digest_of_class(thing),
        thing,
    )
    return [f"strategy={name}"]


def keep_algorithm(thing: type[Algorithm]) -> None:
    word, digest = plain_word(thing.__name__), digest_of_class(thing)
    keep("algorithm", "algorithms", word, f"the class {thing.__name__}", digest, thing)


def strategy_around(algorithm: type[Algorithm]) -> type[PlannedFedAvg]:
    """FedAvg whose clients train by this algorithm; its fields are settings: `strategy.mu=0.1`."""
    arrays = [*algorithm.from_server, *algorithm.to_server]
    if arrays:
        raise UserError(
            f"{algorithm.__name__} exchanges {', '.join(dict.fromkeys(arrays))} with the server: give a "
            f"strategy whose `step` uses it, a class with `algorithm = {algorithm.__name__}`."
        )
    declared_here = vars(algorithm).get("__annotations__", {})
    plain = [name for name, kind in declared_here.items() if "ClassVar" not in str(kind)]
    if plain and "__dataclass_fields__" not in vars(algorithm):
        raise UserError(
            f"{algorithm.__name__} declares {plain[0]} but is no dataclass, so that it is no setting: put "
            "@dataclass(frozen=True) above the class."
        )
    own: tuple[Any, ...] = fields(algorithm) if is_dataclass(algorithm) else ()
    kinds = get_type_hints(algorithm)
    if open_fields := [one.name for one in own if one.default is MISSING and one.default_factory is MISSING]:
        raise UserError(
            f"{algorithm.__name__}.{open_fields[0]} has no default: give it one, or write a strategy whose "
            "`client_settings` sets it."
        )
    names = [one.name for one in own]
    declared = [(one.name, kinds[one.name], _as_setting(one)) for one in own]
    settings = make_dataclass("Settings", declared, bases=(PlannedFedAvg.Settings,), frozen=True)
    settings.__module__ = algorithm.__module__

    def client_settings(cls: type, settings: Any, client: ClientConfig) -> dict[str, Any]:
        return {name: getattr(settings, name) for name in names}

    body: dict[str, Any] = {
        "__doc__": algorithm.__doc__,
        "__module__": algorithm.__module__,
        "Settings": settings,
        "algorithm": algorithm,
        "client_settings": classmethod(client_settings),
    }
    return type(algorithm.__name__, (PlannedFedAvg,), body)


def _as_setting(field: Any) -> Any:
    if KEY in field.metadata:
        return copy.copy(field)
    default = field.default if field.default is not MISSING else field.default_factory()
    return setting(default, f"{field.name} of the client's algorithm")
