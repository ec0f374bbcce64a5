"""Bytes on the wire, counted in one place for every runtime.

By role: the exact bytes of arrays. In total: these plus the text of requests and replies.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from fedfrozen_app.exchange.block import Slice
from fedfrozen_app.exchange.names import parameter_of
from fedfrozen_app.exchange.role import Role
from fedfrozen_app.exchange.summed import SummedReply


@dataclass(frozen=True)
class Upload:
    """The bytes of one reply on the wire."""

    by_role: Counter[str] = field(default_factory=Counter)
    size: int = 0  # including its text


@dataclass
class Traffic:
    """The bytes of one round in both directions, over all its clients."""

    up: int = 0
    down: int = 0
    down_cold: int = 0  # the same if no client had held any array when the run began
    up_by_role: Counter[str] = field(default_factory=Counter)
    down_by_role: Counter[str] = field(default_factory=Counter)
    by_client: dict[str, list[int]] | None = None  # bytes down and up of each; None: not counted

    _rows: dict[tuple[str, ...], Counter[str]] = field(default_factory=dict)  # of blocks, by their names
    _uploads: dict[str, Upload] = field(default_factory=dict)  # by client, if clients are counted

    def sent(self, client: str, by_role: Counter[str], text: int, cold: int | None = None) -> None:
        """Count arrays and `text` bytes of text. `cold`: bytes of arrays if the client had held nothing when
        the run began; None: the same."""
        _add(self.down_by_role, by_role)
        size = sum(by_role.values())
        self.down += size + text
        self._count(client, size + text, 0)
        self.down_cold += (size if cold is None else cold) + text

    def received(
        self,
        client: str,
        arrays: Mapping[str, Tensor],
        text: str,
        roles: Mapping[str, Role],
        extra_names: Collection[str] = (),
    ) -> None:
        """Count a reply. `extra_names`: the arrays of an encoded upload other than parameters."""
        by_role = self._by_role(arrays, roles, extra_names)
        self._receive(client, by_role, text)

    def masked(self, client: str, by_role: Counter[str], text: str) -> None:
        """Count a masked reply, with its bytes by role."""
        self._receive(client, by_role, text)

    def _receive(self, client: str, by_role: Counter[str], text: str) -> None:
        self.arrived(client, Upload(by_role, sum(by_role.values()) + len(text.encode())))

    def arrived(self, client: str, upload: Upload) -> None:
        """Count a reply that arrived, of this round or an earlier one."""
        _add(self.up_by_role, upload.by_role)
        self.up += upload.size
        self._count(client, 0, upload.size)
        if self.by_client is not None:
            before = self._uploads.get(client, Upload())
            self._uploads[client] = Upload(before.by_role + upload.by_role, before.size + upload.size)

    def postpone(self, client: str) -> Upload:
        """Remove this client's upload, to be counted in the round in which it arrives."""
        upload = self._uploads.pop(client, Upload())
        self.up_by_role -= upload.by_role
        self.up -= upload.size
        self._count(client, 0, -upload.size)
        return upload

    def _count(self, client: str, down: int, up: int) -> None:
        if self.by_client is not None:
            sizes = self.by_client.setdefault(client, [0, 0])
            sizes[0], sizes[1] = sizes[0] + down, sizes[1] + up

    def asked(self, client: str, question: str, answer: str) -> None:
        """Count a text without arrays, and its answer."""
        self._count(client, len(question.encode()), len(answer.encode()))
        self.down += len(question.encode())
        self.down_cold += len(question.encode())
        self.up += len(answer.encode())

    def _by_role(
        self, arrays: Mapping[str, Tensor], roles: Mapping[str, Role], extra_names: Collection[str]
    ) -> Counter[str]:
        if not isinstance(arrays, Slice | SummedReply):
            return bytes_by_role(arrays, roles, extra_names)
        # In a round all blocks have the same arrays.
        names = arrays.block.layout.names if isinstance(arrays, Slice) else tuple(arrays)
        if names not in self._rows:
            self._rows[names] = bytes_by_role(arrays, roles)
        return self._rows[names]


def _add(total: Counter[str], more: Mapping[str, int]) -> None:
    """Like `Counter.update`, whose type checks take longer than adding a few numbers."""
    for role, size in more.items():
        total[role] += size


def bytes_by_role(
    arrays: Mapping[str, Tensor], roles: Mapping[str, Role], extra_names: Collection[str] = ()
) -> Counter[str]:
    """Bytes of arrays by role. Arrays in namespaces count for their parameter's role; a codec's are
    separate."""
    total: Counter[str] = Counter()
    if isinstance(arrays, Slice):  # from the layout, without a view of each array
        size, layout = arrays.block.values.element_size(), arrays.block.layout
        sizes = {n: s.numel() * size for n, s in zip(layout.names, layout.shapes, strict=True)}
    else:
        sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in arrays.items()}
    for name, size in sizes.items():
        role = roles.get(parameter_of(name))
        kind = role.kind if role is not None else name if name in extra_names else "unknown"
        total[kind] += size
    return total


def count_parameters(arrays: Mapping[str, Tensor], names: Iterable[str]) -> int:
    return sum(arrays[name].numel() for name in names)
