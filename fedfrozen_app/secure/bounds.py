"""The limits of masking: how many clients must stay, how many may collude, and how likely collusion succeeds.

Each site draws its own neighbours, after it has seen the keys of all. No party can influence the draw, so the
server and the sites that collude with it can only wait for a favourable one. Each attempt at a round is one
draw.

A draw is favourable if it isolates a group of honest sites from the other honest sites of the sum, so that
the server learns the sum over this group alone. For that it must have the self-mask of each site of the
group, and `needed` of its holders must give their shares. Holders are the site itself and its neighbours.
Colluders give shares, and so do neighbours in the group. An honest neighbour outside of the group that is in
the sum shares a mask with the site that no party can remove; one that is not in the sum gives no share. So
`needed - 1` neighbours of each site of the group must be colluders or in the group. On a complete graph no
draw achieves that with at most `most_colluders` colluders.
"""

from functools import lru_cache
from math import ceil, comb, inf, log2

SAFE = -40.0  # log2 of a probability that counts as zero


def least_needed(count: int, threshold: float) -> int:
    """How many of `count`: always more than half, so that no two such groups are disjoint."""
    return max(count // 2 + 1, min(count, ceil(threshold * count - 1e-9)))


def most_colluders(count: int, threshold: float) -> int:
    """How many of `count` clients may collude with the server: fewer than a third, and so few that the honest
    ones cannot be made to confirm two sums of one round."""
    return min(-(-count // 3) - 1, 2 * least_needed(count, threshold) - count - 1)


def chance(cohort: int, allies: int, neighbours: int, threshold: float) -> float:
    """log2 of the probability that enough of the neighbours that one site draws are among its `allies`."""
    others, needed = cohort - 1, least_needed(neighbours + 1, threshold)
    ways = sum(
        comb(allies, among) * comb(others - allies, neighbours - among)
        for among in range(needed - 1, min(allies, neighbours) + 1)
    )
    return log2(ways) - log2(comb(others, neighbours)) if ways else -inf


def chance_of_group(cohort: int, colluders: int, neighbours: int, threshold: float, size: int = 1) -> float:
    """log2 of a bound on the probability that some group of `size` honest sites is isolated; 0 is no bound.

    Sites draw independently; the union bound is over all groups of this size.
    """
    each = chance(cohort, colluders + size - 1, neighbours, threshold)
    return min(0.0, log2(comb(cohort - colluders, size)) + size * each)


@lru_cache(maxsize=64)
def least_honest(cohort: int, colluders: int, neighbours: int, threshold: float, staying: int) -> int:
    """The fewest honest sites that a sum is over, whatever the server does: as many as must stay, less the
    colluders. On a sparse graph it may be fewer; this then holds except with probability 2^-40."""
    most, total = staying - colluders, 0.0
    if neighbours >= cohort - 1:
        return most
    for size in range(1, most):
        total += 2.0 ** chance_of_group(cohort, colluders, neighbours, threshold, size)
        if total > 2.0**SAFE:
            return size
    return most
