"""The controls: equal budgets, comparable warm-ups, paired verdicts."""

import json
from dataclasses import replace

import pytest
import torch

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.theory import command as theory_command
from fedfrozen_app.theory import explanations, figures
from fedfrozen_app.theory.controls import Control, Sweep, calm, controls, estimate, record, sweep, sweep_one
from fedfrozen_app.theory.descent import explore, freeze, walk
from fedfrozen_app.theory.problem import Setting, make
from fedfrozen_app.theory.studies import BUDGET, SHARES, grid

TINY = Setting(clients=2, sequences=2, tokens=3, width=3, rank=1, outputs=2, rounds=10, local_steps=2)


def test_the_grid_by_hand():
    assert list(grid(150)) == [*(f"{share} %" for share in SHARES), "last", "never"]
    assert list(grid(150).values()) == [0, 3, 8, 15, 30, 75, 120, 149, 150]
    assert list(grid(60).values()) == [0, 1, 3, 6, 12, 30, 48, 59, 60]


def test_budgets_are_equal():
    lines = [line.setting for line in controls() if line.group == "budget"]
    assert len({setting.local_steps for setting in lines}) == len(lines) == 5
    assert all(setting.local_steps * setting.rounds == BUDGET for setting in lines)


def test_one_client_does_not_care_how_its_steps_are_split():
    """Without others to be averaged with, a round is only a pause."""
    ends = []
    for steps in (1, 3, 12):
        problem = make(replace(TINY, clients=1, local_steps=steps, rounds=12 // steps), (0, 1))
        ends.append(walk(problem).kernel[:, -1])
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(ends[0], ends[2], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("other", [{}, {"lr_schedule": "cosine"}, {"feature_map": "softmax"}])
def test_a_sweep_is_the_whole_study_at_fewer_places(other):
    setting = replace(TINY, **other)
    found, whole = sweep([setting], range(4))[setting], explore([setting], range(4))[setting]
    torch.testing.assert_close(found.final, whole.final[:, list(grid(10).values())], rtol=1e-12, atol=0)
    torch.testing.assert_close(found.late, whole.measures.objective[:, 8], rtol=1e-12, atol=0)
    assert (found.chosen >= 0).all() and (found.chosen <= 10).all()


def test_every_seed_is_frozen_where_auto_says(monkeypatch):
    monkeypatch.setattr("fedfrozen_app.theory.controls.auto_stops", lambda *_: [7, None, 4])
    found = sweep_one(TINY, (0, 1, 2))
    problem = make(TINY, (0, 1, 2))
    expected = freeze(problem, walk(problem), [7, 10, 4])[..., -1].diagonal()
    assert found.chosen.tolist() == [7, 10, 4]
    torch.testing.assert_close(found.auto, expected, rtol=1e-12, atol=0)


def test_the_verdict_by_hand():
    """The first half of the seeds likes 50 %, the other 80 %: the choice is made before it is judged."""
    final = torch.ones(4, 9, dtype=torch.float64)
    final[:, 0] = 2  # frozen from the start
    final[:2, 5], final[2:, 6] = 0.5, 0.5
    final[2, 5], final[3, 5] = 1.1, 1.3
    auto = torch.tensor([1.0, 1.0, 0.9, 0.7], dtype=torch.float64)
    found = Sweep(final, torch.full((4,), 1.1, dtype=torch.float64), torch.tensor([10, 10, 8, 8]), auto)
    line = record(Control("g", "l", TINY), found)
    assert line["best"] == "50 %"
    assert line["best_against_never"][0] == pytest.approx(0.2)
    assert line["against_never"]["50 %"][0] == pytest.approx(-0.15)
    assert line["auto_regret"] == pytest.approx((0.8 - 1.2) / 1.5)
    assert line["auto_behind_never"] == pytest.approx(-0.2 / 1.5)
    assert line["still_falls"] == pytest.approx(0.1) and line["auto_never_froze"] == 0.5
    decayed = replace(TINY, lr_schedule="cosine")
    lines = [Control("rate", "a", TINY), Control("rate", "b", decayed)]
    (row,) = calm(lines, {TINY: found, decayed: replace(found, final=final - 0.3)})
    assert row["label"] == "a" and row["difference"][0] == pytest.approx(0.7 - 1.2)


def test_the_study_leaves_its_page(tmp_path, monkeypatch):
    lines = [Control("rate", "a", TINY), Control("rate", "b", replace(TINY, lr_schedule="cosine"))]
    monkeypatch.setattr(theory_command, "controls", lambda: lines)
    monkeypatch.setattr(explanations, "CONTROL_SECTIONS", {"rate": ("One of four", "It is enough here.")})
    monkeypatch.setattr(figures, "DPI", 20)  # nobody looks at it
    assert command(["theory", "study=controls", "seeds=4", f"hydra.run.dir={tmp_path}"]) == 0
    written = json.loads((tmp_path / "controls.json").read_text())
    assert [line["label"] for line in written["lines"]] == ["a", "b"] and len(written["calm"]) == 1
    assert "One of four" in (tmp_path / "controls.html").read_text() and (tmp_path / "rate.png").is_file()


def test_every_group_has_its_section():
    assert {line.group for line in controls()} == set(explanations.CONTROL_SECTIONS)


# The claims of the page ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_rate_that_decays_does_better_than_any_freeze():
    lines = [line for line in controls() if line.group == "rate"]
    constant, cosine = (sweep([line.setting], range(12))[line.setting].final.mean(0) for line in lines)
    assert constant.min() < constant[-1] - 0.01  # freezing pays where the rate stays
    assert cosine[-1] < constant.min() - 0.01


@pytest.mark.slow
def test_the_steps_in_all_decide_whether_a_freeze_gains():
    """With the same local steps: in few rounds the model has not learned yet, and freezing costs."""
    (whole,) = (line.setting for line in controls() if line.label == "20 x 300")
    late = list(grid(100)).index("80 %")
    for setting, sign in ((replace(whole, rounds=60), 1), (whole, -1)):
        final = sweep([setting], range(20))[setting].final
        mean, low, high = estimate(final[:, late] - final[:, -1])
        assert sign * mean > 0 and low * high > 0, (mean, low, high)
