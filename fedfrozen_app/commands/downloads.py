"""The arrays of a round's base that each client lacks, as the server's ledger and coded broadcasts track it.

Assumes that every array that a round may change does change.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from fedfrozen_app.exchange.broadcast import coded_bytes, most_codes
from fedfrozen_app.exchange.codecs.update_codec import UpdateCodec
from fedfrozen_app.exchange.names import is_parameter, parameter_of
from fedfrozen_app.exchange.role import Role

Bytes = Counter[str]  # by role
Before = tuple[int, frozenset[str]] | None  # a client's latest round and its base then; None: no round yet


@dataclass
class Downloads:
    roles: Mapping[str, Role]
    coder: UpdateCodec | None = None
    # By name: the rounds that changed the clients' value, since the newest exact broadcast, as far back as
    # codes go.
    _sent: dict[str, list[int]] = field(default_factory=dict)
    _changed: dict[str, int] = field(default_factory=dict)  # name: the latest round that changed it

    def begin(
        self, number: int, base: Iterable[str], trained: Collection[str], arrays: Mapping[str, Tensor]
    ) -> None:
        """Record a round's broadcast of these names: server/coded_broadcast.py decides which are coded."""
        for name in base:
            known = self._sent.get(name)
            same = known is not None and self._changed.get(name, 0) < known[-1]
            if same and (name in trained or len(self._sent[name]) == 1):
                continue
            coded = known is not None and is_parameter(name) and name in trained
            most = most_codes(self.coder, arrays[name]) if coded and self.coder is not None else 0
            self._sent[name] = [*(known or ()), number][-most - 1 :] if most else [number]

    def changed(self, number: int, names: Iterable[str]) -> None:
        """Record that the round changed these arrays."""
        self._changed |= dict.fromkeys(names, number)

    def of(self, base: frozenset[str], before: Before, arrays: Mapping[str, Tensor]) -> Bytes:
        """Bytes by role, for a client whose latest round was `before`."""
        found: Bytes = Counter()
        for name in base:
            latest, held = before or (0, frozenset())
            array, rounds = arrays[name], self._sent[name]
            if name in held and latest >= rounds[-1]:
                continue
            size = array.nbytes
            if self.coder is not None and name in held and latest >= rounds[0]:
                size = coded_bytes(self.coder, array, sum(number > latest for number in rounds))
            found[self.roles[parameter_of(name)].kind] += size
        return found
