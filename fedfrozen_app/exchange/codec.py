"""How an upload is encoded, and its size. The request names the codec and its setting."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from torch import Tensor

from fedfrozen_app.exchange.role import Role

Roles = Mapping[str, Role]


@dataclass
class ClientSide:
    """What a codec may use at the client alone."""

    seed: int = 0  # of this client and round
    # By parameter, what earlier rounds have not sent. `encode` adds it to the update and replaces it.
    residual: dict[str, Tensor] = field(default_factory=dict)


class Codec(Protocol):
    # Arrays of an encoded upload that are no parameters; their bytes are counted under their name.
    extra_names: ClassVar[tuple[str, ...]]
    # Whether a client adds what it has not sent to its next update.
    error_feedback: ClassVar[bool]
    codes_adapters: ClassVar[bool]  # whether it makes sense for the factors that adapters are
    codes_broadcasts: ClassVar[bool]  # whether what the server sends can be coded so too

    def encode(
        self,
        arrays: Mapping[str, Tensor],
        base: Mapping[str, Tensor],
        roles: Roles,
        client: ClientSide | None = None,
    ) -> dict[str, Tensor]:
        """What travels in place of these arrays, which began the round as `base`."""
        ...

    def decode(
        self, arrays: Mapping[str, Tensor], base: Mapping[str, Tensor], roles: Roles
    ) -> dict[str, Tensor]:
        """The arrays again; `ValueError`, as the rest of a sentence, when they cannot be read."""
        ...

    def sizes(self, names: Iterable[str], model: Mapping[str, Tensor], roles: Roles) -> dict[str, int]:
        """Bytes by role of an upload of these names, from shapes alone (the meta device)."""
        ...


def plain_sizes(names: Iterable[str], model: Mapping[str, Tensor], roles: Roles) -> dict[str, int]:
    """The same without a codec."""
    sizes: dict[str, int] = {}
    for name in names:
        kind = roles[name].kind
        sizes[kind] = sizes.get(kind, 0) + model[name].numel() * model[name].element_size()
    return sizes
