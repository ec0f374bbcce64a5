"""What a configuration can name, and where it lies. Nothing is imported until it is asked for by name.

What is built in is the table below. Other installed packages add theirs through entry points of the groups
`fedfrozen.strategies`, `fedfrozen.algorithms` and so on: name = "module:object".
"""

import difflib
import importlib
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any

from fedfrozen_app.errors import UserError

BUILT_IN: dict[str, dict[str, str]] = {
    "strategies": {
        "fedavg": "strategies.fedavg:FedAvg",
        "fedprox": "strategies.fedprox:FedProx",
        "fedfrozen": "strategies.fedfrozen:FedFrozen",
        "local": "strategies.local:Local",
        "safl": "strategies.safl:SAFL",
        "pfeddc": "strategies.pfeddc:PFedDC",
    },
    "algorithms": {
        "fedavg": "clients.fedavg:loss",
        "fedprox": "clients.fedprox:loss",
    },
    "server_optimizers": {
        "none": "fedfrozen_app.server.optimizer:NoOptimizer",
    },
}
_ONE = {"strategies": "strategy", "algorithms": "client algorithm", "server_optimizers": "server optimiser"}


@lru_cache(maxsize=16)  # looking through every installed package takes a while
def places(group: str) -> dict[str, str]:
    """By name, "module:object" of everything in a group; what is built in cannot be replaced by a package."""
    others = {found.name: found.value for found in entry_points(group=f"fedfrozen.{group}")}
    return others | BUILT_IN.get(group, {})


def names(group: str) -> list[str]:
    return sorted(places(group))


def find(group: str, name: str) -> Any:
    """The object of that name; a `UserError` where there is none, or where it cannot be imported."""
    known = places(group)
    if name not in known:
        near = difflib.get_close_matches(str(name), known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(sorted(known))}."
        raise UserError(f"Unknown {_ONE.get(group, group.removesuffix('s'))} '{name}': {hint}")
    module, _, attribute = known[name].partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        if name in BUILT_IN.get(group, {}):
            raise
        raise UserError(
            f"The installed package that offers the {_ONE.get(group, group)} '{name}' cannot be imported "
            f"({error}): mend or remove it."
        ) from error
