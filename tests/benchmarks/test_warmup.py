"""The warm-up benchmark's bookkeeping: what it runs, what it shares, and what it says is missing."""

import argparse
import json
import math
import sys
from pathlib import Path

import pytest

from tests.benchmarks.scripts import common
from tests.conftest import SMALL


@pytest.fixture
def warmup(monkeypatch, tmp_path):
    """The script as a module, writing its results elsewhere."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    monkeypatch.setitem(sys.modules, "common", common)
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    import warmup

    monkeypatch.setattr(warmup.output, "write_curves", lambda *args, **kwargs: None)
    monkeypatch.setattr(warmup.output, "write_report", lambda *args: None)
    monkeypatch.setattr(warmup.evaluation, "draw_labels", lambda *args: None)
    return warmup


@pytest.fixture
def options(tmp_path):
    words = [*SMALL[2:], "num_clients=3", "eval_every=1"]
    return argparse.Namespace(
        device="cpu", data=None, rounds=6, seeds=1, runs=tmp_path, cells=None, minutes=math.inf, set=words
    )


@pytest.mark.slow
def test_a_study_from_nothing_to_its_result(warmup, options, tmp_path, capsys):
    (name, seed, job), *others = warmup.jobs_of("digits", options)
    assert (name, seed, len(others)) == ("digits, Dirichlet 0.1", 0, 2)
    assert job.needs_whole()
    assert warmup.train(job, job.rounds, until=0.0) is None and job.needs_whole()  # too late to begin
    warmup.train(job, job.rounds, until=math.inf)
    # 0, 5, 10, 20, 50 % of six rounds are 0, 0, 1, 1, 3; auto decides among them.
    assert not job.needs_whole() and set(job.missing()) == {0, 1, 3, job.after()["auto"]} - {6}
    job.cells.joinpath("about.json").write_text(json.dumps({"command": "of the run"}))
    warmup.report("digits", options)
    assert "missing: digits, Dirichlet 0.1, seed 0: 0 %" in capsys.readouterr().out
    for after in job.missing():
        warmup.train(job, after, until=math.inf)
    assert not job.missing() and job.cell(3)["after"] == 3
    warmup.report("digits", options)
    result = json.loads((tmp_path / "results" / "warmup_digits.json").read_text())
    assert result["command"] == "of the run"
    assert [cell["warmup"] for cell in result["cells"]] == list(warmup.LABELS)
    assert [cell["freeze_after"] for cell in result["cells"]][:6] == [0, 0, 1, 1, 3, None]
    assert len(result["missing"]) == 2  # the other two settings
    job.tidy()
    assert not job.folder.exists() and job.cell(0) is not None
    job._path(3).unlink()
    assert job.needs_whole()  # its checkpoints are gone


@pytest.mark.slow
def test_what_two_studies_share_is_run_once(warmup, options):
    digits = {name: job.key for name, _, job in warmup.jobs_of("digits", options)}
    options.set = [word for word in options.set if "num_hidden_layers" not in word]
    layers = {name: job.key for name, _, job in warmup.jobs_of("layers", options)}
    assert layers["2 layers"] == digits["digits, Dirichlet 0.1"]
    assert len({*layers.values(), *digits.values()}) == 5


@pytest.mark.slow
def test_another_seed_or_length_is_another_run(warmup, options):
    options.seeds = 2
    keys = [job.key for _, _, job in warmup.jobs_of("digits", options)]
    options.rounds = 7
    keys += [job.key for _, _, job in warmup.jobs_of("digits", options)]
    assert len(set(keys)) == 12


def test_markdown(warmup):
    assert warmup.markdown([["a", "b"], ["1", "2"]]) == "| a | b |\n|---|---|\n| 1 | 2 |\n"
