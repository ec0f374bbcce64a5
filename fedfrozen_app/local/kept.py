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

from fedfrozen_app.exchange.arrays import to_record, to_tensors
from fedfrozen_app.files.disk import replace_tensors
from fedfrozen_app.local.resident import Resident

log = logging.getLogger(__name__)


def private_arrays(context: Context, resident: Resident, names: tuple[str, ...]) -> dict[str, Tensor]:
    """What this client has kept for itself; at its first round, the values every model starts with.

    These names alone: what it kept under another plan stays with it, and does not enter what this one shares.
    """
    if not names:
        return {}
    record = context.state.get("private")
    if isinstance(record, ArrayRecord):
        kept = to_tensors(record)
        fresh = {} if set(names) <= set(kept) else resident.initial()
        return {name: (kept[name] if name in kept else fresh[name]).to(resident.device) for name in names}
    initial = resident.initial()
    if found := _from_disk(context):
        if {name: found[name].shape for name in found} == {name: initial[name].shape for name in names}:
            return {name: found[name].to(resident.device) for name in names}
        log.warning("The private arrays on disk are not this model's: starting from fresh ones.")
    return {name: initial[name] for name in names}


def keep_private(context: Context, arrays: Mapping[str, Tensor], *, local: bool) -> None:
    """For the next round, unless training has diverged: from such arrays a client would never come back."""
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


def _from_disk(context: Context) -> dict[str, Tensor]:
    path = disk_place(context)
    if path is None or not path.is_file():
        return {}
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        log.warning("The private arrays in %s cannot be read (%s): starting from fresh ones.", path, error)
        return {}
