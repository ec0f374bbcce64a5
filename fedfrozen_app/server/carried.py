"""Arrays beside parameters that the server keeps and sends with every order, such as SCAFFOLD's c."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedfrozen_app.digests import digests
from fedfrozen_app.exchange.names import flattened
from fedfrozen_app.exchange.order import Order

Carried = dict[str, dict[str, Tensor]]  # namespace: a parameter's name: its array


def follow(carried: Carried, order: Order, model: Mapping[str, Tensor]) -> Carried:
    """The arrays that the order's algorithm needs, for every name that its plan shares: new ones are zero.

    Frozen names are dropped.
    """
    found: Carried = {}
    for space in order.method.comes:
        known = carried.get(space, {})
        found[space] = {
            name: known[name] if name in known else torch.zeros_like(model[name])
            for name in order.plan.shared
        }
    return found


def add_to(order: Order, model: dict[str, Tensor], carried: Carried) -> tuple[Order, dict[str, Tensor]]:
    """The order with these arrays in its base, and all that it may have to send."""
    arrays = flattened(carried)
    if not arrays:
        return order, model
    return replace(order, base={**order.base, **digests(arrays)}), {**model, **arrays}
