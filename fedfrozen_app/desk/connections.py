"""A limit on idle connections: every account of this machine can open some, and must not block the page."""

import asyncio
from itertools import count

from uvicorn.protocols.http.h11_impl import H11Protocol

IDLE = 32  # connections that wait for a request; uvicorn's limit_concurrency must be above it
ALL = 50  # of all connections; above, an answer is 503


class Connection(H11Protocol):
    """A new connection closes the oldest idle one where there are too many. Who has not shown the session's
    cookie is answered at once, so that no other account's connection is ever busy for long."""

    _numbers = count()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.number = next(self._numbers)
        idle = sorted((one for one in self.connections if one.is_idle), key=lambda one: one.number)
        for one in idle[:-IDLE]:
            one.transport.abort()

    @property
    def is_idle(self) -> bool:
        """Whether no request of it is being answered."""
        return not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete)
