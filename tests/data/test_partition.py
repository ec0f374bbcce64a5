import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfrozen_app.data.partition import (
    Partition,
    PartitionSpec,
    _fill_up,
    deal_test,
    label_counts,
    partition,
    split_validation,
)
from fedfrozen_app.errors import UserError

LABELS = np.arange(200) % 4


def assert_disjoint_cover(result: Partition, rows: int) -> None:
    assert np.sort(np.concatenate(result.indices)).tolist() == list(range(rows))
    assert all((np.diff(client) > 0).all() for client in result.indices)
    assert len(result.names) == len(set(result.names)) == len(result.indices)


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 300),
    num_classes=st.integers(1, 7),
    alpha=st.sampled_from([1e-3, 1e-2]) | st.floats(1e-3, 100),
    num_clients=st.integers(1, 15),
    min_size=st.integers(1, 12),
    name=st.sampled_from(["dirichlet", "iid"]),
    seed=st.integers(0, 2**31),
)
def test_every_possible_draw_ends_with_all_rows_dealt(
    rows, num_classes, alpha, num_clients, min_size, name, seed
):
    labels = np.random.default_rng(seed).integers(0, num_classes, rows)
    spec = PartitionSpec(name, alpha=alpha, min_size=min_size)
    if num_clients * min_size > rows:
        with pytest.raises(UserError):
            partition(labels, {}, spec, num_clients, seed)
        return
    result = partition(labels, {}, spec, num_clients, seed)
    assert len(result.indices) == num_clients
    assert min(map(len, result.indices)) >= min_size
    assert_disjoint_cover(result, rows)


@pytest.mark.parametrize("name", ["dirichlet", "iid"])
def test_the_seed_decides(name):
    def draw(seed):
        return [c.tolist() for c in partition(LABELS, {}, PartitionSpec(name), 5, seed).indices]

    assert draw(0) == draw(0)
    assert draw(0) != draw(1)


def test_iid_sizes_differ_by_one_at_most():
    sizes = sorted(map(len, partition(LABELS, {}, PartitionSpec("iid"), 7, 0).indices))
    assert sizes == [28, 28, 28, 29, 29, 29, 29]


def test_small_alpha_is_more_skewed_than_large():
    def largest_share(alpha):
        spec = PartitionSpec("dirichlet", alpha=alpha, min_size=1)
        counts = label_counts(LABELS, partition(LABELS, {}, spec, 4, 0), 4)
        return (counts.max(axis=1) / counts.sum(axis=1)).mean()

    assert largest_share(0.05) > 0.7
    assert largest_share(1000.0) < 0.4


def test_shortfall_moves_from_whoever_is_largest():
    clients = [np.array([0, 1, 2, 3, 4]), np.array([5]), np.array([6, 7, 8, 9])]
    filled, moved = _fill_up(clients, 3)
    # 4 goes first, from five rows; then 3, because the lower number wins at four rows each.
    assert [client.tolist() for client in filled] == [[0, 1, 2], [5, 4, 3], [6, 7, 8, 9]]
    assert moved == 2


def test_the_note_tells_what_was_moved():
    labels = np.zeros(100, dtype=np.int64)
    result = partition(labels, {}, PartitionSpec("dirichlet", alpha=0.001), 10, 0)
    assert "left 9 of 10 clients under 10 examples; moved 90 examples" in result.note
    assert [len(client) for client in result.indices] == [10] * 10


def test_natural_has_a_client_per_value():
    columns = {"site": np.array(["b", "a", "b", "c", "a", "b"], dtype=object)}
    spec = PartitionSpec("natural", min_size=2)
    result = partition(np.zeros(6, dtype=np.int64), columns, spec, None, 0)
    assert result.names == ("a", "b", "c")
    assert [client.tolist() for client in result.indices] == [[1, 4], [0, 2, 5], [3]]
    assert "kept 1 with fewer than 2 (c)" in result.note


def test_natural_takes_numbers_in_order_and_any_column_name():
    columns = {"index": np.array([10, 9, 10, 9])}
    result = partition(np.zeros(4, dtype=np.int64), columns, PartitionSpec("natural"), 2, 0)
    assert result.names == ("9", "10")
    assert [client.tolist() for client in result.indices] == [[1, 3], [0, 2]]


def test_natural_shows_no_progress_bar(capfd):
    columns = {"site": np.arange(200) % 3}
    partition(LABELS, columns, PartitionSpec("natural"), None, 0)
    assert capfd.readouterr().err == ""


def test_domains_may_be_split_further():
    columns = {"domain": np.repeat(["art", "photo"], 100), "file": np.arange(200)}
    whole = partition(LABELS, columns, PartitionSpec("domain"), None, 0)
    assert whole.names == ("art", "photo")
    split = partition(LABELS, columns, PartitionSpec("domain", clients_per_domain=3), 6, 0)
    assert split.names == ("art/0", "art/1", "art/2", "photo/0", "photo/1", "photo/2")
    assert_disjoint_cover(split, 200)
    assert max(map(max, split.indices[:3])) < 100 <= min(map(min, split.indices[3:]))
    assert min(map(len, split.indices)) >= 10


TWO = {"domain": np.repeat(["art", "photo"], 100), "file": np.arange(200)}


@pytest.mark.parametrize(
    ("spec", "columns", "num_clients", "sentence"),
    [
        (PartitionSpec("dirichlet", alpha=0.0), {}, 5, "partition.alpha=0.0 must be"),
        (PartitionSpec("dirichlet", alpha=float("nan")), {}, 5, "partition.alpha=nan must be"),
        (PartitionSpec("iid", min_size=0), {}, 5, "partition.min_size=0 must be"),
        (PartitionSpec("iid"), {}, None, "num_clients=None must be"),
        (
            PartitionSpec("iid"),
            {},
            21,
            "set num_clients to 20 or fewer or partition.min_size to 9 or less",
        ),
        (PartitionSpec("iid"), {}, 201, "set num_clients to 20 or fewer\\.$"),
        (PartitionSpec("sharded"), {}, 5, "choose one of dirichlet, iid, natural, domain"),
        (PartitionSpec("natural"), {}, None, "this data set has none"),
        (PartitionSpec("natural"), TWO, None, "needs partition.column: .* domain, file"),
        (PartitionSpec("natural", column="ward"), TWO, None, "columns are domain, file"),
        (PartitionSpec("domain"), TWO, 3, "set num_clients=2 or leave it null"),
        (
            PartitionSpec("domain", clients_per_domain=11),
            TWO,
            None,
            "domain 'art' with 100 train rows: set partition.clients_per_domain to 10",
        ),
        (PartitionSpec("domain"), {"domain": np.array([""] * 200)}, None, "200 train rows have no"),
    ],
)
def test_impossible_requests_say_what_to_change(spec, columns, num_clients, sentence):
    with pytest.raises(UserError, match=sentence):
        partition(LABELS, columns, spec, num_clients, 0)


def test_label_counts():
    result = Partition((np.array([0, 1, 4]), np.array([2, 3])), "", ("0", "1"))
    assert label_counts(np.array([0, 1, 1, 1, 0]), result, 3).tolist() == [[2, 1, 0], [0, 2, 0]]


def test_validation_takes_each_class_in_its_share():
    index = np.arange(100, 200)
    labels = np.concatenate([np.full(100, 9), np.repeat([0, 1], [80, 20])])
    train, validation = split_validation(index, labels, 0.1, (0, 3))
    assert np.sort(np.concatenate([train, validation])).tolist() == index.tolist()
    assert np.bincount(labels[validation]).tolist() == [8, 2]
    again = split_validation(index, labels, 0.1, (0, 3))[1]
    other = split_validation(index, labels, 0.1, (0, 4))[1]
    assert again.tolist() == validation.tolist() != other.tolist()


@given(size=st.integers(1, 60), fraction=st.floats(0, 0.999), key=st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_validation_never_empties_train(size, fraction, key):
    index = np.arange(size) * 2
    train, validation = split_validation(index, np.arange(2 * size) % 3, fraction, (key,))
    assert len(train) >= 1
    assert np.sort(np.concatenate([train, validation])).tolist() == index.tolist()
    assert len(validation) == 0 if fraction == 0 or size == 1 else len(validation) >= 1


def test_test_rows_follow_the_train_proportions():
    """Two clients with 3:1 of class a and 0:4 of class b; domains are kept apart."""
    labels = np.array([0] * 4 + [1] * 4 + [0] * 4)
    groups = np.array(["x"] * 8 + ["y"] * 4)
    indices = (np.array([0, 1, 2]), np.array([3, 4, 5, 6, 7]), np.array([8, 9, 10, 11]))
    test_labels, test_groups = np.array([0] * 8 + [1] * 2 + [0] * 3 + [1]), np.array(["x"] * 10 + ["y"] * 4)
    dealt = deal_test((labels, groups), (test_labels, test_groups), indices, seed=0)
    assert [len(rows) for rows in dealt] == [6, 2 + 2, 3]
    assert set(dealt[2]) == {10, 11, 12}  # row 13 is of a class that nobody has in its domain
    assert all(test_labels[row] == 0 for row in dealt[0])


@given(seed=st.integers(0, 99), clients=st.integers(1, 6), classes=st.integers(1, 4))
def test_every_test_row_is_dealt_once(seed, clients, classes):
    rng = np.random.default_rng(seed)
    labels = np.concatenate([np.arange(classes), rng.integers(0, classes, 40)])
    indices = tuple(np.array_split(rng.permutation(len(labels)), clients))
    test = rng.integers(0, classes, 30)
    dealt = deal_test((labels, np.zeros(len(labels))), (test, np.zeros(30)), indices, seed)
    assert sorted(np.concatenate(dealt)) == list(range(30))
    for rows, own in zip(dealt, indices, strict=True):
        assert set(test[rows]) <= set(labels[own])
