"""What the studies of many cells share: figures, paired differences, lines."""

import math

import numpy as np
import pytest
from scipy import stats


def test_scores_by_hand(cells):
    values = [0.1, 0.2, 0.3, 0.5, 0.4, 0.6, 0.5, 0.6]
    found = cells.scores(values)
    assert found["score"] == pytest.approx((0.5 + 0.4 + 0.6 + 0.5 + 0.6) / 5)
    assert found["final"] == 0.6 and found["worst_drop"] == pytest.approx(0.1)
    assert found["swing"] == pytest.approx(math.sqrt((0.04 + 0.01 + 0.01) / 3 / 2), abs=1e-5)
    assert found["rise"] == pytest.approx(0.55 - 0.5)


def test_paired_differences_by_hand(cells):
    ours, theirs = {0: 3.0, 1: 5.0, 2: 4.0, 7: 99.0}, {0: 2.0, 1: 2.0, 2: 2.0, 8: 0.0}
    found = cells.paired(ours, theirs)
    assert (found.seeds, found.mean) == (3, 2.0)
    assert found.half == pytest.approx(4.303 * 1 / math.sqrt(3), abs=1e-3)  # Student's t with 2 degrees
    assert found.p == pytest.approx(stats.ttest_rel([3, 5, 4], [2, 2, 2]).pvalue)
    assert str(found) == "+2.0 ± 2.5"
    assert str(cells.paired({0: 3.0}, {0: 2.0})) == "+1.0" and cells.paired({0: 3.0}, {1: 2.0}) is None
    assert cells.paired({0: 1.0, 1: 1.0}, {0: 0.5, 1: 0.5}).p == 1.0  # equal differences are no evidence


def test_classes_a_client(cells):
    one, two = np.array([1, 1]), np.array([0, 1, 0, 1, 2, 3, 2, 3])
    assert cells.classes_per_client([one]) == 1.0
    assert cells.classes_per_client([one, two]) == pytest.approx((2 * 1 + 8 * 4) / 10)


def test_merging_takes_each_cell_once(cells, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    row = {"setting": "a", "seed": 0, "method": "never", "lr": 0.1}
    cells.append(here / "tiny.jsonl", row | {"score": 1})
    cells.append(there / "tiny.jsonl", row | {"score": 2})
    cells.append(there / "tiny.jsonl", row | {"seed": 1})
    for _ in range(2):
        cells.merge(here, [there], lambda a, b: a["seed"] == b["seed"])
    assert [r["seed"] for r in cells.read(here / "tiny.jsonl")] == [0, 1]
    assert cells.read(here / "tiny.jsonl")[0]["score"] == 1
