"""The comparison's bookkeeping: as many trials each, none of them on test rows, and what the table says."""

import json
import math
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.data.federated import share_out


@pytest.fixture
def methods(cells):
    import methods

    return methods


def trial_rows(methods, study, val=lambda trial: 0.5):
    """As if everything had been tried."""
    return [
        methods.Cell(study.name, model, alpha, name, trial, methods.TRIAL_SEED).told | {"val": val(trial)}
        for name, model, alpha in methods.plan_of(study)
        for trial in methods.trials(methods.METHODS[name], study.models[model])
    ]


def test_every_method_has_as_many_trials_and_a_seed_that_no_table_has(methods):
    for study in methods.STUDIES.values():
        first = methods.cells_of(study, [], [], study.seeds)
        assert all(cell.tuning and cell.seed == methods.TRIAL_SEED for cell in first)
        places = [(cell.method, cell.model, cell.alpha) for cell in first]
        assert {places.count(place) for place in places} == {4} and len(set(first)) == len(first)
        later = methods.cells_of(study, [], trial_rows(methods, study), study.seeds)
        assert not any(cell.tuning for cell in later) and {cell.seed for cell in later} == set(
            range(study.seeds)
        )


@pytest.mark.slow  # forty configurations
def test_every_cell_is_a_configuration_and_all_of_a_model_train_alike(methods):
    study = methods.STUDIES["cifar10"]
    clients = {}
    for cell in methods.cells_of(study, [], [], 3):
        if cell.alpha != 0.1 or cell.trial.lr != study.models[cell.model].rates[1]:
            continue
        config = read(resolved(compose_config([*cell.words([]), "dataset.path=."])))
        settings = vars(config.client) | {"lr": None}
        assert clients.setdefault(cell.model, settings) == settings, cell.title
        assert (config.client.optimizer, config.partition.alpha) == ("sgd", 0.1)
    assert len(clients) == 2


def test_who_tries_settings_has_no_test_row_and_trains_on_none_of_its_own(methods, cells):
    study = methods.STUDIES["tiny"]
    words = methods.cells_of(study, [], [], 2)[0].words(["device=cpu"])
    corpus = cells.load_data(words)
    held = methods.without_test_rows(corpus, words)
    config = read(resolved(compose_config(words)))
    shares = share_out(held, config, config.num_clients)
    trained = np.concatenate(shares.partition.indices)
    assert len(held.test) == len(shares.validation) > 0
    assert not np.isin(shares.validation, trained).any()
    kept = corpus.train.take(shares.validation)
    assert all((held.test.inputs[name] == value).all() for name, value in kept.inputs.items())
    # Both kinds of runs train on the same rows.
    again = share_out(corpus, config, config.num_clients)
    assert all((a == b).all() for a, b in zip(again.partition.indices, shares.partition.indices, strict=True))


def test_the_best_on_held_out_rows_is_chosen_and_a_failure_never(methods):
    study = methods.STUDIES["tiny"]
    place = ("fedprox", "cnn", 0.1)
    rows = trial_rows(methods, study, val=lambda trial: 0.9 if "0.1" in trial.constant else 0.5)
    assert methods.chosen(study, rows, *place) == methods.Trial(0.03, "strategy.mu=0.1")
    for row in rows:
        if row["constant"] == "strategy.mu=0.1":
            del row["val"]
            row["failed"] = "it diverged"
    assert methods.chosen(study, rows, *place) == methods.Trial(0.03, "strategy.mu=0.01")


def rows_on_disk(methods, study, folder, gain):
    """Lines of every method at its chosen settings; SCAFFOLD gains so much over FedAvg, seed by seed."""
    tried = trial_rows(methods, study)
    for row in tried:
        methods.append(methods.rows_file(study, folder, True), row | {"seconds": 1.0})
    for cell in methods.cells_of(study, [], tried, 3):
        score = 0.5 + 0.01 * cell.seed + (gain[cell.seed] if cell.method == "scaffold" else 0.0)
        figures = {"score": score, "worst": 0.2, "megabytes_up": 3.0, "megabytes_down": 4.0, "seconds": 1.0}
        methods.append(methods.rows_file(study, folder, False), cell.told | figures)


@pytest.mark.parametrize(
    ("gain", "said"),
    [
        ((0.020, 0.021, 0.022), "+2.1 ± 0.2 points over 3 seeds: SCAFFOLD is above FedAvg."),
        ((-0.020, -0.021, -0.022), "-2.1 ± 0.2 points over 3 seeds: SCAFFOLD is below FedAvg."),
        ((0.05, -0.05, 0.01), "not distinguished."),
    ],
)
def test_the_public_ordering_is_reported_either_way(methods, tmp_path, gain, said):
    study = methods.STUDIES["tiny"]
    rows_on_disk(methods, study, tmp_path, gain)
    text = methods.report(study, tmp_path)
    (line,) = [line for line in text.splitlines() if line.startswith("- cnn, Dirichlet 0.1")]
    assert line.endswith(said)
    # 0.50, 0.51, 0.52: Student's t of two degrees, 4.303 * 1 / √3 points.
    assert "| fedavg | 3 | 51.0 ± 2.5 | 7 | lr 0.01 (edge) |" in text


def test_a_cell_of_settings_that_a_later_trial_beat_is_left_out(methods, tmp_path):
    study = methods.STUDIES["tiny"]
    rows_on_disk(methods, study, tmp_path, (0, 0, 0))
    found = methods.Found.of(study, tmp_path)
    stray = found.rows[0] | {"lr": 0.3, "score": 0.99, "seed": 7}
    methods.append(methods.rows_file(study, tmp_path, False), stray)
    assert methods.Found.of(study, tmp_path).rows == found.rows


def test_a_page_is_changed_between_its_marks_alone(cells, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table: begin -->\nold\n<!-- table: end -->\nafter\n")
    cells.into_page(page, "table", "new")
    cells.into_page(page, "table", "newer\n")
    assert page.read_text() == "before\n<!-- table: begin -->\n\nnewer\n\n<!-- table: end -->\nafter\n"
    page.write_text("nothing")
    with pytest.raises(SystemExit, match="lacks the lines"):
        cells.into_page(page, "table", "new")


def command(tmp_path, *words):
    folders = ("--work", f"{tmp_path}/work", "--rows", f"{tmp_path}/rows")
    return ["run", "tiny", *folders, "--device", "cpu", "--seeds", "1", *words]


@pytest.mark.slow  # the parts have quick tests of their own
def test_from_nothing_to_table_and_picture_with_a_stop_between(
    methods, workers_here, tmp_path, capsys, monkeypatch
):
    study = methods.STUDIES["tiny"]
    monkeypatch.setitem(methods.STUDIES, "tiny", methods.replace(study, methods=("fedavg", "local")))
    methods.main(command(tmp_path, "--minutes", "0.01"))
    assert not (tmp_path / "rows").exists()  # too late to begin anything
    methods.main(command(tmp_path, "--stack", "8"))
    path = tmp_path / "rows" / "tiny.jsonl"
    rows, tried = (methods.read(path), methods.read(tmp_path / "rows" / "tiny-trials.jsonl"))
    assert len(rows) == 4 and len(tried) == 16
    assert not any("score" in row or "curve" in row or "worst" in row for row in tried)
    by_method = {row["method"]: row for row in rows if row["alpha"] == 0.1}
    assert by_method["fedavg"]["megabytes_up"] > 0 == by_method["local"]["megabytes_up"]
    assert len(by_method["fedavg"]["curve"]) == 2 and "worst" in by_method["local"]
    # One line lost, one cut short: these two are trained again, to the same figures, and nothing else.
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], lines[2][:40]]))
    capsys.readouterr()
    methods.main(command(tmp_path))
    assert len([line for line in capsys.readouterr().out.splitlines() if " in " in line]) == 2
    again = {methods.identity(row): row["score"] for row in methods.read(path)}
    assert again == pytest.approx({methods.identity(row): row["score"] for row in rows}, abs=1e-3)
    methods.main(["table", "tiny", "--rows", f"{tmp_path}/rows"])
    said = capsys.readouterr().out
    assert "| fedavg | 1 |" in said and "4 runs and 16 trials" in said and "not measured" in said


@pytest.fixture
def turns(methods, monkeypatch):
    """Rounds of a second, those of SCAFFOLD of two: who trained how many of them, and who fails at its first.
    What does the real work has a test of its own."""
    import turns

    class Taking:
        taken: ClassVar[list[str]] = []
        fails = ""

        def __init__(self, words, corpus):
            names = [word for word in words if word.startswith(("strategy=", "server_optimizer="))]
            self.name = names[-1].partition("=")[2]

        def turn(self):
            if self.name == self.fails:
                raise KeyboardInterrupt
            self.taken.append(self.name)
            return {"seconds": {"train": 1.5 if self.name == "scaffold" else 0.5, "aggregate": 0.5}}

        def close(self):
            pass

    monkeypatch.setattr(turns, "AppTurns", Taking)
    monkeypatch.setattr(methods, "load_data", lambda words: type("Corpus", (), {"train": range(640)}))
    return Taking


def timed(methods, out, *more):
    words = ["--repeats", "2", "--methods", "scaffold", "fedprox", "moon"]
    methods.main(["speed", "--device", "cpu", "--out", str(out), *words, *more])
    return json.loads(out.read_text())


@pytest.mark.slow
def test_the_speed_of_a_run_that_was_stopped_goes_on_where_it_stopped(methods, turns, tmp_path):
    out = tmp_path / "speed.json"
    turns.fails = "moon"
    with pytest.raises(KeyboardInterrupt):
        timed(methods, out)
    kept = json.loads(out.read_text())
    assert list(kept["figures"]) == ["scaffold", "fedprox"]
    assert kept["figures"]["scaffold"]["times_fedavg"]["values"] == [2.0, 2.0]
    assert kept["checks"] == {"scaffold_at_most_1.6": False, "fedprox_at_most_1.6": True}
    turns.fails, turns.taken[:] = "", []
    whole = timed(methods, out)
    assert set(turns.taken) == {"moon", "fedavg"}
    assert list(whole["figures"]) == ["scaffold", "fedprox", "moon"]
    assert whole["figures"]["scaffold"] == kept["figures"]["scaffold"]
    turns.taken[:] = []
    assert timed(methods, out)["figures"] == whole["figures"] and not turns.taken
    timed(methods, out, "--anew")
    assert set(turns.taken) == {"scaffold", "fedprox", "moon", "fedavg"}


@pytest.mark.slow
def test_the_speed_in_another_setting_begins_anew(methods, turns, tmp_path):
    out = tmp_path / "speed.json"
    timed(methods, out)
    turns.taken[:] = []
    found = timed(methods, out, "--methods", "moon", "--set", "client.lr=0.1")
    assert list(found["figures"]) == ["moon"] and "client.lr=0.1" in found["setting"]["words"]


@pytest.mark.slow
def test_the_speed_of_two_methods(methods, tmp_path):
    out = tmp_path / "speed.json"
    words = ["--repeats", "1", "--methods", "scaffold", "fedrep", "--set", "dataset.limit=60"]
    methods.main(["speed", "--device", "cpu", "--out", str(out), *words])
    found = json.loads(out.read_text())
    assert set(found["figures"]) == {"scaffold", "fedrep"} and len(found["checks"]) == 2
    own = found["figures"]["fedrep"]
    times, each = own["times_fedavg"]["median"], own["times_fedavg_a_step"]["median"]
    assert times == pytest.approx(own["seconds"]["median"] / own["fedavg_seconds"]["median"])
    assert each == pytest.approx(times / 2) and math.isfinite(times)
    assert not Path(methods.RESULTS, "methods_speed.json").exists()
