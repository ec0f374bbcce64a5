"""The bytes of a request and its reply on the wire, computed before anything is sent."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from fedfrozen_app.exchange.messages import reply_bytes
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.server.request_messages import with_client_arrays
from fedfrozen_app.server.seams import StrategySeams


@dataclass
class ExpectedBytes:
    """Bytes of one round: down by the ledger (what a client lacks), up by the plan (what it sends)."""

    strategy: StrategySeams
    request: TrainRequest
    arrays: Mapping[str, Tensor]
    _down: dict[frozenset[str], int] = field(default_factory=dict)  # by the digests that a client holds

    def __post_init__(self) -> None:
        self._text = len(self.request.json.encode())
        self._up = sum(self.strategy.upload_bytes(self.request.round).values()) + reply_bytes(self.request)

    def of(self, client: str) -> tuple[int, int]:
        """Bytes down and up."""
        ledger = self.strategy.federation.connection.membership.ledger
        if own := self.strategy.per_client_arrays(client):
            request, arrays = with_client_arrays(self.request, self.arrays, own)
            names = ledger.missing(client, request.base)
            return self._size(client, request, arrays, names) + len(request.json.encode()), self._up
        held = ledger.held(client)
        if held not in self._down:
            names = ledger.missing(client, self.request.base)
            self._down[held] = self._size(client, self.request, self.arrays, names) + self._text
        return self._down[held], self._up

    def _size(
        self, client: str, request: TrainRequest, arrays: Mapping[str, Tensor], names: list[str]
    ) -> int:
        connection = self.strategy.federation.connection
        held, sizes = connection.membership.ledger.held(client), connection.broadcast.bytes_of
        return sum(sizes(name, arrays[name], request.base[name], held) for name in names)
