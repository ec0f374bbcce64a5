"""Figures over clients that a reader can redo, and the picture of them."""

import pytest

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.handlers import train_handler
from fedfrozen_app.report import personal
from fedfrozen_app.report.console import final_metrics
from fedfrozen_app.report.personal import summarise_clients, write_personal

JUDGED = {
    "0": {"global": 0.5, "personal": 0.6, "after": 0.7, "test_rows": 10.0, "train_rows": 40.0},
    "1": {"global": 0.7, "personal": 1.0, "after": 0.9, "test_rows": 20.0, "train_rows": 80.0},
    "2": {"test_rows": 0.0, "train_rows": 5.0},
}
ROWS = [{"round": 1, "clients": ["0", "1"]}, {"round": 2, "clients": ["1", "2"]}]


def test_mean_worst_spread_and_participation():
    found = summarise_clients(JUDGED, ROWS, ("photo", "sketch", "cartoon"))
    assert found["personal"] == pytest.approx({"mean": 0.8, "worst": 0.6, "std": 0.2})
    assert found["global"]["worst"] == 0.5 and found["after"]["mean"] == pytest.approx(0.8)
    assert [line["clients"] for line in found["by_participation"]] == [2, 1]
    assert found["by_participation"][0] == {
        **{"rounds": 1, "clients": 2, "global": 0.5, "personal": 0.6, "after": 0.7}
    }
    assert [c["name"] for c in found["clients"]] == ["photo", "sketch", "cartoon"]
    assert found["clients"][1] == {
        **{"client": "1", "name": "sketch", "rounds": 2, "train_rows": 80, "test_rows": 20},
        **{"global": 0.7, "personal": 1.0, "after": 0.9},
    }


@pytest.mark.pictures
def test_the_verb_puts_runs_side_by_side(tmp_path, capsys):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_personal(summarise_clients(JUDGED, ROWS, ()), tmp_path / name)
    runs = [str(tmp_path / name) for name in ("one", "two")]
    assert command(["personal", *runs, f"png={tmp_path}/both.png"]) == 0
    out = capsys.readouterr().out
    assert "0.8000" in out and "two" in out and (tmp_path / "both.png").stat().st_size > 5000
    assert command(["personal"]) == 2
    assert command(["personal", str(tmp_path)]) == 2 and "personal=true" in capsys.readouterr().err


def test_runs_of_one_name_stay_apart_and_clients_without_test_rows_count(tmp_path, capsys, monkeypatch):
    runs = [tmp_path / group / "run" for group in ("a", "b")]
    for run in runs:
        run.mkdir(parents=True)
        write_personal(summarise_clients(JUDGED, ROWS, ()), run)
    drawn = []
    monkeypatch.setattr(personal, "fairness_picture", lambda lines, path: drawn.append(lines))
    monkeypatch.chdir(tmp_path)
    assert command(["personal", "a/run", "b/run"]) == 0
    out = capsys.readouterr().out
    assert "a/run" in out and "b/run" in out and len(drawn[0]) == 6  # three models of two runs
    assert out.count("2 of 3") == 6  # one client has no test rows
    monkeypatch.chdir(runs[0])
    assert command(["personal", "."]) == 0
    assert "run: personal" in drawn[1]


@pytest.mark.slow
def test_any_strategy_can_be_judged_by_its_clients(train):
    run = train("strategy=fedavg", "personal=true", "num_rounds=1")
    judged = run.summary["personal"]
    assert judged["global"] == judged["personal"] and judged["after"]["mean"] > 0
    local = train("strategy=local", "num_rounds=1", folder="local").summary["personal"]
    assert "global" not in local and local["personal"]["worst"] <= local["personal"]["mean"]


@pytest.mark.slow
def test_who_could_not_be_judged_is_named_beside_the_mean(train, monkeypatch, capsys):
    """A mean over fewer clients than there are must not look like one over all."""
    plain = train_handler.evaluate_client

    def evaluate(worker, client, *rest):
        if client == "1":
            raise MemoryError("no memory left")
        return plain(worker, client, *rest)

    monkeypatch.setattr(train_handler, "evaluate_client", evaluate)
    run = train("strategy=fedavg", "personal=true", "num_rounds=1", "num_clients=3")
    assert run.summary["personal"]["not_judged"] == {"1": "failed: MemoryError: no memory left"}
    assert command(["personal", str(run.folder)]) == 0
    assert "2 of 3" in capsys.readouterr().out


def test_the_closing_table_has_mean_and_worst_of_the_personal_models():
    spread = {"mean": 0.75, "worst": 0.5, "std": 0.1}
    shown = dict(final_metrics([{"round": 1, "test_accuracy": 0.5}], {"personal": {"personal": spread}}))
    assert shown["Personal models, accuracy on own test rows"] == "mean 0.7500, worst 0.5000"
