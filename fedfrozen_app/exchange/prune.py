"""Pruned uploads: the largest updates of each layer's arrays, and a mask with one bit per weight.

One bit per weight is cheaper than a 32-bit index per sent value if more than one in 32 is sent. The weights
themselves are sent at the chosen places, not differences, so that nothing is rounded: everywhere else the
client's weight counts as unchanged.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedfrozen_app.exchange.codec import ClientSide
from fedfrozen_app.exchange.role import Role

MASK = "mask"  # the only array of a reply that is not a parameter
Roles = Mapping[str, Role]


@dataclass(frozen=True)
class Prune:
    """The codec `keep`: sends this share of each layer's updates, the largest ones."""

    share: float
    extra_names: ClassVar[tuple[str, ...]] = (MASK,)
    error_feedback: ClassVar[bool] = False
    codes_adapters: ClassVar[bool] = True
    codes_broadcasts: ClassVar[bool] = False  # it sends values, not changes

    def encode(
        self,
        arrays: Mapping[str, Tensor],
        base: Mapping[str, Tensor],
        roles: Roles,
        client: ClientSide | None = None,
    ) -> dict[str, Tensor]:
        """The values of layers that changed most, and one mask for all."""
        sent: dict[str, Tensor] = {}
        bits: list[np.ndarray] = []
        for name, value in arrays.items():
            if not prunable(name, roles):
                sent[name] = value
                continue
            moved = (value - base[name]).abs().flatten()
            mask = torch.zeros_like(moved, dtype=torch.bool)
            mask[moved.topk(self.kept(value.numel()), sorted=False).indices] = True
            sent[name] = value.flatten()[mask]
            bits.append(mask.cpu().numpy())
        if bits:
            sent[MASK] = torch.from_numpy(np.packbits(np.concatenate(bits)))
        return sent

    def decode(
        self, arrays: Mapping[str, Tensor], base: Mapping[str, Tensor], roles: Roles
    ) -> dict[str, Tensor]:
        whole = {name: value for name, value in arrays.items() if name != MASK}
        pruned = [name for name in whole if name in base and prunable(name, roles)]
        if not pruned:
            return whole
        count = sum(base[name].numel() for name in pruned)
        mask = arrays.get(MASK)
        if mask is None or mask.dtype != torch.uint8 or mask.shape != (-(-count // 8),):
            raise ValueError(f"sent no mask of {count} bits with its pruned arrays")
        bits = torch.from_numpy(np.unpackbits(mask.cpu().numpy(), count=count)).bool()
        for name, mask_bits in zip(pruned, bits.split([base[name].numel() for name in pruned]), strict=True):
            values, expected = whole[name], self.kept(len(mask_bits))
            if (
                int(mask_bits.sum()) != expected
                or values.shape != (expected,)
                or values.dtype != base[name].dtype
            ):
                raise ValueError(
                    f"sent {values.numel()} values for {name}, where its mask must keep {expected}"
                )
            full = base[name].flatten().clone()
            full[mask_bits.to(full.device)] = values.to(full.device)
            whole[name] = full.view_as(base[name])
        return whole

    def sizes(self, names: Iterable[str], model: Mapping[str, Tensor], roles: Roles) -> dict[str, int]:
        sizes: dict[str, int] = {}
        bits = 0
        for name in names:
            count = model[name].numel()
            if prunable(name, roles):
                bits += count
                count = self.kept(count)
            kind = roles[name].kind
            sizes[kind] = sizes.get(kind, 0) + count * model[name].element_size()
        return sizes | ({MASK: -(-bits // 8)} if bits else {})

    def kept(self, count: int) -> int:
        return math.ceil(self.share * count)


def prunable(name: str, roles: Roles) -> bool:
    """Whether an array is pruned: layers are; the head and final norm, which all clients send, are not."""
    return name in roles and roles[name].layer is not None
