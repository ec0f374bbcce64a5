"""The numbers: scipy's on stored arrays, Holm's by hand, and the claims that they must and must not make."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedfrozen_app.report.compare.baseline import corrected
from fedfrozen_app.report.compare.statistics import holm, paired, smallest_wilcoxon, spread
from tests.conftest import slowly

# Final accuracies of two methods over ten seeds.
ONE = [0.912, 0.905, 0.921, 0.899, 0.917, 0.908, 0.926, 0.903, 0.911, 0.919]
TWO = [0.907, 0.909, 0.913, 0.894, 0.918, 0.899, 0.915, 0.901, 0.904, 0.912]


def by_seed(values):
    return dict(enumerate(values))


def test_a_spread_is_numpys_and_scipys():
    found = spread(by_seed(ONE))
    assert found.mean == pytest.approx(np.mean(ONE), abs=1e-15)
    assert found.std == pytest.approx(np.std(ONE, ddof=1), rel=1e-12)
    expected = stats.ttest_1samp(ONE, 0).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-12)
    assert found.low < found.mean < found.high


@pytest.mark.parametrize("seeds", [3, 10, *slowly(2, 5)])
def test_an_interval_covers_the_truth_as_often_as_it_says(seeds):
    """A bootstrap of so few covers it in 50, 75, 83 and 90 of 100."""
    draws = np.random.default_rng(seeds).standard_normal((2000, seeds))
    found = [spread(by_seed(row.tolist())) for row in draws]
    covered = sum(one.low <= 0 <= one.high for one in found) / len(found)
    assert 0.93 < covered < 0.97


def test_one_seed_has_no_spread_and_equal_seeds_have_none_to_show():
    alone = spread({3: 0.9})
    assert (alone.mean, alone.std, alone.low, alone.high) == (0.9, None, None, None)
    equal = spread(by_seed([0.5, 0.5, 0.5]))
    assert (equal.std, equal.low, equal.high) == (0.0, 0.5, 0.5)


def test_paired_tests_are_scipys():
    test = paired(by_seed(ONE), by_seed(TWO), "two")
    assert test.t == stats.ttest_rel(ONE, TWO).pvalue
    assert test.wilcoxon == stats.wilcoxon(ONE, TWO).pvalue
    differences = np.subtract(ONE, TWO)
    assert test.difference == pytest.approx(differences.mean())
    assert test.effect == pytest.approx(differences.mean() / differences.std(ddof=1))


def test_only_shared_seeds_are_paired():
    test = paired({0: 0.5, 1: 0.6, 2: 0.7, 9: 0.1}, {1: 0.5, 2: 0.5, 3: 0.9}, "base")
    assert test.seeds == [1, 2]
    assert test.difference == pytest.approx(0.15)
    assert test.t is None and test.verdict == "too few seeds"


def test_no_shared_seed_at_all():
    test = paired({0: 0.5}, {1: 0.5}, "base")
    assert test.seeds == [] and math.isnan(test.difference) and test.verdict == "too few seeds"


def test_holm_by_hand():
    # Sorted: 0.01·4 = 0.04, 0.02·3 = 0.06, 0.03·2 = 0.06, 0.04·1 = 0.04 -> not below 0.06.
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.6]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_is_never_smaller_and_keeps_the_order(pvalues):
    corrected = holm(pvalues)
    assert all(old <= new <= 1 for old, new in zip(pvalues, corrected, strict=True))
    pairs = sorted(zip(pvalues, corrected, strict=True))
    assert all(one[1] <= other[1] for one, other in pairwise(pairs))
    assert min(corrected) == pytest.approx(min(1.0, len(pvalues) * min(pvalues)))


def test_a_baseline_against_itself_shows_nothing():
    (test,) = corrected({"again": paired(by_seed(ONE), by_seed(ONE), "base")}).values()
    assert (test.difference, test.effect, test.t_holm, test.wilcoxon_holm) == (0, 0, 1, 1)
    assert test.verdict == "no difference shown"


def test_a_planted_gain_of_two_points_over_ten_seeds_is_found():
    """Against noise of one point a seed, and beside four groups that gain nothing."""
    generator = np.random.default_rng(1)
    base = by_seed(0.9 + 0.01 * generator.standard_normal(10))
    tests = {
        name: paired(
            {seed: value + gain + 0.01 * generator.standard_normal() for seed, value in base.items()},
            base,
            "base",
        )
        for name, gain in [("planted", 0.02), *((f"nothing {n}", 0.0) for n in range(4))]
    }
    found = corrected(tests)
    assert found["planted"].verdict == "better"
    assert found["planted"].wilcoxon_holm < 0.05
    assert {found[f"nothing {n}"].verdict for n in range(4)} == {"no difference shown"}


@pytest.mark.slow
def test_false_alarms_are_as_rare_as_promised():
    """Holm over five groups without any gain: some alarm in at most about 5 % of 150 experiments."""
    generator = np.random.default_rng(2)
    alarms = 0
    for _ in range(150):
        base = by_seed(generator.standard_normal(8))
        groups = {n: by_seed(generator.standard_normal(8)) for n in range(5)}
        tests = {str(n): paired(values, base, "base") for n, values in groups.items()}
        alarms += any(test.t_holm < 0.05 for test in corrected(tests).values())
    assert alarms / 150 < 0.09


def test_a_gain_without_any_noise():
    """Five equal differences are what rounding to few test rows gives: no proof, though t's p is zero."""
    test = paired(by_seed([1.0, 2.0, 3.0, 4.0, 5.0]), by_seed([0.0, 1.0, 2.0, 3.0, 4.0]), "base")
    assert test.effect == math.inf
    assert test.t == test.wilcoxon == smallest_wilcoxon(5, 1) == 0.0625
    (judged,) = corrected({"shifted": test}).values()
    assert judged.verdict == "no difference shown"
