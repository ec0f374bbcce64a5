"""Restricts the page to one browser: that of the person who started the command.

Another account of the same machine can reach a loopback port, and a browser sends cookies to every port of a
host. So three secrets are needed: a one-time token, a cookie, and a secret path that the cookie is bound to.
"""

import secrets
import time
from dataclasses import dataclass, field
from hmac import compare_digest
from threading import Lock

COOKIE = "fedfrozen-desk"
IDLE = 30 * 60.0  # seconds without a request after which the page closes


def secret() -> str:
    return secrets.token_urlsafe(32)


@dataclass
class Session:
    """One session of the command. Only the first browser that enters may use the page."""

    base: str = field(default_factory=lambda: f"/{secrets.token_hex(16)}")
    token: str = field(default_factory=secret)
    csrf: str = field(default_factory=secret)
    idle: float = IDLE
    _cookie: str | None = None
    _used: float = field(default_factory=time.monotonic)
    _lock: Lock = field(default_factory=Lock)

    def enter(self, token: str) -> str | None:
        """Exchange the token for the cookie; None for a wrong or used token."""
        with self._lock:
            if self._cookie is not None or self.is_over or not _same(token, self.token):
                return None
            self._cookie, self._used = secret(), time.monotonic()
            return self._cookie

    def knows(self, cookie: str | None) -> bool:
        """Whether a request may be answered; it then resets the idle timer."""
        known = self._cookie is not None and cookie is not None and _same(cookie, self._cookie)
        if not known or self.is_over:
            return False
        self._used = time.monotonic()
        return True

    def is_own_form(self, token: str) -> bool:
        return _same(token, self.csrf)

    @property
    def is_over(self) -> bool:
        return time.monotonic() - self._used > self.idle


def _same(one: str, other: str) -> bool:
    return compare_digest(one.encode("utf-8", "replace"), other.encode())
