"""The server's record of which arrays each client has confirmed, so that only what it lacks is sent."""

from collections.abc import Iterable, Mapping


class Ledger:
    def __init__(self) -> None:
        self._held: dict[str, frozenset[str]] = {}

    def knows(self, client: str) -> bool:
        return client in self._held

    def missing(self, client: str, base: Mapping[str, str]) -> list[str]:
        """The names of `base` whose digests this client has not confirmed."""
        held = self._held.get(client, frozenset())
        return [name for name, digest in base.items() if digest not in held]

    def confirm(self, client: str, digests: Iterable[str]) -> None:
        """The client holds exactly these: its newest base, so the record stays one model long."""
        self._held[client] = frozenset(digests)

    def state_dict(self) -> dict[str, list[str]]:
        return {client: sorted(held) for client, held in self._held.items()}

    def load_state_dict(self, state: Mapping[str, list[str]]) -> None:
        self._held = {client: frozenset(held) for client, held in state.items()}
