"""Curves and the log-rank test of four sites against lifelines and scikit-survival on the pooled rows."""

import json
from pathlib import Path

import numpy as np
import pytest
from sksurv.nonparametric import kaplan_meier_estimator

from fedfrozen_app.survival.counts import Counts, add, count, without_noise_below_zero
from fedfrozen_app.survival.estimates import curves, log_rank
from fedfrozen_app.survival.people import Columns, People, read_people
from fedfrozen_app.survival.time_edges import edges_every, rounded_up
from tests.survival.drawn import SITES, study

REFERENCE = json.loads((Path(__file__).parent / "lifelines.json").read_text("utf-8"))
COLUMNS = Columns("time", "event", "arm", ("0", "1"), ("age", "marker", "arm"))


def sites(seed: int) -> list[People]:
    rows = study(seed)
    return [
        read_people({k: v[rows["site"] == site] for k, v in rows.items()}, COLUMNS)
        for site in range(len(SITES))
    ]


def counts_of(parts: list[People]) -> Counts:
    return add([count(part, np.unique(part.time), 2) for part in parts])


@pytest.mark.parametrize("seed", range(6))
def test_sites_together_are_lifelines_on_the_pooled_rows(seed):
    found, known = counts_of(sites(seed)), REFERENCE["curves"][seed]
    (curve,) = curves(found.all_groups())
    assert curve.times.tolist() == known["times"][1:]  # lifelines begins with 0
    low, high = curve.interval
    inside = curve.survival < 1  # before the first event lifelines gives 1 too, but for the first row
    for own, theirs in ((curve.survival, "survival"), (curve.hazard, "hazard")):
        np.testing.assert_allclose(own, known[theirs][1:], rtol=0, atol=1e-12)
    for own, theirs in ((low, "low"), (high, "high")):
        np.testing.assert_allclose(own[inside], np.array(known[theirs])[1:][inside], rtol=0, atol=1e-12)
    assert curve.quantile() == known["median"]
    test = log_rank(found)
    assert [test.statistic, test.p] == pytest.approx(known["log_rank"], rel=0, abs=1e-12)
    assert test.degrees == 1 and sum(test.observed) == pytest.approx(sum(test.expected))


@pytest.mark.parametrize("seed", range(6))
def test_edges_give_what_the_pooled_rows_give_with_times_rounded_up(seed):
    edges, rows = edges_every(20, 90), study(seed)
    assert edges == (0, 20, 40, 60, 80, 90)
    parts = [rounded_up(part, edges) for part in sites(seed)]
    found = add([count(part, np.array(edges[1:]), 2) for part in parts])
    inside = rows["time"] <= 90
    time = np.array(edges)[np.maximum(np.searchsorted(edges, np.minimum(rows["time"], 90)), 1)]
    times, survival = kaplan_meier_estimator((rows["event"] == 1) & inside, time)
    (curve,) = curves(found.all_groups())
    np.testing.assert_allclose([curve.at(one)[0] for one in times], survival, rtol=0, atol=1e-12)
    assert curve.at_risk[0] == len(rows["time"])


def test_a_time_on_an_edge_ends_its_interval_and_longer_ones_are_censored_at_the_last():
    people = People(
        np.array([0.0, 10, 10.5, 30, 31]), np.ones(5, bool), np.zeros(5, int), np.zeros((5, 0)), np.arange(5)
    )
    found = rounded_up(people, (0, 10, 20, 30))
    assert found.time.tolist() == [10, 10, 20, 30, 30]
    assert found.event.tolist() == [True, True, True, True, False]


def test_noise_below_zero_is_mended_and_the_people_at_risk_never_increase():
    draw = np.random.default_rng(0)
    noisy = Counts(np.arange(30.0), draw.integers(-9, 12, (2, 30)), draw.integers(-9, 12, (2, 30)))
    found = without_noise_below_zero(noisy)
    assert found.events.min() >= 0 and found.censored.min() >= 0
    assert (np.diff(found.at_risk, axis=1) <= 1e-9).all()
    np.testing.assert_allclose(found.people, noisy.people)
    assert without_noise_below_zero(found).events == pytest.approx(found.events)
    nothing = without_noise_below_zero(Counts(np.arange(2.0), np.full((1, 2), -3), np.zeros((1, 2))))
    assert not nothing.people.any()


def test_groups_that_never_overlap_are_not_compared():
    found = Counts(np.array([1.0, 2.0]), np.array([[3.0, 0], [0, 0]]), np.array([[0.0, 0], [0, 0]]))
    assert log_rank(found) is None
