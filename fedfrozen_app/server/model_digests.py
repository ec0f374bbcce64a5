"""Digests of the server's model, computed in the background as soon as values change."""

from collections.abc import Callable


class ModelDigests:
    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self._pending: Callable[[], dict[str, str]] = dict  # waits for the digests of the latest changes

    def expect(self, pending: Callable[[], dict[str, str]]) -> None:
        """`pending` waits for the digests of the names that have changed."""
        self._pending = pending

    @property
    def known(self) -> dict[str, str]:
        """All digests by name; waits for those that are still being computed."""
        self._known |= self._pending()
        self._pending = dict
        return self._known
