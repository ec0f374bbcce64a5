"""Clients' rows as two arrays: the same rows as ever, and very many clients."""

import hashlib

import numpy as np
import pytest

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data import partition_draws
from fedfrozen_app.data.client_splits import deal_test
from fedfrozen_app.data.partition import partition
from fedfrozen_app.data.partition_spec import PartitionSpec
from fedfrozen_app.data.row_lists import NOBODY, RowLists, distinct

LABELS = np.random.default_rng(7).integers(0, 4, 600)
SITES = np.array([f"site {n}" for n in np.random.default_rng(8).integers(0, 7, 600)], dtype=object)
# The train and the test rows of 12 clients, as they were dealt when each client had an array of its own.
BEFORE = {
    "dirichlet": ("c85f35efc6c26165", "d952184868e4a540"),
    "dirichlet short": ("e5c8f021b0b89d1b", "39438cbf611f2ba1"),
    "dirichlet equal": ("782643db73ca0454", "6c4237769b46d678"),
    "iid": ("958d0505f4f4fc32", "b9d910a3db0932e7"),
    "labels": ("b4e4aa74cd391fe7", "b9b70dc108e4800c"),
    "shards": ("7c88e8ec0b80d1c3", "4fda8bf3c41341e4"),
    "quantity": ("1ca1cfc6f1da9ff5", "54ae107bd685613a"),
    "natural": ("5ce7092a4dc0da45", "a5e9f2cf4bad7532"),
    "domain": ("653e4346c97feaac", "1d40ffb85cc9c5da"),
}
OTHERS = {
    "dirichlet short": {"alpha": 0.02},
    "dirichlet equal": {"balanced": True},
    "domain": {"clients_per_domain": 2},
}


def digest(lists):
    parts = (np.asarray(rows, dtype="<i8").tobytes() for rows in lists)
    return hashlib.sha256(b"|".join(parts)).hexdigest()[:16]


@pytest.mark.parametrize("name", BEFORE)
def test_every_client_has_the_rows_it_always_had(name):
    spec = PartitionSpec(name.split()[0], min_size=6, **OTHERS.get(name, {}))
    by_site = spec.name in ("natural", "domain")
    groups = SITES if by_site else np.zeros(600)
    found = partition(LABELS, {"domain": SITES} if by_site else {}, spec, None if by_site else 12, 3)
    dealt = deal_test((LABELS, groups), (LABELS[:150], groups[:150]), found.indices, 3)
    assert (digest(found.indices), digest(dealt)) == BEFORE[name]


def test_lists_of_owners_by_hand():
    lists = RowLists.of_owners(np.array([1, 0, NOBODY, 1, 3, 0]), 4)
    assert [rows.tolist() for rows in lists] == [[1, 5], [0, 3], [], [4]]
    assert lists.sizes.tolist() == [2, 2, 0, 1] and len(lists) == 4
    assert lists[-1].tolist() == [4] and lists[1].dtype == np.int64
    assert lists.owners(6).tolist() == [1, 0, NOBODY, 1, 3, 0]
    assert lists.counts(np.array([0, 1, 0, 1, 1, 1]), 2).tolist() == [[0, 2], [1, 1], [0, 0], [0, 1]]
    with pytest.raises(IndexError):
        lists[4]


def test_rows_have_other_numbers_than_their_places():
    lists = RowLists.of_owners(np.array([1, 0, 1]), 2, np.array([40, 10, 30]))
    assert [rows.tolist() for rows in lists] == [[10], [40, 30]]
    assert [rows.tolist() for rows in lists.sorted()] == [[10], [30, 40]]
    assert [rows.tolist() for rows in RowLists.of([np.array([10]), np.array([40, 30])])] == [[10], [40, 30]]


@pytest.mark.parametrize("values", [[], [4], [1, 1, 2, 5, 5], [0, 1, 2], [3, 1, 3, 2]])
def test_distinct_values_are_numpys(values):
    array = np.array(values, dtype=np.int64)
    expected = np.unique(array, return_index=True, return_inverse=True)
    for found, one in zip(distinct(array), expected, strict=True):
        assert found.tolist() == one.tolist()


def test_beyond_the_limit_small_clients_are_topped_up_by_another_rule(monkeypatch):
    monkeypatch.setattr(partition_draws, "LARGE", 20)
    spec = PartitionSpec("dirichlet", alpha=0.05, min_size=4)
    found = partition(LABELS, {}, spec, 100, 3)
    again = partition(LABELS, {}, spec, 100, 3)
    assert "moved" in found.note and "above that" in found.note
    assert found.indices.sizes.min() == 4
    assert np.sort(found.indices.rows).tolist() == list(range(600))
    assert digest(found.indices) == digest(again.indices)
    assert digest(found.indices) != digest(partition(LABELS, {}, spec, 100, 4).indices)


def test_a_hundred_thousand_clients_take_no_list_each():
    rows = 300_000
    labels = np.arange(rows) % 3
    found = partition(labels, {"who": np.arange(rows) // 3}, PartitionSpec("natural", min_size=1), None, 0)
    assert len(found.indices) == 100_000 and found.indices[77].tolist() == [231, 232, 233]
    dealt = deal_test((labels, np.zeros(rows)), (labels[:999], np.zeros(999)), found.indices, 0)
    assert np.sort(dealt.rows).tolist() == list(range(999))


def test_more_clients_than_rows_is_one_sentence():
    with pytest.raises(UserError, match="1000000 clients of at least 1 examples need"):
        partition(LABELS, {}, PartitionSpec("iid", min_size=1), 1_000_000, 0)
