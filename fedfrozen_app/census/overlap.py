"""Exact answers about overlapping views of a site: their difference must not be about a few people.

Each view has its own record of releases (`memory`), and hides small cells by itself. If two views hold nearly
the same people, the difference of their releases is about the few people that only one of them has, or that
differ between them. So a table or mean of a view is not released if it differs from the same table of another
view, as last released, in at least one person but fewer than the floor.

People are identified by their names in the data. Views with different units cannot be compared, and
combinations of more than two views are not checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedfrozen_app.census.memory import changed_people, who

Memory = Mapping[str, Any]


def problem_of_overlap(
    before: Memory, now: Memory, names: Sequence[str], others: Mapping[str, Memory], floor: int
) -> str | None:
    """Why an answer that updates the view's memory to `now` must not leave. `names`: of the view's people;
    `others`: the memories of the site's other views."""
    for view, other in others.items():
        if "key" not in other:
            continue  # it has released counts with noise, or nothing
        alias = {who(name, now["key"]): who(name, other["key"]) for name in names}
        most = max(floor, int(other.get("floor", floor)))
        for name, members, theirs in _updated(before, now, other):
            differ = changed_people(theirs, {alias[person]: own for person, own in members.items()})
            if 0 < differ < most:
                return (
                    f"of its people, fewer than {most} differ from those of the view {view}, which was "
                    f"counted before: the difference of the two answers would be theirs alone ({name})"
                )
    return None


def _updated(before: Memory, now: Memory, other: Memory) -> Iterator[tuple[str, Any, Any]]:
    """The tables that are new or changed in this release, and were released for the other view as well."""
    for part in ("tables", "moments"):
        for name, found in now.get(part, {}).items():
            theirs = other.get(part, {}).get(name)
            if theirs is None or theirs["told"] is None or found["told"] is None:
                continue
            if before.get(part, {}).get(name) != found:
                yield name, found["members"], theirs["members"]
