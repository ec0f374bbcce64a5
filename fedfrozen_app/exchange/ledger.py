"""The server's record of the arrays that each client has confirmed, so that only missing ones are sent."""

from collections.abc import Iterable, Mapping
from typing import Any

LISTED = 1000  # clients; with more, each set of digests, which a cohort shares, is saved once
SETS = "sets of many clients"  # cannot be a client's name: neither a partition number nor a site


class Ledger:
    def __init__(self) -> None:
        self._held: dict[str, frozenset[str]] = {}
        self._confirmed: dict[str, frozenset[str]] = {}  # those that this run has sent

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
        """The digests held by the client that this run has sent."""
        return self._confirmed.get(client, frozenset())

    def missing_cold(self, client: str, base: Mapping[str, str]) -> list[str]:
        """The same as if the client had held nothing when the run began."""
        held = self.confirmed(client)
        return [name for name, digest in base.items() if digest not in held]

    def is_cold(self, client: str) -> bool:
        """Whether the client holds no arrays from other runs."""
        held, confirmed = self._held.get(client), self._confirmed.get(client)
        return held is confirmed or not held

    def find(self, client: str, digests: Iterable[str]) -> None:
        """Record that the client reports to hold these, from any source."""
        held = self._held[client] = frozenset(digests)
        confirmed = self._confirmed.get(client, frozenset()) & held
        self._confirmed[client] = held if confirmed == held else confirmed

    def confirm(self, client: str, digests: Iterable[str]) -> None:
        """Record that the client holds exactly these, its newest base, so the record is one model long."""
        self._held[client] = self._confirmed[client] = frozenset(digests)

    def state_dict(self) -> dict[str, Any]:
        """The arrays that this run has sent: clients report others themselves. With many clients, by set."""
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
