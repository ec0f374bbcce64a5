"""Exact answers about two views of a site: their difference must not be about a few people.

Each view has a memory of its own (`memory`), and hides small cells by itself. Where two views hold nearly the
same people, what was released of one less what was released of the other is about those alone who are in one
of them, or differ in it. So a table or mean of a view is not released if it differs from the same table of
another view, as that was released, in some people and in fewer than the floor.

People are known by their names in the data. Two views whose rows belong to other units cannot be compared,
and sums of more than two views are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedfrozen_app.census.memory import changed_people, who

Memory = Mapping[str, Any]


def problem_of_overlap(
    before: Memory, now: Memory, names: Sequence[str], others: Mapping[str, Memory], floor: int
) -> str | None:
    """Why the answer after which the view's memory is `now` must not leave. `names`: of the view's people;
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
    """What leaves for the first time or has changed, and was released for the other view as well."""
    for part in ("tables", "moments"):
        for name, found in now.get(part, {}).items():
            theirs = other.get(part, {}).get(name)
            if theirs is None or theirs["told"] is None or found["told"] is None:
                continue
            if before.get(part, {}).get(name) != found:
                yield name, found["members"], theirs["members"]
