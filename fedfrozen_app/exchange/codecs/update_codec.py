"""What every codec of `codec=` shares: each parameter's update becomes one array of bytes, in its place.

A codec says three things about a flat update: its `size` in bytes, how to `pack` it, and how to `unpack` it.
Arrays beside parameters (`namespace/name`) travel as they are: servers need them exactly.
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedfrozen_app.core.seeds import numpy_generator
from fedfrozen_app.exchange.codec import ClientSide, Roles
from fedfrozen_app.exchange.names import is_parameter


class UpdateCodec:
    extra_names: ClassVar[tuple[str, ...]] = ()
    settings: ClassVar[tuple[str, ...]] = ()  # the keys of `codec` that it reads
    # Whether a client adds what it has not sent to its next update: `unpack(pack(u))` then leaves parts out.
    error_feedback: ClassVar[bool] = False

    def __init__(self, values: Mapping[str, Any]) -> None:
        if set(values) != set(self.settings):
            raise ValueError(f"its settings are not {', '.join(self.settings) or 'empty'}")
        self.values = dict(values)

    # What a codec says --------------------------------------------------------------------------------

    def size(self, count: int, itemsize: int) -> int:
        """The bytes of an update of `count` values of `itemsize` bytes; nothing else may decide it."""
        raise NotImplementedError

    def pack(self, update: Tensor, drawn: np.random.Generator) -> np.ndarray:
        """A flat update on the CPU as `size` bytes."""
        raise NotImplementedError

    def unpack(self, data: np.ndarray, count: int, dtype: torch.dtype) -> Tensor:
        """The flat update again; `ValueError`, as the rest of a sentence, for bytes that no client makes."""
        raise NotImplementedError

    # What follows -------------------------------------------------------------------------------------

    def encode(
        self,
        arrays: Mapping[str, Tensor],
        base: Mapping[str, Tensor],
        roles: Roles,
        client: ClientSide | None = None,
    ) -> dict[str, Tensor]:
        client = client or ClientSide()
        sent: dict[str, Tensor] = {}
        for name, value in arrays.items():
            if not is_parameter(name):
                sent[name] = value
                continue
            update = (value.detach() - base[name].to(value.device)).cpu().flatten()
            if self.error_feedback and name in client.residual:
                update += client.residual[name].to(update).flatten()
            data = self.pack(update, numpy_generator(client.seed, "codec", name))
            sent[name] = torch.from_numpy(data)
            if self.error_feedback:
                left = update - self.unpack(data, update.numel(), update.dtype)
                client.residual[name] = left.view_as(value)
        return sent

    def decode(
        self, arrays: Mapping[str, Tensor], base: Mapping[str, Tensor], roles: Roles
    ) -> dict[str, Tensor]:
        whole = dict(arrays)
        for name, value in arrays.items():
            if not is_parameter(name) or name not in base:
                continue  # exact, or unknown: the check of the reply comes next
            before = base[name]
            size = self.size(before.numel(), before.element_size())
            if value.dtype != torch.uint8 or value.shape != (size,):
                raise ValueError(f"sent {value.nbytes} bytes for {name}, where its codec makes {size}")
            try:
                update = self.unpack(value.cpu().numpy(), before.numel(), before.dtype)
            except ValueError as error:
                raise ValueError(f"sent bytes for {name} that cannot be decoded: {error}") from error
            whole[name] = before + update.to(before).view_as(before)
        return whole

    def sizes(self, names: Iterable[str], model: Mapping[str, Tensor], roles: Roles) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for name in names:
            kind, array = roles[name].kind, model[name]
            sizes[kind] = sizes.get(kind, 0) + self.size(array.numel(), array.element_size())
        return sizes
