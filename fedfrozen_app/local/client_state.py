"""What a client keeps for itself between rounds: in Flower's state, and on a site's own disk.

Flower's state lives as long as the node's process. A site that is restarted in the middle of a run goes on
from its disk; a simulated client has none, and what it keeps goes into the run's checkpoint instead.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context
from flwr.supercore.utils import get_flwr_home
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedfrozen_app.digests import digest
from fedfrozen_app.exchange.arrays import to_record, to_tensors
from fedfrozen_app.exchange.names import (
    by_namespace,
    is_parameter,
    namespace_of,
    parameter_of,
    parameters_in,
)
from fedfrozen_app.exchange.order import Order
from fedfrozen_app.files.disk import replace_tensors
from fedfrozen_app.local.algorithm import Start
from fedfrozen_app.local.resident import Resident

log = logging.getLogger(__name__)


def start_of(context: Context, resident: Resident, order: Order, base: Mapping[str, Tensor]) -> Start:
    """Where a client begins its round, with `base`, what came with the order or was held already."""
    plan, kept = order.plan, {**kept_arrays(context, resident, order), **given_in(resident, order, base)}
    model = {**parameters_in(base), **parameters_in(kept)}
    # What came as bytes, or from a checkpoint, lies on the host; what trains is held against its start.
    model |= {name: model[name].to(resident.device) for name in plan.trained}
    beside = by_namespace(base)
    from_order = {space: _on(resident, beside[space]) for space in order.method.comes if space in beside}
    own = order.method.start({name: model[name] for name in plan.trained}, by_namespace(kept))
    return Start(model, plan.trained, from_order, own)


def given_in(resident: Resident, order: Order, base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the order gives this client alone: values of private names, in place of those it has kept.

    Copies: in one process the same array may be given to several.
    """
    return _on(resident, {name: base[name].clone() for name in order.plan.private if name in base})


def held_at_home(context: Context, order: Order, sent: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of what the order gives this client and does not bring: what it has kept, under whichever name."""
    wanted = [name for name in order.plan.private if name in order.base and name not in sent]
    record = context.state.get("private")
    if not wanted or not isinstance(record, ArrayRecord):
        return {}
    kept = {digest(value): value for value in to_tensors(record).values()}
    return {name: kept[order.base[name]] for name in wanted if order.base[name] in kept}


def kept_arrays(context: Context, resident: Resident, order: Order) -> dict[str, Tensor]:
    """What this client has kept for itself: every private parameter, which begins as every model does, and
    what its algorithm keeps for the names that train.

    These alone: what it kept under another plan stays with it, and does not enter what this one shares.
    """
    names, method = order.plan.private, order.method
    if not names and not method.stays:
        return {}
    record = context.state.get("private")
    found = to_tensors(record) if isinstance(record, ArrayRecord) else _from_disk(context, resident, order)
    if not found and "site" in context.node_config and order.round > 1:
        log.warning(
            "This site has kept nothing of its own from earlier rounds of the run: if it took part in any, "
            "that is lost. It begins its own part again, as one that joins now."
        )
    private = parameters_in(found)
    if not set(names) <= set(private):
        initial = resident.initial()
        private = {name: initial[name] for name in names} | private
    trained, spaces = set(order.plan.trained), set(method.stays)
    own = {
        name: value
        for name, value in found.items()
        if not is_parameter(name) and parameter_of(name) in trained and name.rpartition("/")[0] in spaces
    }
    if method.stays and not own and order.round > 1 and "site" in context.node_config:
        log.warning(
            "This site holds none of the arrays that a client of %s keeps: it takes part for the first "
            "time, or has lost them. They begin anew.",
            order.algorithm,
        )
    return _on(resident, {name: private[name] for name in names} | own)


def _on(resident: Resident, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.to(resident.device) for name, value in arrays.items()}


def keep_private(context: Context, arrays: Mapping[str, Tensor], *, local: bool) -> None:
    """Keep these for the next round, unless training has diverged: a client would never recover."""
    norms = torch.stack(torch._foreach_norm(list(arrays.values())))  # one look at the device for all
    if not torch.isfinite(norms).all():
        log.warning("A client's private arrays are not finite: it goes on from those it had before.")
        return
    context.state["private"] = to_record(arrays, local=local)
    if (path := disk_place(context)) is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_tensors(arrays, path)


def disk_place(context: Context) -> Path | None:
    """Of a site, below the folder that the site names for its cache; one file a run."""
    node = context.node_config
    if "site" not in node or "executor" in node:  # the latter keeps them itself, round by round
        return None
    named = node.get("cache-dir")
    folder = Path(str(named)) if named else get_flwr_home() / "fedfrozen" / "cache"
    return folder / "private" / f"run-{context.run_id}.safetensors"


def _from_disk(context: Context, resident: Resident, order: Order) -> dict[str, Tensor]:
    path = disk_place(context)
    if path is None or not path.is_file():
        return {}
    try:
        found = load_file(path)
    except (SafetensorError, OSError) as error:
        log.warning("The private arrays in %s cannot be read (%s): starting from fresh ones.", path, error)
        return {}
    shapes = {name: value.shape for name, value in resident.parameters.items()}
    numbers = order.method.numbers
    expected = {n: torch.Size() if namespace_of(n) in numbers else shapes.get(parameter_of(n)) for n in found}
    if any(expected[name] != value.shape for name, value in found.items()):
        log.warning("The private arrays on disk are not this model's: starting from fresh ones.")
        return {}
    return found
