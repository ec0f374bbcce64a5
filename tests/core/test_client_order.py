"""Names of clients that are numbers, without a list of them."""

import pytest

from fedfrozen_app.core.client_order import Numbered


@pytest.mark.parametrize("excluded", [set(), {"0"}, {"3", "4", "8"}, {"9", "0", "5"}])
def test_numbered_names_are_those_of_a_list(excluded):
    expected = [str(number) for number in range(10) if str(number) not in excluded]
    names = Numbered(10, frozenset(excluded))
    assert list(names) == expected == [names[place] for place in range(len(names))]
    assert names == expected and names[-1] == expected[-1] and names[2:4] == tuple(expected[2:4])
    assert [str(number) in names for number in range(12)] == [str(n) in expected for n in range(12)]
    with pytest.raises(IndexError):
        names[len(expected)]


def test_a_name_is_the_number_as_it_is_written():
    names = Numbered(10, frozenset({"north", "11"}))
    assert len(names) == 10
    assert not any(name in names for name in ("07", "-1", "10", "north", "", "٣", 3))
    assert hash(names) == hash(Numbered(10)) and names != Numbered(9)
