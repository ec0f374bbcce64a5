import json
import warnings

import numpy as np
import pytest
import torch
from datasets import Dataset
from flwr_datasets.partitioner import DirichletPartitioner, NaturalIdPartitioner, Partitioner
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.client_splits import deal_test, label_counts, split_validation
from fedfrozen_app.data.partition import partition
from fedfrozen_app.data.partition_draws import DIRICHLET_STREAM
from fedfrozen_app.data.partition_file import read_clients
from fedfrozen_app.data.partition_noise import with_noise
from fedfrozen_app.data.partition_rules import fill_up, fitted, label_entropy, whole
from fedfrozen_app.data.partition_spec import Partition, PartitionSpec
from fedfrozen_app.data.table import Table
from fedfrozen_app.report.label_picture import label_picture
from tests.conftest import slowly

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


def rows_of_flwr_datasets(partitioner: Partitioner, **columns: np.ndarray) -> list[list[int]]:
    rows = len(next(iter(columns.values())))
    partitioner.dataset = Dataset.from_dict({"row": np.arange(rows), **columns})
    parts = [partitioner.load_partition(number) for number in range(partitioner.num_partitions)]
    return [sorted(part[:]["row"]) for part in parts]


@pytest.mark.parametrize(
    ("rows", "clients", "alpha", "min_size", "capped"),
    [
        (200, 5, 0.3, 10, False),
        (500, 12, 0.5, 1, True),
        (120, 7, 0.3, 6, False),  # drawn several times
        (90, 3, 0.001, 1, True),  # whole classes fall to one client
        (60, 1, 1.0, 60, False),
    ],
)
def test_dirichlet_deals_as_flwr_datasets(rows, clients, alpha, min_size, capped):
    for seed in range(3):
        labels = np.random.default_rng(seed).integers(0, 6, rows)
        spec = PartitionSpec("dirichlet", alpha=alpha, min_size=min_size, capped=capped)
        ours = partition(labels, {}, spec, clients, seed).indices
        key = int(np.random.SeedSequence((seed, DIRICHLET_STREAM)).generate_state(1)[0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it complains of every draw that misses the minimum
            theirs = DirichletPartitioner(
                clients, "label", alpha, min_partition_size=min_size, self_balancing=capped, seed=key
            )
            assert [client.tolist() for client in ours] == rows_of_flwr_datasets(theirs, label=labels)


def test_a_column_deals_as_flwr_datasets():
    sites = np.random.default_rng(0).choice(["north", "east", "a10", "a9"], 100)
    ours = partition(np.zeros(100, dtype=np.int64), {"site": sites}, PartitionSpec("natural"), None, 0)
    theirs = NaturalIdPartitioner("site")
    assert [client.tolist() for client in ours.indices] == rows_of_flwr_datasets(theirs, site=sites)
    assert ours.names == tuple(theirs.partition_id_to_natural_id.values())


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


def test_shortfall_is_one_class_from_one_client():
    labels = np.array([0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2])
    clients = [np.array([0, 1, 2, 3, 4, 5]), np.array([6]), np.array([7, 8, 9, 10, 11])]
    filled, moved = fill_up(clients, labels, 3)
    # Client 1 lacks two. Of its own class 2, client 2 has two to spare.
    assert [sorted(client.tolist()) for client in filled] == [[0, 1, 2, 3, 4, 5], [6, 10, 11], [7, 8, 9]]
    assert moved == 2


def test_shortfall_that_nobody_can_fill_alone_comes_from_several():
    labels = np.array([0, 0, 0, 1, 1, 1, 1, 1, 1])
    clients = [np.array([0, 1, 2, 3]), np.array([4, 5, 6, 7, 8]), np.array([], dtype=np.int64)]
    filled, moved = fill_up(clients, labels, 3)
    assert [len(client) for client in filled] == [3, 3, 3] and moved == 3
    assert sorted(np.concatenate(filled).tolist()) == list(range(9))


def test_a_smaller_alpha_stays_the_more_skewed_when_clients_are_filled_up():
    """100 clients of 5,000 rows: filled up row by row, 0.01 came out milder than 0.1."""
    labels = np.random.default_rng(0).integers(0, 10, 5000)

    def entropy(alpha):
        parts = partition(labels, {}, PartitionSpec("dirichlet", alpha=alpha), 100, 0)
        return label_entropy(parts.indices, labels), parts.note

    (strong, note), (weak, _) = entropy(0.01), entropy(0.1)
    assert strong < 0.5 * weak
    assert f"{strong:.2f} now" in note and "%) to them" in note


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
        (
            PartitionSpec("sharded"),
            {},
            5,
            "choose one of dirichlet, iid, labels, shards, quantity, noise, natural",
        ),
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


# The other ways of dealing --------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(1, 300),
    num_classes=st.integers(1, 7),
    alpha=st.sampled_from([1e-4, 1e-2]) | st.floats(1e-3, 100),
    num_clients=st.integers(1, 15),
    min_size=st.integers(1, 6),
    each=st.integers(1, 5),
    name=st.sampled_from(["labels", "shards", "quantity", "noise", "balanced"]),
    seed=st.integers(0, 2**31),
)
def test_every_way_ends_with_all_rows_dealt_or_a_sentence(
    rows, num_classes, alpha, num_clients, min_size, each, name, seed
):
    labels = np.random.default_rng(seed).integers(0, num_classes, rows)
    settings = {"alpha": alpha, "min_size": min_size, "labels": each, "shards": each}
    spec = (
        PartitionSpec("dirichlet", balanced=True, **settings)
        if name == "balanced"
        else PartitionSpec(name, **settings)
    )
    classes, counts = np.unique(labels, return_counts=True)
    try:
        result = partition(labels, {}, spec, num_clients, seed)
    except UserError:
        sharing = -(-num_clients * each // len(classes))  # clients of the class that most have
        impossible = {
            "labels": each > len(classes)
            or num_clients * each < len(classes)
            or counts.min() < sharing
            or num_clients * min_size > rows
            or counts.min() // sharing * each < min_size,
            "shards": num_clients * each > rows or rows // (num_clients * each) * each < min_size,
        }.get(name, num_clients * min_size > rows)
        assert impossible
        return
    assert_disjoint_cover(result, rows)
    sizes = [len(client) for client in result.indices]
    assert len(sizes) == num_clients and min(sizes) >= min_size
    if name == "labels":
        assert all(len(np.unique(labels[client])) == each for client in result.indices)
    if name in ("noise", "balanced"):
        assert max(sizes) - min(sizes) <= 1
    if name == "shards":
        assert max(sizes) - min(sizes) <= each
    again = partition(labels, {}, spec, num_clients, seed)
    assert all(np.array_equal(*pair) for pair in zip(result.indices, again.indices, strict=True))


def test_labels_by_hand():
    """Four classes of 50 and six clients with two each: three clients a class, of 17, 17 and 16 rows."""
    result = partition(LABELS, {}, PartitionSpec("labels", labels=2, min_size=1), 6, 0)
    counts = label_counts(LABELS, result, 4)
    assert ((counts > 0).sum(axis=1) == 2).all() and ((counts > 0).sum(axis=0) == 3).all()
    assert sorted(counts[counts > 0].tolist()) == [16] * 4 + [17] * 8
    assert result.note.startswith("2 labels a client: 6 clients with")


def test_shards_by_hand():
    """200 rows of four classes in ten shards of 20: a shard has at most two classes, a client four."""
    result = partition(LABELS, {}, PartitionSpec("shards", shards=2, min_size=1), 5, 0)
    assert [len(client) for client in result.indices] == [40] * 5
    assert ((label_counts(LABELS, result, 4) > 0).sum(axis=1) <= 4).all()


def test_quantity_is_skewed_in_size_alone():
    labels = np.arange(20000) % 4
    result = partition(labels, {}, PartitionSpec("quantity", alpha=0.3, min_size=200), 10, 0)
    sizes = np.array([len(client) for client in result.indices])
    assert sizes.min() >= 200 and sizes.max() > 5 * sizes.min()
    shares = label_counts(labels, result, 4) / sizes[:, None]
    assert np.abs(shares - 0.25).max() < 0.12


def test_balanced_dirichlet_is_as_skewed_as_asked():
    labels = np.arange(10000) % 10

    def entropy(alpha):
        spec = PartitionSpec("dirichlet", alpha=alpha, balanced=True)
        result = partition(labels, {}, spec, 100, 0)
        assert {len(client) for client in result.indices} == {100}
        return label_entropy(result.indices, labels), result.note

    rng = np.random.default_rng(0)
    for alpha in (0.05, 0.6, 10.0):
        drawn = rng.dirichlet(np.full(10, alpha), 4000).clip(1e-300)
        expected = -(drawn * np.log(drawn)).sum(axis=1).mean()
        found, note = entropy(alpha)
        assert found == pytest.approx(expected, rel=0.15)
    assert "equal sizes" in note and "in other classes than drawn" in note


@given(
    shares=st.lists(st.floats(0, 1), min_size=1, max_size=9).filter(lambda found: sum(found) > 1e-3),
    total=st.integers(0, 500),
)
def test_whole_numbers_keep_their_sum(shares, total):
    exact = np.array(shares) / sum(shares)
    counts = whole(exact, total)
    assert counts.sum() == total and np.abs(counts - exact * total).max() < 1 + 1e-6


@settings(deadline=None)
@given(seed=st.integers(0, 999), rows=st.integers(1, 8), columns=st.integers(1, 8), total=st.integers(0, 200))
def test_fitted_tables_have_their_sums(seed, rows, columns, total):
    rng = np.random.default_rng(seed)
    row_sums = rng.multinomial(total, np.full(rows, 1 / rows))
    column_sums = rng.multinomial(total, np.full(columns, 1 / columns))
    wanted = np.outer(row_sums, column_sums) / max(total, 1) * rng.uniform(0.5, 1.5, (rows, columns))
    counts = fitted(wanted, row_sums, column_sums)
    assert (counts >= 0).all()
    assert counts.sum(axis=1).tolist() == row_sums.tolist()
    assert counts.sum(axis=0).tolist() == column_sums.tolist()


def test_noise_grows_from_client_to_client_and_touches_nobody_else():
    pixels = torch.full((40, 1, 16, 16), 128, dtype=torch.uint8)
    table = Table({"pixel_values": pixels}, torch.zeros(40, dtype=torch.int64))
    parts = Partition((np.arange(0, 10), np.arange(10, 30)), "", ("0", "1"))
    noised = with_noise(table, parts, 0.1, seed=3).inputs["pixel_values"]
    assert (pixels == 128).all()  # the table itself is as it was
    assert noised[:10].double().std() == pytest.approx(255 * 0.1 / 2, rel=0.05)
    assert noised[10:30].double().std() == pytest.approx(255 * 0.1, rel=0.05)
    assert (noised[30:] == 128).all()  # the server's rows
    again = with_noise(table, parts, 0.1, seed=3).inputs["pixel_values"]
    assert torch.equal(noised, again)
    assert not torch.equal(noised, with_noise(table, parts, 0.1, seed=4).inputs["pixel_values"])
    assert with_noise(table, parts, 0.0, seed=3) is table and with_noise(table, None, 0.1, seed=3) is table
    with pytest.raises(UserError, match="adds noise to pictures, and these data are none"):
        with_noise(Table({"input_ids": pixels}, table.labels), parts, 0.1, seed=3)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.csv", "client\nb\na\nb\n"),
        ("rows.csv", "row,client\n1,a\n0,b\n2,b\n"),
        ("rows.json", '["b", "a", "b"]'),
        ("rows.json", '{"a": [1], "b": [0, 2]}'),
    ],
)
def test_a_file_names_each_row_s_client(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert read_clients(str(tmp_path / name), 3).tolist() == ["b", "a", "b"]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("rows.csv", "", "has no column client"),
        ("rows.csv", "who\na\n", "has no column client"),
        ("rows.csv", "client\na\nb\n", "names no client for row 2 of 3"),
        ("rows.csv", "client\na\nb\na\nb\n", "names row 3, and the data set has 3 train rows"),
        ("rows.csv", "row,client\n0,a\n0,b\n1,a\n", "names row 0 twice"),
        ("rows.csv", "row,client\nx,a\n", "names the row 'x'"),
        ("rows.csv", "client\na\n \nb\n", "names the client"),
        ("rows.json", "{", "is no JSON"),
        ("rows.json", '"a"', "must be a list of clients"),
        ("rows.json", '{"a": 1}', "must be a list of clients"),
        ("rows.json", '{"a": [0.5]}', "names the row 0.5"),
        ("rows.json", "[null]", "names the client None"),
    ],
)
def test_a_file_that_does_not_fit_is_a_sentence(tmp_path, name, text, says):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as refused:
        read_clients(str(tmp_path / name), 3)
    assert says in str(refused.value)


WORDS = ["num_rounds=1", "strategy=fedavg", "model.config.num_hidden_layers=1"]


@pytest.mark.parametrize(
    "words",
    [
        ["partition=labels", "num_clients=5"],
        ["partition=dirichlet", "partition.balanced=true", "partition.noise=0.2"],
        *slowly(["partition=shards"], ["partition=quantity"], ["partition=noise"]),
    ],
    ids=lambda words: words[0],
)
def test_a_run_with_every_way(train, words):
    row = train(*WORDS, *words).rows[-1]
    assert row["clients_failed"] == 0 and row["test_accuracy"] >= 0


@pytest.mark.parametrize("name", ["labels", "shards", "quantity", "noise", "balanced"])
def test_every_way_is_drawn(tmp_path, name):
    spec = (
        PartitionSpec("dirichlet", balanced=True) if name == "balanced" else PartitionSpec(name, min_size=1)
    )
    result = partition(LABELS, {}, spec, 5, 0)
    label_picture(label_counts(LABELS, result, 4), "abcd", result.names, tmp_path / "labels.png")
    assert (tmp_path / "labels.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_by_a_file(train, tmp_path):
    """Row numbers are the train table's, before the server takes its validation rows."""
    (tmp_path / "split.json").write_text(json.dumps([f"site{row % 2}" for row in range(160)]))
    path = f"partition.path={tmp_path / 'split.json'}"
    words = [*WORDS, "partition=file", "partition.min_size=1", path]
    assert train(*words, "num_clients=null").rows[-1]["clients"] == ["0", "1"]
    with pytest.raises(UserError, match="the file has 2 values, so set num_clients=2"):
        train(*words, "num_clients=3")
    with pytest.raises(UserError, match="names row 100, and the data set has 100"):
        train(*words, "num_clients=null", "dataset.limit=100")
    with pytest.raises(UserError, match="partition=file needs the file"):
        train(*WORDS, "partition=file")


@pytest.mark.parametrize(
    ("spec", "num_clients", "says"),
    [
        (PartitionSpec("labels", labels=5), 5, "more than the 4 classes"),
        (PartitionSpec("labels", labels=1), 3, "set partition.labels to 2 or more"),
        (PartitionSpec("labels", labels=4, min_size=1), 60, "would go to 60 clients"),
        (PartitionSpec("shards", shards=50, min_size=1), 5, "need 250 shards"),
        (PartitionSpec("labels", labels=1, min_size=26), 7, "leaves a client with 25 rows"),
    ],
)
def test_what_cannot_be_dealt_says_what_to_change(spec, num_clients, says):
    with pytest.raises(UserError) as refused:
        partition(LABELS, {}, spec, num_clients, 0)
    assert says in str(refused.value)


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


def test_a_capped_client_gets_at_most_one_class_beyond_its_share():
    labels = np.repeat(np.arange(10), 100)
    for seed in range(5):
        capped, free = (
            partition(labels, {}, PartitionSpec(alpha=0.3, capped=capped), 5, seed)
            for capped in (True, False)
        )
        assert sorted(np.concatenate(capped.indices).tolist()) == list(range(1000))
        assert max(map(len, capped.indices)) <= 200 + 100
        assert "capped" in capped.note and "capped" not in free.note
    with pytest.raises(UserError, match="has nothing to cut"):
        partition(labels, {}, PartitionSpec(balanced=True, capped=True), 5, 0)
