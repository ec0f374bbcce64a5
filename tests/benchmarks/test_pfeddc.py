"""The pFedDC benchmark's bookkeeping: trials, choices, tables, and what goes into the docs."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import pfeddc
import pfeddc_report


def given(*words):
    return pfeddc.options().parse_args(list(words))


def cell(mean, worst, fusion=None):
    spread = {"mean": mean, "worst": worst, "std": 0.0}
    clients = {"rounds": [1, 1], "global": [None, None], "personal": [worst, 2 * mean - worst]}
    sent = {"array_bytes_up_per_client": 80, "rates": [0.1, 3.0]}
    return {"personal": spread, "clients": clients, "fusion": fusion and {"state": fusion}, **sent}


def key(split, share, method, seed):
    return json.dumps([split, share, method, seed])


def test_every_method_has_as_many_trials_and_they_come_first():
    jobs = pfeddc.jobs(given())
    assert len(jobs) == len(set(jobs))
    trials = [job for job in jobs if job[0] == "trial"]
    learned = [method for method in pfeddc.METHODS if method != "zero-shot"]
    assert {method: sum(job[1] == method for job in trials) for method in learned} == dict.fromkeys(
        learned, 4
    )
    for job in jobs:
        if job[0] == "cell" and job[3] != "zero-shot":
            assert max(jobs.index(trial) for trial in trials if trial[1] == job[3]) < jobs.index(job)
    full = [job for job in jobs if job[0] == "cell" and job[2] == 1.0]
    for split in ("domain", "domain x3"):
        found = {(job[3], job[4]) for job in full if job[1] == split}
        assert found == {(method, seed) for method in pfeddc.METHODS for seed in range(3)}
    assert all((job[1], job[2], job[3]) != pfeddc.TUNING or job[4] != 100 for job in full)


def test_rates_are_chosen_by_validation_and_a_diverged_trial_never_wins():
    options = given("--lrs", "0.01", "0.1", "--cross-lrs", "0.1", "--fusion-times", "3", "30")
    name = pfeddc.PFEDDC
    assert pfeddc.best_rates(options, {"trials": {}}, name) is None
    trials = {json.dumps([name, 0]): {"score": 0.5}, json.dumps([name, 1]): {"failed": "all refused"}}
    assert pfeddc.best_rates(options, {"trials": trials}, name) == pytest.approx([0.1, 0.3])
    trials[json.dumps([name, 1])] = {"score": 0.6}
    assert pfeddc.best_rates(options, {"trials": trials}, name) == pytest.approx([0.1, 3.0])
    trials[json.dumps([name, 1])] |= {"fusion_gap_text": 0.2, "fusion_gap_vision": 11.0}  # drowned
    assert pfeddc.best_rates(options, {"trials": trials}, name) == pytest.approx([0.1, 0.3])


def test_a_line_is_the_mean_of_its_seeds_with_an_interval():
    cells = {key("domain", 1.0, pfeddc.PFEDDC, seed): cell(0.6 + 0.1 * seed, 0.5) for seed in range(3)}
    cells[key("domain", 1.0, pfeddc.PFEDDC, 3)] = {"failed": "all refused", "rates": [1, 1]}
    (line,) = pfeddc_report.tables(cells)
    assert line["seeds"] == 3 and line["personal_mean"] == pytest.approx(0.7)
    # t(0.975, 2) = 4.303, standard error 0.1/√3
    assert line["personal_mean_ci"] == pytest.approx(4.3027 * 0.1 / 3**0.5, rel=1e-4)
    assert line["personal_worst_ci"] == 0


def test_the_tables_of_a_study_and_the_lines_of_its_picture():
    cells = {}
    for seed in range(2):
        cells[key("domain x3", 1.0, pfeddc.PFEDDC, seed)] = cell(0.8 + 0.1 * seed, 0.5, "fusion active")
        cells[key("domain x3", 1.0, pfeddc.PROMPTFL, seed)] = cell(0.7 + 0.1 * seed, 0.4)
    cells[key("domain x12", 0.5, pfeddc.PROMPTFL, 0)] = cell(0.6, 0.3)
    found = {
        "settings": {
            "rounds": 2,
            "steps": 3,
            "batch": 4,
            "optimizer": "sgd",
            "size": 28,
            "align_domain": None,
        },
        "alignment": {"rows": 9, "probe_accuracy": 0.9, "zero_shot_accuracy": 0.8, "chance": 0.1},
        "trials": {
            json.dumps([pfeddc.PFEDDC, 0]): {"rates": [0.1, 3.0], "score": 0.75, "fusion_gap_text": 0.5},
            json.dumps([pfeddc.PFEDDC, 1]): {"rates": [0.1, 30.0], "failed": "all refused"},
        },
        "cells": cells,
        "gpu": "a GPU",
        "versions": {"torch": "2"},
    }
    text = pfeddc_report.report(found)
    assert text.count("| 12 | PromptFL | +10.0 ± 0.0 | +10.0 ± 0.0 |") == 1
    assert "| 48 | PromptFL | - | - | 60.0 | 30.0 | 0/1 |" in text
    assert "0.1 & 3: 75.0 (gap 50.0 %); 0.1 & 30: diverged" in text
    assert "active in 2 of 2" in text
    lines = pfeddc_report.fairness_lines(cells)
    assert list(lines) == ["PromptFL", "pFedDC"] and all(own == sorted(own) for own in lines.values())
