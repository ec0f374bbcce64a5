"""Part of an upload: the largest updates of each layer's arrays, and one bit for each weight saying which.

A bit for each weight is cheaper than a 32-bit index for each value sent wherever more than one in 32 is sent.
What travels are the weights themselves at the chosen places, not differences, so that nothing is rounded:
everywhere else the client's weight counts as unchanged.
"""

import math
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from fedfrozen_app.models.roles import Role

MASK = "mask"  # the one array of a reply that is no parameter


def prune(
    arrays: Mapping[str, Tensor], base: Mapping[str, Tensor], keep: float, roles: Mapping[str, Role]
) -> dict[str, Tensor]:
    """The arrays as they travel: of layers the values that moved most, and one mask for all."""
    sent: dict[str, Tensor] = {}
    bits: list[np.ndarray] = []
    for name, value in arrays.items():
        if not prunable(name, roles):
            sent[name] = value
            continue
        moved = (value - base[name]).abs().flatten()
        mask = torch.zeros_like(moved, dtype=torch.bool)
        mask[moved.topk(kept(value.numel(), keep), sorted=False).indices] = True
        sent[name] = value.flatten()[mask]
        bits.append(mask.cpu().numpy())
    if bits:
        sent[MASK] = torch.from_numpy(np.packbits(np.concatenate(bits)))
    return sent


def restore(
    arrays: Mapping[str, Tensor], model: Mapping[str, Tensor], keep: float, roles: Mapping[str, Role]
) -> dict[str, Tensor]:
    """The client's whole arrays again; `ValueError` with a reason when the mask does not fit them."""
    whole = {name: value for name, value in arrays.items() if name != MASK}
    pruned = [name for name in whole if name in model and prunable(name, roles)]
    if not pruned:
        return whole
    count = sum(model[name].numel() for name in pruned)
    mask = arrays.get(MASK)
    if mask is None or mask.dtype != torch.uint8 or mask.shape != (-(-count // 8),):
        raise ValueError(f"sent no mask of {count} bits with its pruned arrays")
    bits = torch.from_numpy(np.unpackbits(mask.cpu().numpy(), count=count)).bool()
    for name, own in zip(pruned, bits.split([model[name].numel() for name in pruned]), strict=True):
        values, expected = whole[name], kept(len(own), keep)
        if int(own.sum()) != expected or values.shape != (expected,) or values.dtype != model[name].dtype:
            raise ValueError(f"sent {values.numel()} values for {name}, where its mask must keep {expected}")
        full = model[name].flatten().clone()
        full[own.to(full.device)] = values.to(full.device)
        whole[name] = full.view_as(model[name])
    return whole


def upload_sizes(
    names: Iterable[str], model: Mapping[str, Tensor], keep: float, roles: Mapping[str, Role]
) -> dict[str, int]:
    """Bytes by role of an upload of these names, without making it: shapes are enough (the meta device)."""
    sizes: dict[str, int] = {}
    bits = 0
    for name in names:
        count = model[name].numel()
        if keep < 1 and prunable(name, roles):
            bits += count
            count = kept(count, keep)
        kind = roles[name].kind
        sizes[kind] = sizes.get(kind, 0) + count * model[name].element_size()
    return sizes | ({MASK: -(-bits // 8)} if bits else {})


def prunable(name: str, roles: Mapping[str, Role]) -> bool:
    """Layers are pruned; the head and the final norm, which every client sends, travel whole."""
    return roles[name].layer is not None


def kept(count: int, keep: float) -> int:
    return math.ceil(keep * count)
