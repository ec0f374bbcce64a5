"""Base of the codecs of `codec=`: each parameter's update is replaced by one array of bytes.

A codec defines three methods for a flat update: its `size` in bytes, `pack`, and `unpack`. One that needs the
shape of an array overrides the same three for arrays. Arrays other than parameters (`namespace/name`) are
sent unchanged: servers need them exactly.
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
    # Whether a client adds the unsent residual to its next update: `unpack(pack(u))` then lacks parts of u.
    error_feedback: ClassVar[bool] = False
    codes_adapters: ClassVar[bool] = True  # whether it is suitable for the factors of adapters
    codes_broadcasts: ClassVar[bool] = True  # whether `unpack` gives the same bits on every machine

    def __init__(self, values: Mapping[str, Any]) -> None:
        if set(values) != set(self.settings):
            raise ValueError(f"its settings are not {', '.join(self.settings) or 'empty'}")
        self.values = dict(values)

    # Defined by a codec --------------------------------------------------------------------------------

    def size(self, count: int, itemsize: int) -> int:
        """The bytes of an update of `count` values of `itemsize` bytes; it must depend on nothing else."""
        raise NotImplementedError

    def pack(self, update: Tensor, drawn: np.random.Generator) -> np.ndarray:
        """A flat update on the CPU as `size` bytes."""
        raise NotImplementedError

    def unpack(self, data: np.ndarray, count: int, dtype: torch.dtype) -> Tensor:
        """The decoded flat update; `ValueError`, as the rest of a sentence, for invalid bytes."""
        raise NotImplementedError

    # The same with an array's shape, which few codecs need --------------------------------------------------

    def size_of(self, array: Tensor) -> int:
        """The size of an array, from its shape and type alone (the meta device)."""
        return self.size(array.numel(), array.element_size())

    def pack_array(self, update: Tensor, drawn: np.random.Generator) -> np.ndarray:
        return self.pack(update.flatten(), drawn)

    def unpack_array(self, data: np.ndarray, like: Tensor) -> Tensor:
        return self.unpack(data, like.numel(), like.dtype).view_as(like)

    # Derived --------------------------------------------------------------------------------------

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
                continue  # exact, or unknown: checked with the reply
            if not self.fits(value, base[name]):
                size = self.size_of(base[name])
                raise ValueError(f"sent {value.nbytes} bytes for {name}, where its codec makes {size}")
            try:
                whole[name] = self.applied(value, base[name])
            except ValueError as error:
                raise ValueError(f"sent bytes for {name} that cannot be decoded: {error}") from error
        return whole

    def fits(self, data: Tensor, before: Tensor) -> bool:
        """Whether the length of these bytes is that of this array's update."""
        return data.dtype == torch.uint8 and data.shape == (self.size_of(before),)

    def applied(self, data: Tensor, before: Tensor) -> Tensor:
        """The array after the update that these bytes encode, which fit; `ValueError` if they are invalid."""
        return before + self.unpack_array(data.cpu().numpy(), before).to(before)

    def sizes(self, names: Iterable[str], model: Mapping[str, Tensor], roles: Roles) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for name in names:
            kind = roles[name].kind
            sizes[kind] = sizes.get(kind, 0) + self.size_of(model[name])
        return sizes
