"""Arrays beside parameters that the server keeps and sends with every order, such as SCAFFOLD's c."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedfrozen_app import registry
from fedfrozen_app.digests import digests
from fedfrozen_app.exchange.plan import Order

Carried = dict[str, dict[str, Tensor]]  # namespace: a parameter's name: its array


def follow(carried: Carried, order: Order, model: Mapping[str, Tensor]) -> Carried:
    """What the order's algorithm asks for, of every name that its plan shares: zeros where nothing was yet.

    A name that is frozen by now has none any more.
    """
    asked = getattr(registry.find("algorithms", order.algorithm), "comes", ())
    found: Carried = {}
    for space in asked:
        own = carried.get(space, {})
        found[space] = {
            name: own[name] if name in own else torch.zeros_like(model[name]) for name in order.plan.shared
        }
    return found


def add_to(order: Order, model: dict[str, Tensor], carried: Carried) -> tuple[Order, dict[str, Tensor]]:
    """The order with these arrays in its base, and all that it may have to send."""
    arrays = flat(carried)
    if not arrays:
        return order, model
    return replace(order, base={**order.base, **digests(arrays)}), {**model, **arrays}


def flat(carried: Carried) -> dict[str, Tensor]:
    """By `namespace/name`, as they travel and as a checkpoint keeps them."""
    return {f"{space}/{name}": value for space, own in carried.items() for name, value in own.items()}


def nested(arrays: Mapping[str, Tensor]) -> Carried:
    found: Carried = {}
    for key, value in arrays.items():
        space, _, name = key.partition("/")
        found.setdefault(space, {})[name] = value
    return found
