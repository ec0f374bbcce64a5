"""The server's record of which arrays each client has confirmed, so that only what it lacks is sent."""

from collections.abc import Iterable, Mapping
from typing import Any

LISTED = 1000  # clients; of more each set, which a round's cohort shares, is written once
SETS = "sets of many clients"  # no client has such a name: it is no partition number and no site's


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

    def confirmed(self, client: str) -> frozenset[str]:
        """What this run has brought of what it holds."""
        return self._confirmed.get(client, frozenset())

    def missing_cold(self, client: str, base: Mapping[str, str]) -> list[str]:
        """The same if the client had held nothing when the run began."""
        held = self.confirmed(client)
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

    def state_dict(self) -> dict[str, Any]:
        """What this run has brought: a client says by itself what else it holds. Of many clients by
        set."""
        if len(self._confirmed) <= LISTED:
            return {client: sorted(held) for client, held in self._confirmed.items()}
        places = {held: place for place, held in enumerate(dict.fromkeys(self._confirmed.values()))}
        by_set: list[list[str]] = [[] for _ in places]
        for client, held in self._confirmed.items():
            by_set[places[held]].append(client)
        return {SETS: [[sorted(held), by_set[place]] for held, place in places.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._held = {client: frozenset(held) for client, held in state.items() if client != SETS}
        for held, clients in state.get(SETS, ()):
            self._held |= dict.fromkeys(clients, frozenset(held))
        self._confirmed = dict(self._held)
