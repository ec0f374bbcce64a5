"""The study of adapters: which rates are chosen, what a line says, and that it goes on where it ended."""

import sys
from dataclasses import asdict
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import adapters


def options(tmp_path, *words):
    return adapters.parse(["--quick", "--cells", str(tmp_path / "cells.jsonl"), *words])


def row(cell, score, validation=0.5, given=None):
    figures = dict.fromkeys(("bytes_up", "bytes_down", "memory", "seconds", "trained_params"), 2e6)
    about = {"cell": asdict(cell), "setting": adapters.setting(given)}
    return about | figures | {"validation": validation, "score": score}


def test_all_methods_try_as_many_rates_and_the_best_by_validation_is_used(tmp_path):
    given = options(tmp_path, "--seeds", "2")
    methods = adapters.methods(given, None)
    assert len(methods) == 3 + 4 * 2
    tried = {method: adapters.trials("quick", None, *method, given) for method in methods}
    assert {len(cells) for cells in tried.values()} == {3}
    found = {cell: row(cell, 0.9, cell.lr, given) for cell in tried["ffa", 1]}
    best = adapters.chosen(tried["ffa", 1], found)
    assert best.lr == max(cell.lr for cell in tried["ffa", 1])
    assert adapters.chosen(tried["ffa", 2], found) is None
    found[best] = {"failed": "it diverged"}
    assert adapters.chosen(tried["ffa", 1], found).lr < best.lr
    final = [cell for cell in adapters.known_cells(given, found) if cell and cell.seed < 1000]
    assert {(cell.method, cell.rank, cell.seed) for cell in final} == {("ffa", 1, 0), ("ffa", 1, 1)}


def test_a_line_has_means_and_paired_differences(tmp_path):
    given = options(tmp_path, "--seeds", "2", "--lrs", "0.001", "--ranks", "1")
    scores = {"fedavg": (0.5, 0.7), "head": (0.2, 0.2), "ffa": (0.6, 0.9)}
    found = {}
    for method, own in scores.items():
        rank = int(method == "ffa")
        for seed, score in ((1000, 0.0), *enumerate(own)):
            cell = adapters.Cell("quick", method, rank, 0.001, seed)
            found[cell] = row(cell, score, given=given)
    lines = {line["title"]: line for line in adapters.lines_of(given, found)}
    assert set(lines) == {"fedavg", "head", "LoRA 1, ffa"}
    ours = lines["LoRA 1, ffa"]
    assert ours["score"] == pytest.approx(0.75) and ours["against_fedavg"]["mean"] == pytest.approx(0.15)
    assert "against_fedavg" not in lines["fedavg"] and ours["seeds"] == 2
    text = adapters.report(list(lines.values()))
    assert "| LoRA 1, ffa | 0.750 | +0.150 ± " in text and "| 2.00 | 2.00 |" in text


def test_folders_of_a_study_go_together(tmp_path, capsys):
    with pytest.raises(SystemExit):
        adapters.parse(["--mtsamples", str(tmp_path)])
    assert "give --minilm" in capsys.readouterr().err


@pytest.mark.slow
def test_cells_run_once_and_a_sitting_goes_on(tmp_path, monkeypatch):
    """With one run in place of many: what a worker gives is what is kept."""
    given = options(tmp_path, "--seeds", "1", "--lrs", "0.003", "--ranks", "1", "--rounds", "1", "--device",
                    "cpu", "--limit", "80")  # fmt: skip
    ran = []

    class Here:
        def __init__(self, *args, **kwargs): ...

        def __enter__(self):
            return self

        def __exit__(self, *args): ...

        def submit(self, work, cell, text):
            from concurrent.futures import Future

            ran.append(cell)
            done = Future()
            real = cell.method == "stack"
            done.set_result(work(cell, text) if real else row(cell, 0.5, given=given))
            return done

    monkeypatch.setattr(adapters, "ProcessPoolExecutor", Here)
    adapters.run_all(given)
    assert len(ran) == len(set(ran)) == 2 * 7  # a trial and a seed of each method
    (line,) = [one for one in adapters.lines_of(given, adapters.finished(given)) if one["method"] == "stack"]
    assert 0 <= line["score"] <= 1 and line["bytes_up"] > 0 and line["memory"] > 0
    adapters.run_all(given)
    assert len(ran) == 14
