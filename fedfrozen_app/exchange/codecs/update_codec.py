"""What every codec of `codec=` shares: each parameter's update becomes one array of bytes, in its place.

A codec says three things about a flat update: its `size` in bytes, how to `pack` it, and how to `unpack` it.
One that needs the shape of an array overrides the same three for arrays.
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
    codes_adapters: ClassVar[bool] = True  # whether it makes sense for the factors that adapters are
    codes_broadcasts: ClassVar[bool] = True  # whether `unpack` gives the same bits on every machine

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

    # The same for an array, whose shape few codecs need ---------------------------------------------------

    def size_of(self, array: Tensor) -> int:
        """From its shape and type alone (the meta device)."""
        return self.size(array.numel(), array.element_size())

    def pack_array(self, update: Tensor, drawn: np.random.Generator) -> np.ndarray:
        return self.pack(update.flatten(), drawn)

    def unpack_array(self, data: np.ndarray, like: Tensor) -> Tensor:
        return self.unpack(data, like.numel(), like.dtype).view_as(like)

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
            update = (value.detach() - base[name].to(value.device)).cpu()
            if self.error_feedback and name in client.residual:
                update += client.residual[name].to(update).view_as(update)
            data = self.pack_array(update, numpy_generator(client.seed, "codec", name))
            sent[name] = torch.from_numpy(data)
            if self.error_feedback:
                client.residual[name] = update - self.unpack_array(data, update)
        return sent

    def decode(
        self, arrays: Mapping[str, Tensor], base: Mapping[str, Tensor], roles: Roles
    ) -> dict[str, Tensor]:
        whole = dict(arrays)
        for name, value in arrays.items():
            if not is_parameter(name) or name not in base:
                continue  # exact, or unknown: the check of the reply comes next
            if not self.fits(value, base[name]):
                size = self.size_of(base[name])
                raise ValueError(f"sent {value.nbytes} bytes for {name}, where its codec makes {size}")
            try:
                whole[name] = self.applied(value, base[name])
            except ValueError as error:
                raise ValueError(f"sent bytes for {name} that cannot be decoded: {error}") from error
        return whole

    def fits(self, data: Tensor, before: Tensor) -> bool:
        """Whether these bytes have the length of this array's update."""
        return data.dtype == torch.uint8 and data.shape == (self.size_of(before),)

    def applied(self, data: Tensor, before: Tensor) -> Tensor:
        """The array after the update of these bytes, which fit; `ValueError` for some that nobody makes."""
        return before + self.unpack_array(data.cpu().numpy(), before).to(before)

    def sizes(self, names: Iterable[str], model: Mapping[str, Tensor], roles: Roles) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for name in names:
            kind = roles[name].kind
            sizes[kind] = sizes.get(kind, 0) + self.size_of(model[name])
        return sizes
