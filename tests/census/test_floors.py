"""What an attacker can work out of what is told: from totals, from joined intervals, from two censuses.

The attacker of these tests knows everything but the counts: how cells are chosen, in which order, and the
totals. So all tables there could be are tried, those that would have told the very same are put together,
and a small cell is safe only where it is not the same in all of them.
"""

from collections import defaultdict
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfrozen_app.census import floors, memory
from fedfrozen_app.census.ask import Ask
from fedfrozen_app.census.cells import Table, by_interval, by_name, moments
from fedfrozen_app.census.records import Records
from fedfrozen_app.census.site import Rules, released_counts
from fedfrozen_app.exchange.strict import canonical
from tests.conftest import slowly


def compositions(cells: int, most: int):
    """Every table of so many cells with up to `most` people."""
    return [counts for counts in product(range(most + 1), repeat=cells) if sum(counts) <= most]


def words(counts) -> Table:
    person = np.arange(sum(counts))
    value = np.repeat([f"c{cell}" for cell in range(len(counts))], counts)
    return by_name("classes", person, value.tolist(), [f"c{cell}" for cell in range(len(counts))])


def intervals(counts) -> Table:
    """The last count is of people without a value."""
    values = [float(cell) for cell in range(len(counts) - 1)] + [np.nan]
    return by_interval("x", np.arange(sum(counts)), np.repeat(values, counts), range(len(counts)))


def unsafe(groups: dict, floor: int) -> list:
    """(what was told, cell, its one possible value) for every small cell that is given away."""
    found = []
    for told, tables in groups.items():
        for cell in range(len(tables[0])):
            values = {counts[cell] for counts in tables}
            if len(values) == 1 and 0 < (value := values.pop()) < floor:
                found.append((told, cell, value))
    return found


@pytest.mark.parametrize(
    ("cells", "floor", "most"), [(2, 3, 14), (2, 5, 20), (3, 3, 12), (3, 4, 14), (4, 3, 10), (5, 3, 9)]
)
@pytest.mark.parametrize("make", [words, intervals])
def test_no_small_cell_is_told_or_can_be_worked_out(make, cells, floor, most):
    groups = defaultdict(list)
    for counts in compositions(cells, most):
        if sum(counts) < floor:
            continue  # such a site tells nothing
        told = floors.publish(make(counts), floor)
        for shown in [] if told is None else numbers(told["people"]) + numbers(told.get("none")):
            assert shown == 0 or shown >= floor
        groups[sum(counts), canonical(told)].append(counts)
    assert unsafe(groups, floor) == []
    assert any(
        "null" not in told and len(tables) == 1 for (_, told), tables in groups.items()
    )  # some is told


def numbers(part) -> list[int]:
    return list(part.values() if isinstance(part, dict) else part or ())


def names_of(counts) -> list[str]:
    """Of the people of a table: those who stay in a cell keep their name."""
    return [f"{cell}-{number}" for cell, count in enumerate(counts) for number in range(count)]


@pytest.mark.parametrize(
    ("cells", "floor", "most"),
    [
        (2, 3, 8),
        pytest.param(2, 3, 10, marks=pytest.mark.slow),
        pytest.param(3, 3, 10, marks=pytest.mark.slow),
        pytest.param(2, 4, 16, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("make", [intervals, *slowly(words)])
def test_two_censuses_tell_no_small_cell_that_one_would_hide(make, cells, floor, most):
    """Everybody who may have joined or left between them, or all of them: who did, nobody outside knows."""
    before_groups, now_groups = defaultdict(list), defaultdict(list)
    tables = [counts for counts in compositions(cells, most) if sum(counts) >= floor]
    first = {counts: memory.table_again(make(counts), names_of(counts), floor, None) for counts in tables}
    renewed = 0
    for before, now, others in product(tables, tables, (False, True)):
        old = first[before]
        names = [f"other {name}" for name in names_of(now)] if others else names_of(now)
        changed = len(set(names_of(before)) ^ set(names))
        # As `memory.told` has it: nothing is renewed, totals neither, until so many people have changed.
        renews = changed >= floor
        second = memory.table_again(make(now), names, floor, old) if renews else old
        total = sum(now) if renews else sum(before)
        both = (sum(before), total, canonical(old["told"]), canonical(second["told"]))
        before_groups[both].append(before)
        now_groups[both].append(now)
        renewed += old["told"] is not None and second["told"] != old["told"]
    assert unsafe(before_groups, floor) == []
    # Of one that was not told anew, nothing but its total is known.
    told_anew = {both: found for both, found in now_groups.items() if both[2] != both[3]}
    assert unsafe(told_anew, floor) == []
    assert renewed > 100


# People with several rows, as hypothesis finds them -------------------------------------------------------

PEOPLE = st.lists(
    st.tuples(
        st.sampled_from("abcd"), st.sampled_from(["F", "M", ""]), st.integers(0, 99), st.integers(1, 3)
    ),
    min_size=0,
    max_size=60,
)
COLUMNS = {"sex": ("F", "M"), "age": (0.0, 20.0, 40.0, 60.0, 80.0, 100.0)}


def records(people, first: int = 0) -> Records:
    """A line for each person: class, sex, age and how many rows; a second row has the next class."""
    rows = [
        (number, "abcd"[("abcd".index(label) + extra) % 4], sex, age)
        for number, (label, sex, age, count) in enumerate(people)
        for extra in range(count)
    ]
    return Records(
        "text",
        [f"note {first + number} {label}" for number, label, _, _ in rows],
        [(label,) for _, label, _, _ in rows],
        {"sex": [sex for *_, sex, _ in rows], "age": [age if age % 7 else None for *_, age in rows]},
        np.array([number for number, *_ in rows], dtype=np.int64),
        tuple(f"person {first + number}" for number in range(len(people))),
        "person",
        tuple("abcd"),
    )


@settings(max_examples=60, deadline=None)
@given(PEOPLE, st.sampled_from([3, 5, 10]))
def test_every_number_of_people_that_leaves_is_none_or_the_floor(people, floor):
    told = released_counts(Ask("test", columns=COLUMNS), records(people), Rules(floor, COLUMNS), {})
    if len(people) < floor:
        assert (told["people"], told["rows"], told["tables"], told["moments"]) == (None, None, {}, {})
        return
    for name, table in told["tables"].items():
        if table is None:
            continue
        shown = numbers(table["people"]) + ([table["none"]["people"]] if table.get("none") else [])
        assert all(count == 0 or count >= floor for count in shown), name
        # Nor are so few left over by taking what is shown from everybody.
        if "hidden" in table and not table["hidden"] and not table["others_hidden"]:
            assert all(count in (0, len(people)) or len(people) - count >= floor for count in shown), name
    for found in told["moments"].values():
        if found is not None and found["people"] is not None:
            assert found["people"] >= floor
            assert len(people) - found["people"] == 0 or len(people) - found["people"] >= floor


@settings(max_examples=60, deadline=None)
@given(PEOPLE, PEOPLE, st.integers(0, 60), st.sampled_from([3, 5]))
def test_what_changed_by_fewer_people_than_the_floor_is_not_told(before, joined, left, floor):
    """The next census has the first one's people less some, and more of others."""
    kept, state, rules = before[left:], {}, Rules(floor, COLUMNS)
    ask = Ask("test", columns=COLUMNS)
    first = released_counts(ask, records(before), rules, state)
    again = released_counts(ask, records(before), rules, state)
    assert canonical(first) == canonical(again)
    now = records([*kept, *joined], first=left)
    names = [f"person {number}" for number in range(left, len(before))]
    names += [f"new {number}" for number in range(len(now.names) - len(names))]
    now = Records(**{**vars(now), "names": tuple(names)})
    second = released_counts(ask, now, rules, state)
    changed = min(left, len(before)) + len(joined)
    if first["people"] is not None and 0 < changed < floor:
        assert canonical(second) == canonical(first)
    if first["people"] is None or second["people"] is None:
        return
    for name, table in second["tables"].items():
        old = first["tables"][name]
        if old is None or table is None or "hidden" not in table or table == old:
            continue
        assert set(old["hidden"]) <= set(table["hidden"])  # nothing that was hidden is shown later
        if name == "classes":
            for cell in set(table["people"]) & set(old["people"]):
                people = classes_of(before[:left]) + classes_of(joined)
                touched = sum(cell in own for own in people)
                assert touched == 0 or touched >= floor


def classes_of(people) -> list[set[str]]:
    return [
        {"abcd"[("abcd".index(label) + extra) % 4] for extra in range(count)} for label, _, _, count in people
    ]


def test_asks_choose_among_what_is_told_and_no_more():
    """Two asks with other columns: the tables that both have are the same, and no other edges are taken."""
    from fedfrozen_app.census.site import problem

    people = [("abcd"[n % 4], "FM"[n % 2], n % 99, 1) for n in range(200)]
    state, rules = {}, Rules(10, COLUMNS)
    both = released_counts(Ask("one", columns=COLUMNS), records(people), rules, state)
    none = released_counts(Ask("two"), records(people), rules, state)
    assert none["tables"].items() <= both["tables"].items()
    assert {name for name in both["tables"] if name not in none["tables"]} == {
        "missing/age", "missing/sex", "numbers/age", "words/sex",
    }  # fmt: skip
    shifted = Ask("three", columns={"age": (0.0, 19.0, 40.0, 60.0, 80.0, 100.0)})
    assert "other edges than the policy's" in problem(shifted, rules)
    assert "which the policy does not name" in problem(Ask("four", columns={"postcode": (0.0, 1.0)}), rules)
    assert "other words" in problem(Ask("five", columns={"sex": ("F",)}), rules)


def test_a_mean_hides_who_is_behind_it():
    people, values = np.arange(30), np.arange(30.0)
    assert floors.publish_moments(moments("x", people, values), 10) == {
        "rows": 30, "people": 30, "mean": 14.5, "variance": pytest.approx(values.var()),
    }  # fmt: skip
    assert floors.publish_moments(moments("x", people[:9], values[:9]), 10) is None
    # One person has most of the rows.
    assert (
        floors.publish_moments(moments("x", np.array([0] * 40 + list(range(1, 21))), np.ones(60)), 10) is None
    )
    # Three have no value: how many have one is not told, nor a mean that would give it away.
    values[:3] = np.nan
    told = floors.publish_moments(moments("x", people, values), 10)
    assert told == {"rows": None, "people": None, "mean": 16.0, "variance": 61.0}


def test_a_damaged_memory_is_no_fresh_start(tmp_path):
    from fedfrozen_app.core.errors import UserError

    path = tmp_path / "main.json"
    assert memory.read_memory(path) == {}
    state: dict = {}
    people = [("abcd"[n % 4], "FM"[n % 2], n % 99, 1) for n in range(60)]
    released_counts(Ask("one"), records(people), Rules(5), state)
    memory.write_memory(path, state)
    assert canonical(memory.read_memory(path)) == canonical(state)
    assert "person" not in path.read_text()  # people are known there by keyed hashes
    path.write_text(path.read_text().replace('"floor": 5', '"floor": 3'))
    with pytest.raises(UserError, match="bring it back from a backup"):
        memory.read_memory(path)
