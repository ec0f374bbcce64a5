"""The statistics of the SAFL table, by hand."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import safl


def counts(said, true, classes=2):
    """(1, notes, classes, 3) of one seed's predictions."""
    one_hot = np.eye(classes, dtype=np.int64)
    guess, real = one_hot[said], one_hot[true]
    return np.stack([guess * real, guess, real], axis=2)[None]


def test_macro_f1_and_the_majority_class():
    found = counts([0, 0, 1, 0], [0, 0, 1, 1])
    # class 0: 2·2/(3+2); class 1: 2·1/(1+2)
    assert safl.macro_f1(found.sum(axis=1)).item() == pytest.approx((4 / 5 + 2 / 3) / 2)
    floor = safl.majority(counts([0, 1, 1, 0], [0, 0, 1, 0]))
    assert safl.macro_f1(floor.sum(axis=1)).item() == pytest.approx((6 / 7 + 0) / 2)
    nothing = safl.majority(np.array([[[[2, 3, 4]]]]))  # entities: nothing is said
    assert safl.macro_f1(nothing.sum(axis=1)).item() == 0


def test_a_better_method_is_seen_and_an_equal_one_is_not():
    true = np.arange(200) % 2
    notes, seeds = safl.draws(2, 200)
    wrong = np.where(np.arange(200) % 5 == 0, 1 - true, true)  # 80 % right
    good, poor = (np.concatenate([counts(said, true)] * 2) for said in (true, wrong))
    difference = safl.resampled(good, notes, seeds) - safl.resampled(poor, notes, seeds)
    assert safl.verdict(*safl.interval(difference)) == "yes"
    same = safl.resampled(good, notes, seeds) - safl.resampled(good, notes, seeds)
    assert safl.verdict(*safl.interval(same)) == "no"  # not more than a point
    assert safl.verdict(-0.01, 0.03) == "not resolved"
