"""The freezing study: its cells and their order, forks and the server average, verdicts, and the report."""

import json

import pytest

from fedfrozen_app.run import evaluation


@pytest.fixture
def freezing(cells, monkeypatch):
    monkeypatch.setattr(evaluation, "evaluator", evaluation.evaluator)
    import freezing

    return freezing


def test_the_cells_are_those_of_the_design(freezing):
    cells = freezing.all_cells()
    assert len({cell.key for cell in cells}) == len(cells) == 480 + 40
    assert {cell.seed for cell in cells} == set(range(111, 121))
    assert {cell.after for cell in cells} == {12, 30, 45, 60}
    assert [cell.freeze for cell in cells[:40:10]] == ["never", "50 %", "20 %", "75 %"]
    assert all(cell.experiment == "digits_few" for cell in cells[: 240 + 40])
    assert {cell.seed for cell in freezing.all_cells(2, 4)} == {1, 2}  # a trial's


def test_a_fork_is_the_whole_run_and_the_average_leaves_training_alone(
    freezing, cells, workers_here, tmp_path, monkeypatch
):
    """Under a decaying rate too."""
    cell = freezing.Cell("digits_few", "cosine", "1", "50 %", "qk", 1, rounds=4)
    own = (cell.whole, cell)
    monkeypatch.setattr(freezing, "all_cells", lambda *given: own)
    small = ["client.local_steps=2", "dataset.limit=200"]
    laboratories = []
    train = cells.Laboratory.train
    monkeypatch.setattr(
        cells.Laboratory, "train", lambda self, *given: (laboratories.append(self), train(self, *given))[1]
    )
    words = ["run", "--work", f"{tmp_path}/work", "--rows", f"{tmp_path}/rows", "--device", "cpu"]
    freezing.main([*words, "--rounds", "4", "--commit", "abc", "--set", *small])
    never, fork = (json.loads(line) for line in (tmp_path / "rows/freezing.jsonl").read_text().splitlines())
    assert (never["freeze"], fork["freeze"], fork["after"], fork["commit"]) == ("never", "50 %", 2, "abc")
    assert never["test"][:2] == fork["test"][:2] and never["average_test"][:2] == fork["average_test"][:2]
    assert len(fork["average_test"]) == len(fork["average_val"]) == 4
    assert fork["megabytes"] < never["megabytes"]
    from_start = [
        word for word in cell.words(tmp_path, [*small, "device=cpu"]) if not word.startswith("from=")
    ]
    runs = [(from_start, tmp_path / "from_start")]
    monkeypatch.undo()  # no average
    ((rows, _),) = train(laboratories[0], runs, "digits_few", set())
    assert [round(value, 4) for value in cells.curve(rows, "test_accuracy")] == fork["test"]
    assert not any("average_test_accuracy" in row for row in rows)


def test_holm_and_verdicts(freezing, cells):
    assert freezing.holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    difference = cells.Difference
    assert freezing.verdict(difference(2.0, 1.0, 0.001, 10), 0.01) == "gain"
    assert freezing.verdict(difference(-2.0, 1.0, 0.001, 10), 0.01) == "loss"
    assert freezing.verdict(difference(0.2, 0.7, 0.5, 10), 1.0) == "tie"
    assert freezing.verdict(difference(0.2, 1.7, 0.5, 10), 1.0) == "not distinguished"


def test_the_report_compares_tuned_arms_and_names_what_is_missing(freezing, tmp_path, capsys):
    """Planted: 50 % is two points ahead on `digits_few`; the cosine rate 1/3 is best on validation rows."""
    path = tmp_path / "freezing.jsonl"
    for cell in freezing.all_cells():
        if cell.experiment == "digits_drift" and cell.rate == "1/10":
            continue
        best = (cell.schedule, cell.rate) == ("cosine", "1/3")
        noise = 0.001 * (cell.seed % 3) * (1 + (cell.freeze == "50 %"))
        value = 0.6 + noise + 0.02 * (cell.freeze == "50 %" and cell.scope == "qk") + 0.1 * best
        curves = {name: [value] * 20 for name in freezing.CURVES}
        names = ("experiment", "schedule", "rate", "freeze", "scope", "seed")
        row = dict(zip(names, cell.key, strict=True)) | curves
        freezing.append(path, row | {"seconds": 1, "commit": "abcdefgh", "device": "cpu"})
    freezing.main(["report", "--rows", str(tmp_path)])
    text = capsys.readouterr().out
    line = next(line for line in text.splitlines() if "`digits_few`, tuned: 50 %" in line)
    assert "50 % (cosine, 1/3) against never (cosine, 1/3)" in line and "| gain |" in line
    assert "of 4 and 4 settings" in text  # of digits_drift
    assert "440 of 520 runs" in text and "digits_drift cosine x1/10 75 %" in text
    assert "| `digits_drift`, cosine, 1/10 | not run | not run |" in text
