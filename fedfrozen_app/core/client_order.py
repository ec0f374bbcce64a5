"""The canonical order of clients: partition numbers by value, site names alphabetically."""

from collections.abc import Iterator, Sequence
from typing import Any


def natural_order(name: str) -> tuple[int, int | str]:
    return (0, int(name)) if name.isdecimal() else (1, name)


class Numbered(Sequence[str]):
    """The names "0", "1", ... of clients without the `excluded` ones, in order. Names are created on access:
    a million of them would take as much memory as a million small models."""

    def __init__(self, count: int, excluded: frozenset[str] = frozenset()) -> None:
        self.named = count
        self.excluded = tuple(sorted(int(name) for name in excluded if self._is_name(name)))

    def _is_name(self, name: object) -> bool:
        if not isinstance(name, str) or not name.isdecimal() or str(int(name)) != name:
            return False
        return int(name) < self.named

    def __len__(self) -> int:
        return self.named - len(self.excluded)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return tuple(self[number] for number in range(*place.indices(len(self))))
        number = int(place) + len(self) if place < 0 else int(place)
        if not 0 <= number < len(self):
            raise IndexError(f"client {place} of {len(self)}")
        for left_out in self.excluded:
            number += left_out <= number
        return str(number)

    def __iter__(self) -> Iterator[str]:
        left_out = set(self.excluded)
        return (str(number) for number in range(self.named) if number not in left_out)

    def __contains__(self, name: object) -> bool:
        return self._is_name(name) and int(str(name)) not in self.excluded

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Numbered):
            return (self.named, self.excluded) == (other.named, other.excluded)
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash((self.named, self.excluded))
