"""Calibration with noise: its size is the stated one, a row changes one count by 1, and sets still cover."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.calibration import private_quantile as module
from fedfrozen_app.calibration.calibrate import private_rule
from fedfrozen_app.calibration.calibration_rows import Part
from fedfrozen_app.calibration.masked_sum import plain_sum
from fedfrozen_app.calibration.private_quantile import STEPS, private_quantile
from fedfrozen_app.core.errors import UserError
from tests.calibration.test_calibration import WORDS, digits, drawn
from tests.conftest import SMALL

__all__ = ["digits"]  # a fixture


def test_almost_without_noise_it_is_the_quantile(monkeypatch):
    scores = np.random.default_rng(0).random(999)
    found = private_quantile(0.9, np.array_split(scores, 7), 1e6)
    exact = np.sort(scores)[math.ceil(1000 * 0.9) - 1]
    assert exact <= found.value < exact + 2**-STEPS and found.numbers == 999 and found.deviation < 1e-9


def test_each_step_spends_its_share_and_asks_for_two_counts(monkeypatch):
    asked = []

    def geometric(count, epsilon, stream):
        asked.append((count, epsilon))
        return np.zeros(count, dtype=np.int64)

    monkeypatch.setattr(module, "geometric", geometric)
    sums = []
    private_quantile(0.9, [np.full(5, 0.25), np.full(3, 0.5)], 2.0, lambda p: sums.append(p) or plain_sum(p))
    assert asked == [(2, 2.0 / STEPS)] * STEPS * 2
    assert len(sums) == STEPS and sums[0][0].tolist() == [5, 0]
    # Without one row, one of the two numbers is less by one.
    for scores in (np.array([0.2, 0.7]), np.array([0.2, 0.7, 0.71])):
        sums.append([module._noised(scores, 0.5, 2.0, None)])
    assert [np.abs(a[0] - b[0]).sum() for a, b in pairwise(sums[-2:])] == [1]


def test_the_noise_has_the_stated_deviation():
    scores = np.linspace(0, 1, 400)
    noised = [
        module._noised(scores, 0.5, 10.0, stream) for stream in [module.Keystream()] for _ in range(4000)
    ]
    off = np.array(noised) - [200, 200]
    stated = module.spread(10.0, STEPS)
    assert (
        off.std(axis=0) == pytest.approx([stated, stated], rel=0.1) and np.abs(off.mean(axis=0)).max() < 0.15
    )
    found = private_quantile(0.9, np.array_split(scores, 4), 10.0)
    assert found.deviation == pytest.approx(stated * math.sqrt(4 * 0.82) / 400, rel=0.1)


def test_sets_with_noise_cover_over_twenty_drawn_splits(digits):
    logits, labels = digits
    shares = []
    for seed in range(20):
        parts, rest = drawn(logits, labels, seed)
        rule, noise = private_rule(parts, 0.9, 16.0)
        assert rule.temperature == 1.0 and noise.deviation < 0.02
        shares.append(np.mean(rule.scores(logits[rest], labels[rest]) <= rule.threshold))
    assert abs(np.mean(shares) - 0.9) < 0.02, shares


def test_one_row_of_each_unit_counts_and_too_much_noise_is_refused():
    logits = np.log(np.array([[0.9, 0.1]] * 6))
    part = Part("a", logits, np.zeros(6, dtype=np.int64), np.zeros(6, dtype=bool), np.arange(6) < 2)
    _, found = private_rule([part], 0.9, 1e6)
    assert found.numbers == 2
    with pytest.raises(UserError, match=r"Noise of epsilon 1 would move the coverage by \d+% and more"):
        private_rule([part], 0.9, 1.0)


@pytest.mark.slow
def test_the_command_says_what_the_noise_does(tmp_path, capsys):
    run = tmp_path / "run"
    assert command([*SMALL, *WORDS, f"output_dir={run}"]) == 0
    capsys.readouterr()
    assert command(["calibrate", str(run), "--epsilon", "40"]) == 0
    assert "With noise of epsilon 40 for each patient or document" in capsys.readouterr().out
    found = json.loads((run / "calibration.json").read_text())
    assert found["temperature"] == 1.0 and 0 < found["noise"] < 0.05 and "before" not in found
    assert "How sure it is" in (run / "report.html").read_text()
    for bad in ("0", "1000", "nan"):
        assert command(["calibrate", str(run), "--epsilon", bad]) == 2
        assert "is out of range" in capsys.readouterr().err
