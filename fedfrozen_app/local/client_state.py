"""The arrays that a client keeps between rounds: in Flower's state, and on a site's own disk.

Flower's state lives as long as the node's process. A site that restarts in the middle of a run continues from
its disk; a simulated client has none, and its state is kept in the run's checkpoint instead.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedfrozen_app.core.digests import digest
from fedfrozen_app.core.flower_internals import get_flwr_home
from fedfrozen_app.exchange.arrays import to_record, to_tensors
from fedfrozen_app.exchange.names import (
    by_namespace,
    is_parameter,
    namespace_of,
    parameter_of,
    parameters_in,
)
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.files.disk import replace_tensors
from fedfrozen_app.local.algorithm import Start
from fedfrozen_app.local.worker import Worker

log = logging.getLogger(__name__)


def start_of(context: Context, worker: Worker, request: TrainRequest, base: Mapping[str, Tensor]) -> Start:
    """A client's arrays at the start of its round. `base`: those from the request or already held."""
    plan, kept = (
        request.plan,
        {**kept_arrays(context, worker, request), **per_client_arrays(worker, request, base)},
    )
    model = {**parameters_in(base), **parameters_in(kept)}
    # Arrays from messages or checkpoints are on the host; trained arrays are compared to their start.
    model |= {name: model[name].to(worker.device) for name in plan.trained}
    others = by_namespace(base)
    from_server = {
        space: _on(worker, others[space]) for space in request.method.from_server if space in others
    }
    own = request.method.start({name: model[name] for name in plan.trained}, by_namespace(kept))
    return Start(model, plan.trained, from_server, own)


def per_client_arrays(worker: Worker, request: TrainRequest, base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Arrays that the request sets for this client alone: values of private names, in place of kept ones.

    Copies: in one process several clients may receive the same array.
    """
    return _on(worker, {name: base[name].clone() for name in request.plan.private if name in base})


def held_at_home(context: Context, request: TrainRequest, sent: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Arrays that the request sets for this client by digest only, because the client has kept them."""
    wanted = [name for name in request.plan.private if name in request.base and name not in sent]
    record = context.state.get("private")
    if not wanted or not isinstance(record, ArrayRecord):
        return {}
    kept = {digest(value): value for value in to_tensors(record).values()}
    return {name: kept[request.base[name]] for name in wanted if request.base[name] in kept}


def kept_arrays(context: Context, worker: Worker, request: TrainRequest) -> dict[str, Tensor]:
    """The arrays that this client has kept: every private parameter (initially that of the initial model),
    and its algorithm's state for the trained names.

    Nothing else: state kept under another plan remains with the client and is not shared under this one.
    """
    names, method = request.plan.private, request.method
    if not names and not method.client_state:
        return {}
    found = held_arrays(context, worker, request)
    if not found and "site" in context.node_config and request.round > 1:
        log.warning(
            "This site has kept nothing of its own from earlier rounds of the run: if it took part in any, "
            "that is lost. It begins its own part again, as one that joins now."
        )
    private = parameters_in(found)
    if not set(names) <= set(private):
        initial = worker.initial()
        private = {name: initial[name] for name in names} | private
    trained, spaces = set(request.plan.trained), set(method.client_state)
    own = {
        name: value
        for name, value in found.items()
        if not is_parameter(name) and parameter_of(name) in trained and name.rpartition("/")[0] in spaces
    }
    if method.client_state and not own and request.round > 1 and "site" in context.node_config:
        log.warning(
            "This site holds none of the arrays that a client of %s keeps: it takes part for the first "
            "time, or has lost them. They are initialised again.",
            request.algorithm,
        )
    return _on(worker, {name: private[name] for name in names} | own)


def held_arrays(context: Context, worker: Worker, request: TrainRequest) -> dict[str, Tensor]:
    """All arrays that this client has kept, under any plan."""
    record = context.state.get("private")
    return to_tensors(record) if isinstance(record, ArrayRecord) else _from_disk(context, worker, request)


def _on(worker: Worker, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.to(worker.device) for name, value in arrays.items()}


def keep_private(context: Context, arrays: Mapping[str, Tensor], *, local: bool) -> None:
    """Keep these for the next round, unless training has diverged: the client would never recover."""
    norms = torch.stack(torch._foreach_norm(list(arrays.values())))  # one device synchronisation for all
    if not torch.isfinite(norms).all():
        log.warning("A client's private arrays are not finite: it continues with those it had before.")
        return
    context.state["private"] = to_record(arrays, local=local)
    if (path := disk_place(context)) is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_tensors(arrays, path)


def disk_place(context: Context) -> Path | None:
    """A site's file for this run, in the cache folder that the site has set."""
    node = context.node_config
    if "site" not in node or "executor" in node:  # an executor keeps them itself
        return None
    named = node.get("cache-dir")
    folder = Path(str(named)) if named else get_flwr_home() / "fedfrozen" / "cache"
    return folder / "private" / f"run-{context.run_id}.safetensors"


def _from_disk(context: Context, worker: Worker, request: TrainRequest) -> dict[str, Tensor]:
    path = disk_place(context)
    if path is None or not path.is_file():
        return {}
    try:
        found = load_file(path)
    except (SafetensorError, OSError) as error:
        log.warning("The private arrays in %s cannot be read (%s): starting from fresh ones.", path, error)
        return {}
    shapes = {name: value.shape for name, value in worker.parameters.items()}
    numbers = request.method.scalar_state
    expected = {n: torch.Size() if namespace_of(n) in numbers else shapes.get(parameter_of(n)) for n in found}
    if any(expected[name] != value.shape for name, value in found.items()):
        log.warning("The private arrays on disk are not this model's: starting from fresh ones.")
        return {}
    return found
