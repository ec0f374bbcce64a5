"""A limit on idle connections: every account of this machine can open some, and must not block the page."""

import asyncio
from itertools import count

from uvicorn.protocols.http.h11_impl import H11Protocol

IDLE = 32  # connections that wait for a request
KNOWN = "fedfrozen.known"  # in the scope of a request of this session's browser


class Connection(H11Protocol):
    """A new connection closes the oldest idle one if there are too many. A request without the session's
    cookie is answered at once, so a connection of another account is never busy for long."""

    _numbers = count()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.number = next(self._numbers)
        own = (one for one in self.connections if isinstance(one, Connection))
        idle = sorted((one for one in own if one.is_idle), key=lambda one: one.number)
        for one in idle[:-IDLE]:
            one.transport.abort()

    @property
    def is_idle(self) -> bool:
        """Whether it answers no request, and its last request was not from this session's browser."""
        if self.transport.is_closing() or (self.scope is not None and KNOWN in self.scope):
            return False
        return self.cycle is None or self.cycle.response_complete
