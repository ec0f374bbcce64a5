"""The C-index and the Brier score against lifelines and scikit-survival on drawn studies."""

import json
import time as clock
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sksurv.linear_model import CoxPHSurvivalAnalysis
from sksurv.metrics import concordance_index_censored
from sksurv.metrics import integrated_brier_score as reference_brier
from sksurv.util import Surv

from fedfrozen_app.tasks.survival_scores import harrell_c, integrated_brier
from fedfrozen_app.tasks.target import target_of
from tests.conftest import slowly
from tests.survival.drawn import CASES, study

REFERENCE = json.loads((Path(__file__).parent / "lifelines.json").read_text("utf-8"))


def test_the_c_index_is_lifelines_and_scikit_survivals_on_all_drawn_studies():
    assert len(REFERENCE["concordance"]) == CASES == 200
    for seed in range(CASES):
        rows = study(seed)
        risk = rows["marker"].round(1)  # with ties
        found = harrell_c(rows["time"], rows["event"], risk)
        assert found == pytest.approx(REFERENCE["concordance"][seed], abs=1e-12)
        if seed % 2:  # scikit-survival counts two events at one time, of unlike risk, differently
            theirs = concordance_index_censored(rows["event"] == 1, rows["time"], risk, tied_tol=0)[0]
            assert found == pytest.approx(theirs, abs=1e-12)


def test_it_counts_pairs_as_one_would_by_hand():
    time, event, risk = [1, 2, 2, 2, 3], [1, 1, 1, 0, 0], [5, 4, 1, 4, 4]
    # 1 against all four: 4 right. The events at 2 against those censored at 2 and 3: tied, and wrong.
    assert harrell_c(time, event, risk) == (4 + 0.5 + 0 + 0.5 + 0) / 8
    assert np.isnan(harrell_c([1, 2], [0, 0], [1, 2])) and np.isnan(harrell_c([], [], []))
    with pytest.raises(ValueError, match="not of one length"):
        harrell_c([1, 2], [1], [1, 2])
    with pytest.raises(ValueError, match="not a finite number"):
        harrell_c([1, 2], [1, 1], [1, np.nan])


def test_a_hundred_thousand_people_take_no_quadratic_time():
    draw = np.random.default_rng(0)
    began = clock.process_time()
    found = harrell_c(
        draw.integers(0, 3000, 100_000), draw.integers(0, 2, 100_000), draw.normal(size=100_000)
    )
    assert found == pytest.approx(0.5, abs=0.01)
    assert clock.process_time() - began < 20  # all pairs would take minutes


@pytest.mark.parametrize("first", range(0, CASES, 50))
def test_the_integrated_brier_score_is_scikit_survivals(first):
    for seed in range(first, first + 50):
        rows = study(seed)
        values = np.stack([rows["age"], rows["marker"], rows["arm"]], axis=1)
        event, time = rows["event"] == 1, rows["time"]
        train = np.arange(len(time)) % 3 != 0
        train |= time >= np.sort(time[train])[-1]  # the reference knows no censoring beyond the train rows
        known = Surv.from_arrays(event, time)
        times = np.quantile(np.unique(time[~train]), [0.1, 0.3, 0.5, 0.7, 0.85])
        times = np.unique(times)
        fit = CoxPHSurvivalAnalysis(alpha=1e-6).fit(values[train], known[train])
        curves = np.stack(
            [curve(np.minimum(times, curve.x[-1])) for curve in fit.predict_survival_function(values[~train])]
        )
        theirs = reference_brier(known[train], known[~train], curves, times)
        own = integrated_brier(time[train], event[train], time[~train], event[~train], curves, times)
        assert own == pytest.approx(theirs, abs=1e-12), seed


@pytest.mark.parametrize("first", [0, *slowly(100)])
def test_a_cox_run_s_brier_score_of_a_site_is_scikit_survivals(first):
    """Its risks, with Breslow's baseline hazard of the train rows; of whom is followed beyond the last time
    the same is known as of whom is followed up to it."""
    target = target_of("survival")
    for seed in range(first, first + 100):
        rows = study(seed)
        values = np.stack([rows["age"], rows["marker"], rows["arm"]], axis=1)
        event, time = rows["event"] == 1, rows["time"]
        train = np.arange(len(time)) % 3 != 0
        train |= time >= np.sort(time[train])[-1]
        known = Surv.from_arrays(event, time)
        fit = CoxPHSurvivalAnalysis(alpha=1e-6).fit(values[train], known[train])
        labels = torch.tensor(np.stack([time, event], axis=1))
        logits = torch.tensor(fit.predict(values))[:, None]
        reference = target.reference(logits[train], labels[train])
        assert reference.times[-1] <= np.quantile(time[train & event], 0.9)
        span = (reference.times >= time[~train].min()) & (reference.times < time[~train].max())
        reference = replace(reference, times=reference.times[span], hazard=reference.hazard[span])
        curves = np.stack([curve(reference.times) for curve in fit.predict_survival_function(values[~train])])
        theirs = reference_brier(known[train], known[~train], curves, reference.times)
        own = target.site_scores(logits[~train], labels[~train], reference)["brier"]
        assert own == pytest.approx(theirs, abs=1e-12), seed


def test_the_brier_score_of_a_discrete_model_by_hand():
    """Nobody is censored, and hazards are one half: 0.5 are left at 1, 0.375 at 1.5, 0.25 at 2."""
    target = target_of("survival_discrete", {"edges": [1.0, 2.0]})
    labels = torch.tensor([[1.0, 1], [2.0, 1], [1.5, 1], [2.0, 1]], dtype=torch.float64)
    reference = replace(target.reference(None, labels), times=np.array([1.0, 1.5, 2.0]))
    found = target.site_scores(torch.zeros(2, 2), labels[[0, 1]], reference)
    # At 1: one is gone (0.5²), one is there (0.5²). At 1.5: 0.375² and 0.625². At 2: both gone, 0.25².
    by_time = [0.25, (0.375**2 + 0.625**2) / 2, 0.0625]
    assert found["brier"] == pytest.approx((by_time[0] + 2 * by_time[1] + by_time[2]) / 4, abs=1e-12)


def test_a_cox_model_without_a_baseline_has_no_brier_score():
    target = target_of("survival")
    labels = torch.tensor([[1.0, 1], [2.0, 1], [3.0, 0]], dtype=torch.float64)
    reference = target.reference(None, labels)
    assert reference.hazard is None and target.site_scores(torch.zeros(3, 1), labels, reference) == {}
    assert target.reference(None, labels[2:]) is None  # no event: no time to score at


def test_scores_of_unsound_input_are_refused():
    sound = {"train_time": [1, 2, 3], "train_event": [1, 0, 1], "time": [1, 2, 3], "event": [1, 1, 0]}
    with pytest.raises(ValueError, match="must increase"):
        integrated_brier(**sound, survival=np.ones((3, 2)), times=[2, 1])
    with pytest.raises(ValueError, match="one row a person"):
        integrated_brier(**sound, survival=np.ones((2, 2)), times=[1, 2])
    with pytest.raises(ValueError, match="must lie in"):
        integrated_brier(**sound, survival=np.ones((3, 2)), times=[1, 3])
