"""Client sampling, over client names, so that a seed gives the same cohorts everywhere.

Flower's own sampling draws over node ids, which differ in every run.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache

from fedfrozen_app.core.client_order import Numbered, natural_order
from fedfrozen_app.core.seeds import numpy_generator
from fedfrozen_app.server.local_nodes import LocalNodes


def cohort_size(participation: float, clients: int) -> int:
    return max(1, round(participation * clients))


def draw_cohort(names: Iterable[str], participation: float, seed: int, server_round: int) -> list[str]:
    population = population_of(names)
    size = cohort_size(participation, len(population))
    if size >= len(population):
        return list(population)
    return [population[index] for index in _drawn(len(population), size, seed, server_round)]


def batches_of(names: Iterable[str], size: int) -> list[list[str]]:
    """Fixed batches of at least `size` clients, by name: every run over the same clients has the same
    batches. Fewer than `size` clients are one batch."""
    population = list(in_order(tuple(names)))
    count = max(1, len(population) // size)
    firsts = [number * size for number in range(count)]
    return [
        population[first:last]
        for first, last in zip(firsts, [*firsts[1:], len(population)], strict=True)
        if population
    ]


def draw_batches(batches: list[list[str]], participation: float, seed: int, server_round: int) -> list[str]:
    """The clients of the sampled batches."""
    drawn = draw_cohort(map(str, range(len(batches))), participation, seed, server_round) if batches else []
    return [client for number in drawn for client in batches[int(number)]]


def draw_more(free: list[str], count: int, seed: int, server_round: int, draw: int) -> list[str]:
    """Draw `count` of the idle clients, in their order, as the `draw`-th draw of a round. The first draw of a
    round in which all are idle equals that of `draw_cohort`."""
    if count >= len(free):
        return list(free)
    keys = (server_round, draw) if draw else (server_round,)
    chosen = numpy_generator(seed, "cohort", *keys).choice(len(free), size=count, replace=False)
    return [free[place] for place in sorted(chosen.tolist())]


@lru_cache(maxsize=4)  # a prefetched round has been drawn before
def _drawn(population: int, size: int, seed: int, server_round: int) -> tuple[int, ...]:
    chosen = numpy_generator(seed, "cohort", server_round).choice(population, size=size, replace=False)
    return tuple(sorted(chosen.tolist()))


@lru_cache(maxsize=4)
def participations(names: Sequence[str], participation: float, seed: int, rounds: int) -> dict[str, int]:
    """The number of rounds from 1 to `rounds` in which each client will be drawn; with very many clients,
    only those that are drawn."""
    drawn = Counter(
        name for number in range(1, rounds + 1) for name in draw_cohort(names, participation, seed, number)
    )
    if isinstance(names, Numbered):
        return dict(drawn)
    # Sorted: nodes connect in any order, and a resent request must have the same text.
    return {name: drawn[name] for name in in_order(tuple(names))}


def population_of(names: Iterable[str]) -> Sequence[str]:
    """The clients in their order. Very many are numbered instead of listed."""
    if isinstance(names, LocalNodes):
        return names.names
    return names if isinstance(names, Numbered) else in_order(tuple(names))


@lru_cache(maxsize=4)  # usually the same names every round, perhaps thousands
def in_order(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(names, key=natural_order))
