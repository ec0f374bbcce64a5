"""How many attempts at a round it takes, on average, until colluders have set a site apart from the others.

By arithmetic alone (`fedfrozen_app.secure.bounds`). `tests/secure/test_grinding.py` holds it against draws,
and against the whole attack at small sizes. Colluders are fewer than a third of the round's sites. `a_day` is
how many attempts a site with the strict policy of a new kit allows.
"""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from common import arguments, show, write_result

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fedfrozen_app.secure.bounds import (
    SAFE,
    chance,
    chance_of_group,
    least_honest,
    least_needed,
    most_colluders,
)
from fedfrozen_app.secure.roster import NEIGHBOURS
from fedfrozen_app.sites.site_templates import POLICY_STRICT
from fedfrozen_app.sites.store import UPDATES

THRESHOLD = 2 / 3
# Sites of a round, and neighbours; None: the default.
CASES = (
    (10, None),
    (100, None),
    (161, None),
    (300, None),
    (1_000, None),
    (100_000, None),
    (100, 32),
    (10, 2),
)


MANY = 1_000  # above, looking at each size of a group takes minutes


@dataclass(frozen=True)
class Row:
    sites: int
    neighbours: int
    colluders: int
    one: float  # log2 of the chance that a given site is set apart in one attempt
    any: float  # log2 of a bound on the chance that some site is
    honest: int | None  # in the smallest sum that can be read, but for a chance of 2^-40


def row_of(sites: int, neighbours: int | None) -> Row:
    count, colluders = min(neighbours or NEIGHBOURS, sites - 1), most_colluders(sites, THRESHOLD)
    about = (sites, colluders, count, THRESHOLD)
    honest = least_honest(*about, least_needed(sites, THRESHOLD)) if sites <= MANY else None
    return Row(sites, count, colluders, chance(*about), chance_of_group(*about), honest)


def cells(row: Row) -> list[str]:
    """As docs/secure-aggregation.md has them."""
    first = [f"{row.sites:,}", "all" if row.neighbours == row.sites - 1 else str(row.neighbours)]
    if row.one == float("-inf"):
        return [*first, f"{row.colluders:,}", "no draw does", "no draw does"]
    any_ = "each" if row.any > -1 else f"2^{int(-row.any)}"
    return [*first, f"{row.colluders:,}", f"2^{int(-row.one)}", any_]


def rows() -> list[Row]:
    return [row_of(*case) for case in CASES]


def main() -> None:
    arguments(__doc__ or "", repeats=1).parse_args()
    found = rows()
    a_day = UPDATES * int(POLICY_STRICT["rounds"])
    plain = [{key: None if v == float("-inf") else v for key, v in asdict(row).items()} for row in found]
    path = write_result("mask_bounds", {"rows": plain, "a_day": a_day, "threshold": THRESHOLD})
    checks = {
        "more than 2^40 attempts at the default": all(
            row.any < SAFE for row, (_, neighbours) in zip(found, CASES, strict=True) if neighbours is None
        )
    }
    head = ["sites", "neighbours", "colluders", "attempts, one site", "attempts, any site", "honest in a sum"]
    show("Until a site is set apart", head, [[*cells(row), str(row.honest)] for row in found], checks, path)


if __name__ == "__main__":
    main()
