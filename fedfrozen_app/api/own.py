"""Python objects in place of names: a data set, a module, a strategy class, each registered under a name."""

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any

import datasets
from torch import nn

from fedfrozen_app import registry
from fedfrozen_app.data.sources.raw_rows import DatasetSpec, Found, reads
from fedfrozen_app.data.sources.tabular import from_splits
from fedfrozen_app.errors import UserError
from fedfrozen_app.models.spec import ModelSpec
from fedfrozen_app.server.base import PlannedFedAvg


def overrides_for(group: str, thing: Any) -> list[str]:
    """The words that choose `thing` for a group of the configuration; a string is the name of a file."""
    if isinstance(thing, str):
        return [f"{group}={thing}"]
    if group == "dataset" and isinstance(thing, (datasets.Dataset, Mapping)):
        return own_dataset(thing)
    if group == "model" and isinstance(thing, nn.Module):
        return own_model(thing)
    if group == "strategy" and isinstance(thing, type) and issubclass(thing, PlannedFedAvg):
        return [f"strategy={own_name('strategies', thing.__name__, thing)}"]
    wanted = {
        "dataset": "a datasets.Dataset or DatasetDict",
        "model": "an nn.Module",
        "strategy": "a class derived from fedfrozen.Strategy",
    }
    asked = f"the name of one, or {wanted[group]}" if group in wanted else "a name"
    raise UserError(f"{group}={type(thing).__name__} cannot be used: give {asked}.")


def is_settings(thing: Any) -> bool:
    """Whether a dictionary holds settings of a group, and not splits of a data set."""
    return isinstance(thing, dict) and not any(isinstance(one, datasets.Dataset) for one in thing.values())


def own_name(group: str, word: str, thing: Any) -> str:
    """The name under which `thing` is registered: made of the word, and of a number where others have it."""
    plain = re.sub(r"\W+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", word)).strip("_").lower() or "own"
    number, name = 1, plain
    while True:
        known = registry.REGISTERED.get((group, name))
        if known is thing:
            return name
        if known is None and name not in registry.places(group):
            registry.register(group, name, thing)
            return name
        number += 1
        name = f"{plain}_{number}"


def own_dataset(splits: Any) -> list[str]:
    """A `Dataset`, or a mapping of them: `test` is the test set; without it, some rows are held out."""
    named = {"train": splits} if isinstance(splits, datasets.Dataset) else dict(splits)
    for name, part in named.items():
        if not isinstance(part, datasets.Dataset):
            raise UserError(f"The split {name!r} is a {type(part).__name__}: give a datasets.Dataset.")

    @reads("classification", "multilabel", path=False)
    def read(spec: DatasetSpec) -> Found:
        return from_splits(spec, named, "the data set")

    name = own_name("datasets", "own_dataset", _same(splits, read))
    pictures = any(isinstance(kind, datasets.Image) for kind in named[next(iter(named))].features.values())
    # Pictures and texts each have a file that a fitting model comes with.
    group = ["dataset=digits"] if pictures else ["dataset=text", "dataset.path=null"]
    return [*group, f"dataset.kind={name}", f"dataset.name={name}"]


def own_model(module: nn.Module) -> list[str]:
    """Every run begins with the weights that the module has now."""
    kept = copy.deepcopy(module)

    def build(spec: ModelSpec) -> nn.Module:
        model = copy.deepcopy(kept)
        return model if spec.weights else model.to("meta")

    name = own_name("models", type(module).__name__, build)
    return ["model=linear", f"model.source={name}", f"model.name={name}"]


_READERS: dict[int, tuple[Any, Callable]] = {}  # by the object's id; it is kept, so that no other gets the id


def _same(thing: Any, reader: Callable) -> Callable:
    """The reader that was made for this very object before: its name stays, and runs can be compared."""
    return _READERS.setdefault(id(thing), (thing, reader))[1]
