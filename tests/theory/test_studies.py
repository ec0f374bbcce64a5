"""The claims of the theory page, on means over seeds and with a margin."""

import json
from io import StringIO

import hydra
import pytest
import torch
from rich.console import Console

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.core.conf_files import conf_dir
from fedfrozen_app.theory import descent
from fedfrozen_app.theory.accuracy import evaluate
from fedfrozen_app.theory.command import SEEDS, read
from fedfrozen_app.theory.descent import explore, freeze, objective, split, walk
from fedfrozen_app.theory.figures import accuracies
from fedfrozen_app.theory.problem import Setting, make
from fedfrozen_app.theory.studies import (
    REFERENCE,
    SWITCH,
    TABLE_WARMUPS,
    band,
    check_table,
    evaluate_auto,
    table_settings,
)

MARGIN = 0.03


@pytest.fixture(scope="module")
def apart():
    """Heterogeneity 1, 40 local steps: the problem, and the walk that never freezes."""
    problem = make(Setting(), (0, 1, 2))
    return problem, walk(problem)


@pytest.mark.slow
def test_clients_apart_have_an_interior_optimum(apart):
    problem, walked = apart
    early, middle, never = freeze(problem, walked, [5, 60, 150])[..., -1].mean(0)
    assert middle < never - MARGIN and middle < early - MARGIN


@pytest.mark.slow
def test_freezing_the_value_instead_is_worse(apart):
    problem, walked = apart
    kernel = freeze(problem, walked, [SWITCH])[:, 0, -1].mean()
    value = objective(problem, walk(problem, start=SWITCH, origin=walked, train="kernel"))[:, -1].mean()
    assert kernel < value - MARGIN


@pytest.mark.slow
def test_clients_alike_never_freeze():
    problem = make(Setting(heterogeneity=0, local_steps=10), (0, 1, 2))
    finals = freeze(problem, walk(problem), [0, 5, 15, 40, 80, 120, 150])[..., -1].mean(0)
    assert (finals[:-1] > finals[-1] + MARGIN).all()
    assert (finals.diff() < 0).all()


def test_seeds_are_the_same_alone_and_together():
    setting = Setting(rounds=3, local_steps=2, participation=0.5)
    together = explore([setting], range(5))[setting]
    alone = explore([setting], [3])[setting]
    torch.testing.assert_close(together.curves[3:4], alone.curves, rtol=1e-12, atol=0)
    assert split(range(10), 8) == [(0, 1), (2, 3, 4), (5, 6, 7), (8, 9)]
    assert split(range(3), 100) == [(0,), (1,), (2,)]


def test_the_reference_shows_what_it_is_said_to_show():
    assert all(len(row) == len(TABLE_WARMUPS) for row in REFERENCE.values())
    assert min(REFERENCE[0.0, 10]) == REFERENCE[0.0, 10][-1]
    assert min(REFERENCE[1.0, 40]) == REFERENCE[1.0, 40][4]


@pytest.mark.slow
def test_the_whole_table_and_auto():
    outcomes = explore(table_settings().values(), range(SEEDS["table"]))
    check = check_table(outcomes)
    assert check.passed and check.compared > 60, check.wrong
    for verdict in evaluate_auto(outcomes):
        assert verdict.passed, verdict


# The command ---------------------------------------------------------------------------------------------

SHORT = ["rounds=6", "local_steps=3", "seeds=2", "sequences=4"]


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_one_run_logs_what_the_page_shows(tmp_path):
    assert command(["theory", *SHORT, "warmup_rounds=2", f"hydra.run.dir={tmp_path}"]) == 0
    rows = rows_of(tmp_path)
    assert [row["round"] for row in rows] == list(range(7))
    for key in ("objective", "profile", "slope", "kernel_drift", "value_drift", "value_gap"):
        assert all(isinstance(row[key], float) for row in rows)
    assert all(row["kernel_drift"] > 0 for row in rows[1:3])
    assert all(row["kernel_drift"] == 0 and row["value_drift"] > 0 for row in rows[3:])
    assert len({row["profile"] for row in rows[2:]}) == 1  # the kernel stays
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["final_objective"] == pytest.approx(rows[-1]["objective"])
    problem = make(Setting(rounds=6, local_steps=3, sequences=4), (0, 1))
    expected = freeze(problem, walk(problem), [2])[:, 0, -1]
    assert summary["final_objective_by_seed"] == pytest.approx(expected.tolist(), rel=1e-10)


def test_a_multirun(tmp_path):
    words = ["theory", "-m", *SHORT, "heterogeneity=0,1", "warmup_rounds=auto", f"hydra.sweep.dir={tmp_path}"]
    assert command(words) == 0
    finals = [json.loads((tmp_path / n / "summary.json").read_text())["setting"] for n in ("0", "1")]
    assert [setting["heterogeneity"] for setting in finals] == [0.0, 1.0]


def test_a_long_study_shows_a_bar_where_somebody_looks_on(monkeypatch):
    for looks_on in (True, False):
        said = StringIO()
        console = Console(file=said, force_terminal=looks_on)
        monkeypatch.setattr(descent, "Console", lambda console=console, **settings: console)
        assert list(descent.shown(iter("ab"), 2)) == ["a", "b"]
        assert ("walking" in said.getvalue() and "100%" in said.getvalue()) == looks_on


@pytest.mark.parametrize(
    ("words", "seeds"), [([], 3), (["study=table"], 10), (["study=controls"], 100), (["seeds=5"], 5)]
)
def test_a_look_is_quick_and_what_is_judged_has_ten_seeds(words, seeds):
    with hydra.initialize_config_dir(str(conf_dir()), version_base=None):
        config = read(hydra.compose("theory", overrides=words))
    assert config.seeds == seeds


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["study=none"], "study=none is unknown: choose one of run, table, all, controls."),
        (["feature_map=exp"], "feature_map=exp is unknown"),
        (["warmup_rounds=200"], "warmup_rounds=200 must be auto, null, or lie between 0 and rounds=150."),
        (["clients=0"], "clients=0 must be at least 1."),
        (["cliens=3"], "There is no key 'cliens'"),
        (["lr=fast"], "lr"),
        (["study=all", "seeds=3"], "seeds=3 is too few"),
        (["study=controls", "seeds=3"], "seeds=3 is too few"),
    ],
)
def test_bad_input(words, told, capsys, tmp_path):
    assert command(["theory", *words, f"hydra.run.dir={tmp_path}"]) == 2
    assert told in capsys.readouterr().err


# Accuracies ----------------------------------------------------------------------------------------------


def test_the_verdict_on_accuracies_by_hand():
    cells = [
        {"setting": "s", "warmup": label, "seed": seed, "score": score, "freeze_after": 7}
        for label, first, later in (
            ("0 %", 0.5, 0.9),
            ("50 %", 0.8, 0.7),
            ("100 %", 0.7, 0.72),
            ("auto", 0.1, 0.69),
        )
        for seed, score in [(n, first) for n in range(5)] + [(n, later) for n in range(5, 10)]
    ]
    (verdict,) = evaluate(cells)
    assert verdict.best == "50 %"  # by seeds 0 to 4, whatever the others say
    assert verdict.regret == pytest.approx(1.0) and verdict.behind_never == pytest.approx(3.0)
    assert not verdict.passed and verdict.stops == [7] * 10


def test_a_band_of_three_seeds_is_as_wide_as_student_says():
    mean, low, high = band(torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64))
    # 97.5 % of Student's t with two degrees of freedom lies below 4.3027.
    assert (mean.item(), high.item() - 2) == pytest.approx((2.0, 4.3027 / 3**0.5), abs=1e-4)
    assert low.item() == pytest.approx(4 - high.item())


def test_every_study_of_real_models_has_its_picture(tmp_path):
    scores = {"s": {label: {0: 0.5, 1: 0.6, 2: 0.7} for label in ("0 %", "50 %", "100 %", "auto")}}
    for study in ("digits", "layers", "cifar10"):
        accuracies(study, scores, tmp_path / f"{study}.png")
        assert (tmp_path / f"{study}.png").read_bytes().startswith(b"\x89PNG")
