"""The interface of upload codecs: encode, decode, size. The request names the codec and its setting."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from torch import Tensor

from fedfrozen_app.exchange.role import Role

Roles = Mapping[str, Role]


@dataclass
class ClientSide:
    """Inputs of a codec that exist only on the client."""

    seed: int = 0  # of this client and round
    # By parameter: the unsent residual of earlier rounds. `encode` adds it to the update and replaces it.
    residual: dict[str, Tensor] = field(default_factory=dict)


class Codec(Protocol):
    # Arrays of an encoded upload other than parameters; their bytes are counted under their name.
    extra_names: ClassVar[tuple[str, ...]]
    # Whether a client adds the unsent residual to its next update (error feedback).
    error_feedback: ClassVar[bool]
    codes_adapters: ClassVar[bool]  # whether it is suitable for the factors of adapters
    codes_broadcasts: ClassVar[bool]  # whether it can also encode the server's broadcasts

    def encode(
        self,
        arrays: Mapping[str, Tensor],
        base: Mapping[str, Tensor],
        roles: Roles,
        client: ClientSide | None = None,
    ) -> dict[str, Tensor]:
        """The arrays to send in place of these, which were `base` at the start of the round."""
        ...

    def decode(
        self, arrays: Mapping[str, Tensor], base: Mapping[str, Tensor], roles: Roles
    ) -> dict[str, Tensor]:
        """The decoded arrays; `ValueError`, as the rest of a sentence, if they are invalid."""
        ...

    def sizes(self, names: Iterable[str], model: Mapping[str, Tensor], roles: Roles) -> dict[str, int]:
        """Bytes by role of an upload of these names, from shapes alone (the meta device)."""
        ...


def plain_sizes(names: Iterable[str], model: Mapping[str, Tensor], roles: Roles) -> dict[str, int]:
    """The sizes without a codec."""
    sizes: dict[str, int] = {}
    for name in names:
        kind = roles[name].kind
        sizes[kind] = sizes.get(kind, 0) + model[name].numel() * model[name].element_size()
    return sizes
