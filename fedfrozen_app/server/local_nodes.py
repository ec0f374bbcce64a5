"""Clients that the server knows without a hello: those of its own process, if there are very many."""

from collections.abc import Iterator, Mapping

from fedfrozen_app.core.client_order import Numbered

# Up to this number each node is sent a hello, as anywhere else. A hello takes about 0.1 ms, and its answer is
# known: a node in this process is named by its number and holds nothing yet.
GREETED = 1000


class LocalNodes(Mapping[str, int]):
    """Node ids by client name, computed: partition c is client "c" at node c + 1."""

    def __init__(self, count: int, excluded: frozenset[str] = frozenset()) -> None:
        self.count = count
        self.names = Numbered(count, excluded)

    def __getitem__(self, name: str) -> int:
        if name not in self.names:
            raise KeyError(name)
        return int(name) + 1

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
