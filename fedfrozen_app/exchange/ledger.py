"""The server's record of which arrays each client has confirmed, so that only what it lacks is sent."""

from collections.abc import Iterable, Mapping


class Ledger:
    def __init__(self) -> None:
        self._held: dict[str, frozenset[str]] = {}
        self._confirmed: dict[str, frozenset[str]] = {}  # of those, what this run has brought

    def knows(self, client: str) -> bool:
        return client in self._held

    def held(self, client: str) -> frozenset[str]:
        """The digests that the client has confirmed; clients that confirmed the same base share one set."""
        return self._held.get(client, frozenset())

    def missing(self, client: str, base: Mapping[str, str]) -> list[str]:
        """The names of `base` whose digests this client has not confirmed."""
        held = self.held(client)
        return [name for name, digest in base.items() if digest not in held]

    def missing_cold(self, client: str, base: Mapping[str, str]) -> list[str]:
        """The same if the client had held nothing when the run began."""
        held = self._confirmed.get(client, frozenset())
        return [name for name, digest in base.items() if digest not in held]

    def is_cold(self, client: str) -> bool:
        """Whether the client holds nothing that another run has brought."""
        held, confirmed = self._held.get(client), self._confirmed.get(client)
        return held is confirmed or not held

    def find(self, client: str, digests: Iterable[str]) -> None:
        """The client reports that it holds these, from whatever source."""
        held = self._held[client] = frozenset(digests)
        confirmed = self._confirmed.get(client, frozenset()) & held
        self._confirmed[client] = held if confirmed == held else confirmed

    def confirm(self, client: str, digests: Iterable[str]) -> None:
        """The client holds exactly these: its newest base, so the record stays one model long."""
        self._held[client] = self._confirmed[client] = frozenset(digests)

    def state_dict(self) -> dict[str, list[str]]:
        """What this run has brought: a client says by itself what else it holds."""
        return {client: sorted(held) for client, held in self._confirmed.items()}

    def load_state_dict(self, state: Mapping[str, list[str]]) -> None:
        self._held = {client: frozenset(held) for client, held in state.items()}
        self._confirmed = dict(self._held)
