"""The bars of a Gantt chart, one line per client."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

PARTS = (("waits", "grey"), ("downloads", "sky"), ("trains", "vermillion"), ("uploads", "blue"))
CLIENTS = 20  # shown in a picture at most
LEFT, WIDTH, HEIGHT = 110, 640, 16  # of names, of the bars' space, and of one client's line
LEAST = 1e-3  # of the whole width: a shorter bar cannot be seen


@dataclass(frozen=True)
class Bar:
    x: float
    y: float
    width: float
    colour: str
    title: str


def names_of(clients: Iterable[str]) -> list[str]:
    """The clients that are shown, in their order."""
    return sorted(set(clients), key=lambda one: (len(one), one))[:CLIENTS]


def labels_of(names: Sequence[str]) -> list[tuple[str, int]]:
    return [(name[:16], line * HEIGHT + HEIGHT - 4) for line, name in enumerate(names)]
