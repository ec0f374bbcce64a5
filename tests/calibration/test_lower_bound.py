"""Lower bounds of a time to event: by hand, over drawn data whose true times are known, and under masks."""

import json
import math

import numpy as np
import pytest

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.calibration.calibrate import time_rule
from fedfrozen_app.calibration.calibration_rows import Part
from fedfrozen_app.calibration.lower_bound import LowerBound
from fedfrozen_app.calibration.masked_sum import MaskedSum
from fedfrozen_app.config import SecureAggregationConfig
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.tasks.time_to_event import LARGEST, Cox, DiscreteTime
from tests.conftest import slowly

EDGES = [1.0, 3.0]
NO_ROWS = np.zeros(0, dtype=bool)


def parts_of(logits, labels, count):
    rows = np.array_split(np.arange(len(labels)), count)
    return [Part(str(n), logits[own], labels[own], np.zeros(len(own), bool)) for n, own in enumerate(rows)]


def test_by_hand_of_nineteen_rows_the_second_smallest():
    """⌊(19 + 1) · 0.1⌋ = 2; somebody of twice the hazard has half the time."""
    labels = np.array([[float(day), day % 2] for day in range(1, 20)])
    rule = time_rule(parts_of(np.zeros((19, 1)), labels, 4), 0.9, Cox())
    assert rule.threshold == 2.0
    assert rule.sizes(np.array([[0.0], [math.log(2)]])) == pytest.approx([2.0, 1.0])
    assert rule.covered(np.zeros((19, 1)), labels).sum() == 18
    assert rule.broken(np.zeros((19, 1)), labels).tolist() == [True] + [False] * 18  # an event on day 1
    labels[0, 1] = 0  # censored on day 1: nobody knows
    assert not rule.broken(np.zeros((19, 1)), labels).any()
    with pytest.raises(UserError, match=r"8 rows are too few for a coverage of 0\.9, which needs 9"):
        time_rule(parts_of(np.zeros((8, 1)), labels[:8], 2), 0.9, Cox())


def test_a_hazard_between_two_edges_by_hand():
    """Logits of 0: the hazard of an interval is log 2."""
    target, logits, one = DiscreteTime({"edges": EDGES}), np.zeros((5, 2)), math.log(2)
    found = target.hazard_until(logits, np.array([0.0, 0.5, 1.0, 2.0, 3.0]))
    assert found == pytest.approx([0.0, one / 2, one, 1.5 * one, LARGEST])
    for hazard, time in ((0.0, 0.0), (one / 2, 0.5), (one, 1.0), (1.5 * one, 2.0), (9.0, 3.0)):
        assert target.time_of_hazard(logits[:1], hazard) == pytest.approx([time])


@pytest.mark.parametrize("target", [Cox(), DiscreteTime({"edges": EDGES})], ids=["cox", "discrete"])
def test_who_is_followed_to_the_bound_is_covered_and_nobody_else(target):
    generator = np.random.default_rng(0)
    logits = generator.normal(scale=2, size=(500, target.outputs(()) if target.settings else 1))
    labels = np.stack([generator.exponential(size=500), np.ones(500)], axis=1)
    for hazard in (0.0, 0.1, 1.0, 4.0):
        rule = LowerBound(0.9, hazard, target)
        assert (rule.covered(logits, labels) == (labels[:, 0] >= rule.sizes(logits))).all()
        assert (np.diff(rule.target.time_of_hazard(logits, hazard) - rule.sizes(logits)) == 0).all()


def drawn(seed, censoring):
    """x, the true time of each event, and what was observed of it. The model has half of the true effect, and
    knows nothing of the baseline, which is not constant."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=4000)
    times = generator.weibull(1.7, size=4000) * np.exp(-x)
    ends = {
        "none": np.full(4000, np.inf),
        "independent": generator.exponential(1.5, size=4000),
        "by x": generator.exponential(np.exp(x) + 0.2),
        "just before the event": np.where(generator.random(4000) < 0.4, 0.97 * times, np.inf),
    }[censoring]
    labels = np.stack([np.minimum(times, ends), (times <= ends).astype(float)], axis=1)
    return 0.5 * x[:, None], times, labels


@pytest.mark.parametrize("censoring", ["none", "independent", "by x", "just before the event"])
@pytest.mark.parametrize("kind", ["cox", "discrete"])
def test_the_true_times_reach_their_bounds_under_any_censoring(kind, censoring):
    target = Cox() if kind == "cox" else DiscreteTime({"edges": [0.2, 0.5, 1.0, 2.0, 4.0]})
    followed, reached = [], []
    for seed in range(20):
        score, times, labels = drawn(seed, censoring)
        logits = score if kind == "cox" else score + np.array([[-2.0, -1.5, -1.0, -1.0, 0.0]])
        rule = time_rule(parts_of(logits[:1000], labels[:1000], 7), 0.9, target)
        bounds = rule.sizes(logits[1000:])
        followed.append((labels[1000:, 0] >= bounds).mean())
        reached.append((times[1000:] >= bounds).mean())
        assert bounds.mean() > 0 and bounds.std() > 0  # it says something, and not the same of everybody
        broken = rule.broken(logits[1000:], labels[1000:])
        assert (times[1000:][broken] < bounds[broken]).all()
    assert abs(np.mean(followed) - 0.9) < 0.01
    assert np.mean(reached) > 0.89 and (censoring != "none" or reached == followed)


@pytest.mark.parametrize("parts", [1, 6])
def test_a_federation_has_the_bound_of_its_rows_together(parts):
    logits, _, labels = drawn(3, "independent")
    found = time_rule(parts_of(logits[:700], labels[:700], parts), 0.9, Cox())
    together = np.sort(labels[:700, 0] * np.exp(logits[:700, 0]))
    assert found.threshold == together[math.floor(701 * 0.1 + 1e-9) - 1]  # to the bit


def test_masks_change_nothing():
    logits, _, labels = drawn(3, "by x")
    parts = [*parts_of(logits[:300], labels[:300], 4), Part("empty", logits[:0], labels[:0], NO_ROWS)]
    masked = MaskedSum([part.name for part in parts], SecureAggregationConfig(name="on", min_cohort=3))
    one, other = (time_rule(parts, 0.9, Cox(), own) for own in (masked, None))
    assert one.threshold == other.threshold > 0 and masked.done == 8


def people(path, count=500):
    generator = np.random.default_rng(1)
    age = generator.normal(size=count)
    times = 100 * generator.exponential(size=count) * np.exp(-age)
    ends = generator.exponential(200, size=count)
    rows = zip(age, np.minimum(times, ends), times <= ends, strict=True)
    path.write_text("age,days,died\n" + "".join(f"{a},{t},{int(e)}\n" for a, t, e in rows))
    return [
        *("dataset=table", f"dataset.path={path}", "dataset.task=survival", "dataset.time_column=days"),
        *("dataset.event_column=died", "model=linear", "strategy=fedavg", "num_clients=3", "num_rounds=2"),
        *("partition=iid", "baseline=false", "client.lr=0.05"),
    ]


@pytest.mark.parametrize("kind", ["cox", *slowly("discrete")])
def test_a_survival_run_gets_lower_bounds(kind, tmp_path, capsys):
    run = tmp_path / "run"
    words = [*people(tmp_path / "table.csv"), f"dataset.survival_model={kind}", f"output_dir={run}"]
    assert command([*words, "dataset.client_validation=0.4"]) == 0
    capsys.readouterr()
    assert command(["calibrate", str(run), "--coverage", "0.8"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    found = json.loads((run / "calibration.json").read_text())
    whole = found["test"]["all"]["all"]
    assert (found["kind"], found["temperature"]) == ("time", None) and found["threshold"] > 0
    assert (found["edges"] is None) == (kind == "cox")
    assert 0.6 < whole["coverage"] < 0.95 and 0 <= whole["broken"] <= 1 - whole["coverage"]
    assert "are followed to their bound or beyond" in shown and "the event does not come before" in shown
    assert set(found["test"]["client"]) == {"0", "1", "2"}
    assert "mean bound" in (run / "report.html").read_text()
    assert command(["calibrate", str(run), "--epsilon", "4"]) == 2
    assert "--epsilon is for classes" in capsys.readouterr().err
