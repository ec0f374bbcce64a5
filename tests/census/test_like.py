"""`partition=like`: clients that look like the sites of a census, tried against the census itself."""

import json
from itertools import combinations

import numpy as np
import pytest

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.partition import partition
from fedfrozen_app.data.partition_spec import PartitionSpec
from tests.census import planted
from tests.census.planted import census
from tests.conftest import slowly


def written(found: dict, folder) -> str:
    path = folder / "census.json"
    path.write_text(json.dumps(found))
    return str(path)


def skewed(seed: int = 0, sizes=(900, 400, 250, 120)) -> dict:
    """Sites of different sizes, each with a mix of its own, under a floor that hides some cells."""
    rng = np.random.default_rng(seed)
    by_site = {}
    for site, size in zip(planted.SITES, sizes, strict=True):
        rows = planted.pictures(rng, rows=size)
        mix = rng.dirichlet(np.full(len(planted.CLASSES), 0.6))
        rows.labels = [str(label) for label in rng.choice(planted.CLASSES, size, p=mix)]
        by_site[site] = rows
    return census(by_site, classes=planted.CLASSES)


def distances(counts: np.ndarray) -> list[float]:
    shares = counts / counts.sum(axis=1, keepdims=True)
    return [0.5 * float(np.abs(shares[a] - shares[b]).sum()) for a, b in combinations(range(len(shares)), 2)]


@pytest.mark.parametrize("names", [planted.CLASSES, *slowly(("w", "x", "y", "z"))])
@pytest.mark.parametrize("seed", [0, *slowly(1, 2, 3)])
def test_label_distances_are_within_a_tenth_of_the_census(tmp_path, names, seed):
    found = skewed(seed)
    labels = np.random.default_rng(9).choice(4, 12_000, p=[0.4, 0.3, 0.2, 0.1])
    spec = PartitionSpec("like", census=written(found, tmp_path), min_size=1)
    dealt = partition(labels, {}, spec, None, 0, names)
    assert dealt.names == tuple(sorted(planted.SITES))
    counts = np.array([np.bincount(labels[rows], minlength=4) for rows in dealt.indices])
    expected = list(found["distances"]["labels"].values())
    assert any(site["tables"]["classes"]["hidden"] for site in found["sites"].values()) or seed
    np.testing.assert_allclose(distances(counts), expected, rtol=0.1, atol=0.005)
    rows = np.array([site["rows"] for site in found["sites"].values()])
    np.testing.assert_allclose(counts.sum(axis=1) / counts.sum(), rows / rows.sum(), rtol=0.02)
    assert len(np.unique(np.concatenate(dealt.indices))) == counts.sum()  # nobody has a row of another
    again = partition(labels, {}, spec, None, 0, names)
    assert all(np.array_equal(one, other) for one, other in zip(dealt.indices, again.indices, strict=True))


def test_what_cannot_be_imitated_is_a_sentence(tmp_path):
    path = written(skewed(), tmp_path)
    labels = np.random.default_rng(0).choice(2, 500)
    with pytest.raises(UserError, match="4 classes and the train rows have 2"):
        partition(labels, {}, PartitionSpec("like", census=path), None, 0, ("a", "b"))
    with pytest.raises(UserError, match="set num_clients=4"):
        partition(labels, {}, PartitionSpec("like", census=path), 7, 0, ("a", "b"))
    with pytest.raises(UserError, match=r"set partition\.census"):
        partition(labels, {}, PartitionSpec("like"), None, 0, ("a", "b"))
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be read"):
        partition(labels, {}, PartitionSpec("like", census=str(tmp_path / "broken.json")), None, 0, ())


def test_from_census_to_rehearsal_through_the_command(tmp_path):
    """A census of digits by four clients; the census of its imitation has the same distances."""
    first, second = tmp_path / "first", tmp_path / "second"
    assert command(["census", f"output_dir={first}", "num_clients=4", "--floor", "3"]) == 0
    like = ["partition=like", f"partition.census={first}/census.json", "dataset.validation=0"]
    assert command(["census", f"output_dir={second}", *like, "--floor", "1"]) == 0
    one, other = (json.loads((folder / "census.json").read_text()) for folder in (first, second))
    assert list(other["sites"]) == ["0", "1", "2", "3"]
    for pair, value in one["distances"]["labels"].items():
        assert other["distances"]["labels"][pair] == pytest.approx(value, rel=0.1)
