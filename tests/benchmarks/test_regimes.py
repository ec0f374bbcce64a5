"""The map's bookkeeping: what it runs in which order, what it may look at, how it goes on, what it says."""

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedfrozen_app.config import compose_config, resolved
from fedfrozen_app.core.formatting import flatten
from fedfrozen_app.runtimes.inprocess import concurrent_runs


@pytest.fixture
def regimes(cells):
    import regimes

    return regimes


@pytest.fixture
def inline(regimes, workers_here):
    return regimes


def command(tmp_path, *words):
    return [
        "run",
        "tiny",
        "--work",
        f"{tmp_path}/work",
        "--rows",
        f"{tmp_path}/rows",
        "--device",
        "cpu",
        *words,
    ]


def lines(tmp_path, name="tiny"):
    return [json.loads(line) for line in (tmp_path / "rows" / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.slow  # the parts have quick tests of their own
def test_from_nothing_to_the_report_with_a_stop_between(inline, tmp_path, capsys):
    inline.main([*command(tmp_path, "--minutes", "0.01")])
    assert not (tmp_path / "rows" / "tiny.jsonl").exists()  # too late to begin anything
    inline.main(["tune", *command(tmp_path)[1:]])
    assert not (tmp_path / "rows" / "tiny.jsonl").exists() and len(lines(tmp_path, "tiny-rates")) == 3
    inline.main(command(tmp_path, "--seeds", "1"))
    rows = lines(tmp_path)
    # 2 % of ten rounds is 0 %, 5 % too, and late is 50 %: eight runs for each of three settings.
    assert len(rows) == 3 * 8 and not any("failed" in row for row in rows)
    assert {row["method"]: row["after"] for row in rows} == {
        "never": 10, "10 %": 1, "50 %": 5, "0 %": 0, "cosine": 10, "last": 9, "20 %": 2, "auto": 0,
    }  # fmt: skip
    assert all(len(row["curve"]) == 10 and row["seconds"] > 0 for row in rows)
    fork = next(row for row in rows if row["method"] == "50 %")
    never = next(row for row in rows if row["method"] == "never" and row["setting"] == fork["setting"])
    assert fork["curve"][:5] == never["curve"][:5]  # one prefix
    assert "drift" not in fork and never["drift"][-1][1] > 0  # forks share the rounds that tell something
    assert fork["megabytes"] < never["megabytes"]
    # A line lost, one cut short: these two are trained again, and nothing else.
    path = tmp_path / "rows" / "tiny.jsonl"
    kept = path.read_text().splitlines()
    path.write_text("\n".join([*kept[:-2], kept[-2][:40]]))
    capsys.readouterr()
    inline.main(command(tmp_path, "--seeds", "1"))
    assert len([line for line in capsys.readouterr().out.splitlines() if " in " in line]) == 2
    again = inline.read(path)
    assert sorted(cell(row) for row in again) == sorted(cell(row) for row in rows)
    inline.main(["report", "tiny", "--rows", f"{tmp_path}/rows"])
    said = capsys.readouterr().out
    assert (
        "| Dirichlet 0.3, 2 steps |" in said
        and "24 cells" in said
        and (tmp_path / "regimes-tiny.png").exists()
    )


def cell(row):
    return (row["setting"], row["seed"], row["method"], row["lr"])


@pytest.mark.slow  # the parts have quick tests of their own
def test_a_prefix_that_is_gone_is_made_again_and_not_counted_twice(inline, tmp_path):
    study = inline.STUDIES["tiny"]
    inline.STUDIES["tiny"] = replace(study, settings=study.settings[:1], rates={"adamw": (1e-2,)})
    try:
        inline.main(command(tmp_path, "--seeds", "1"))
        rows = lines(tmp_path)
        inline.shutil.rmtree(tmp_path / "work")
        path = tmp_path / "rows" / "tiny.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows if row["method"] != "50 %"))
        inline.main(command(tmp_path, "--seeds", "1"))
    finally:
        inline.STUDIES["tiny"] = study
    by_method = {row["method"]: row for row in lines(tmp_path)}
    assert len(by_method) == len(lines(tmp_path)) == len(rows)
    before = next(row for row in rows if row["method"] == "50 %")
    assert by_method["50 %"]["curve"] == before["curve"]


# Nothing is tuned on test rows -----------------------------------------------------------------------------


def test_rates_are_tried_with_a_seed_that_no_table_has(regimes):
    for study in regimes.STUDIES.values():
        tried = regimes.tuning_cells(study)
        assert {each.seed for each in tried} == {regimes.TUNING_SEED} and {each.method for each in tried} == {
            "never"
        }
        assert study.seeds <= regimes.TUNING_SEED
        known = [{"group": each.setting.group, "lr": each.lr, "val": 0.5} for each in tried]
        cells = regimes.cells_of(study, [], known, study.seeds)
        assert regimes.TUNING_SEED not in {each.seed for each in cells}
        assert not any(each.tuning for each in cells)


@pytest.mark.slow
def test_a_tuning_line_knows_nothing_of_the_test_rows(inline, tmp_path):
    inline.main(["tune", *command(tmp_path)[1:]])
    for row in lines(tmp_path, "tiny-rates"):
        assert not row.keys() & {"score", "final", "curve", "swing", "worst_drop", "rise"}
        assert 0 <= row["val"] <= 1


def test_the_validation_rows_are_neither_trained_nor_tested_on(regimes, cells):
    for name in ("digits", "tiny"):
        own = regimes.tuning_cells(regimes.STUDIES[name])[0]
        words = own.words(Path("work"), ["device=cpu"])
        corpus = cells.load_data(words)
        from fedfrozen_app.config import compose_config, read, resolved

        config = read(resolved(compose_config(words)))
        shares = concurrent_runs.share_out(corpus, config, config.num_clients)
        trained = np.concatenate(shares.partition.indices)
        assert len(shares.validation) and not np.isin(shares.validation, trained).any()
        assert len(shares.validation) + len(trained) == len(corpus.train)  # the test rows are another table


def test_the_rate_is_the_best_on_validation_rows_whatever_else_a_line_says(regimes):
    rows = [
        {"group": "a", "lr": 0.1, "val": 0.5, "score": 0.9},
        {"group": "a", "lr": 0.3, "val": 0.6, "score": 0.1},
        {"group": "a", "lr": 1.0, "failed": "it diverged"},
        {"group": "b", "lr": 9.0, "val": 0.9},
    ]
    assert regimes.chosen_rate(rows, "a") == 0.3
    assert regimes.chosen_rate([row for row in rows if row["lr"] == 1.0], "a") == 1.0


def test_a_setting_waits_for_its_rates_and_all_methods_share_one(regimes):
    study = regimes.STUDIES["tiny"]
    known = [{"group": "adamw, 2 steps", "lr": lr, "val": lr} for lr in (1e-3, 1e-2)]
    cells = regimes.cells_of(study, [], known, 2)
    assert [each.setting.optimizer for each in cells if each.tuning] == ["sgd"]
    assert {each.lr for each in cells if not each.tuning} == {1e-2}
    assert {each.setting.optimizer for each in cells if not each.tuning} == {"adamw"}


# The order -------------------------------------------------------------------------------------------------


def test_whenever_it_stops_the_picture_is_balanced(regimes):
    study = regimes.STUDIES["cifar10"]
    known = [{"group": c.setting.group, "lr": c.lr, "val": 0.5} for c in regimes.tuning_cells(study)]
    cells = regimes.cells_of(study, [], known, 5)
    first = [c for c in cells if c.setting.slice == 0 and c.method in regimes.PASSES[0]]
    assert cells[: len(first)] == first and len({c.setting for c in first}) == 7
    places = [study.settings.index(c.setting) for c in first]
    assert places == sorted(places) and {c.seed for c in first if c.method == "never"} == set(range(5))
    second = cells[len(first)]
    assert (second.method, second.setting.slice, second.seed) == ("20 %", 0, 0)
    # Where seeds come in blocks, the first three are through with all settings before the others begin.
    study = regimes.STUDIES["digits"]
    known = [{"group": c.setting.group, "lr": c.lr, "val": 0.5} for c in regimes.tuning_cells(study)]
    cells = regimes.cells_of(study, [], known, 5)
    first = [c for c in cells if c.setting.slice == 0 and c.seed < 3]
    assert cells[: len(first)] == first and len({c.setting for c in first}) == 8


def test_a_claim_has_more_seeds_than_the_rest_of_the_map(regimes):
    study = regimes.STUDIES["digits_long"]
    known = [{"group": c.setting.group, "lr": c.lr, "val": 0.5} for c in regimes.tuning_cells(study)]
    cells = regimes.cells_of(study, [], known, study.seeds)

    def seeds(name: str, method: str) -> int:
        return len([c for c in cells if (c.setting.name, c.method) == (name, method)])

    assert seeds("Dirichlet 0.05, 40 steps", "50 %") == seeds("Dirichlet 0.05, 40 steps", "auto") == 10
    assert seeds("Dirichlet 0.05, 40 steps", "values") == 5  # a variant
    assert seeds("Dirichlet 0.3, 40 steps", "50 %") == 5


def test_the_halves_of_a_model_are_its_own(regimes):
    for name in ("digits", "digits_long", "cifar10", "tiny"):
        study = regimes.STUDIES[name]
        config = compose_config([*study.words, "strategy=fedavg"])
        assert config.model.config.num_hidden_layers == study.depth
    own = regimes.Cell("digits_long", regimes.Setting(0.1, 40), 0, "first half", 1e-2)
    first, last = (replace(own, method=f"{which} half").strategy[-1] for which in ("first", "last"))
    assert "freeze:[kernel.0]" in first and "freeze:[kernel.1]" in last


def test_runs_of_one_shape_train_together(regimes, tmp_path):
    options = argparse.Namespace(rows=tmp_path, work=tmp_path, command="run", seeds=4, stack=6)
    schedule = regimes.Schedule(regimes.STUDIES["cifar10"], options, until=math.inf)
    rates = schedule.next(set())
    assert len(rates) == 3 and len({c.lr for c in rates}) == 3 and all(c.tuning for c in rates)
    tried = regimes.tuning_cells(schedule.study)
    schedule.tuning = [{"group": c.setting.group, "lr": c.lr, "val": 0.5} for c in tried]
    first = schedule.next(set())
    assert {(c.setting.name, c.method) for c in first} == {
        ("Dirichlet 0.05, 200 steps", "never"),
        ("Dirichlet 0.3, 200 steps", "never"),
    }
    assert [c.seed for c in first] == [0, 1, 2, 3, 0, 1]  # the most urgent setting is not split
    second = schedule.next(set(first))
    assert not {*second} & {*first} and second[0].setting == first[0].setting
    assert second[0].method == "0 %"  # what forks waits for the whole run, and this does not
    assert len({c.shape for c in second}) == 1


def test_rates_of_a_later_slice_do_not_hold_up_the_first(regimes):
    study = regimes.STUDIES["cifar10"]
    cells = regimes.cells_of(study, [], [], 3)
    assert all(c.tuning for c in cells[:12])
    assert {c.setting.local_steps for c in cells if c.setting.slice == 0} == {10, 50, 200}
    known = [{"group": c.setting.group, "lr": c.lr, "val": 0.5} for c in cells if c.setting.slice == 0]
    cells = regimes.cells_of(study, [], known, 3)
    place = next(n for n, c in enumerate(cells) if c.tuning)
    assert {c.setting.slice for c in cells[:place]} == {0} and cells[place].setting.local_steps == 800


def test_a_cell_begins_only_where_it_ends_in_time(regimes, tmp_path, monkeypatch):
    options = argparse.Namespace(commit="abc", rows=tmp_path, work=tmp_path, command="run", seeds=1, stack=4)
    schedule = regimes.Schedule(regimes.STUDIES["tiny"], options, until=100.0)
    monkeypatch.setattr(regimes.time, "time", lambda: 90.0)
    own = regimes.Cell("tiny", regimes.Setting(0.3, 2), 0, "never", 1e-2)
    assert own.steps == 20 and schedule.fits([own])  # nobody knows yet how long it takes
    row = {"setting": "x", "seed": 0, "method": "never", "lr": 1e-2, "seconds": 5.0}
    schedule.take([own, own], [row, row])
    assert not schedule.fits([own])  # 11.5 s: alone it may be hardly quicker than beside another
    assert schedule.fits([replace(own, method="50 %")] * 2)
    assert not schedule.fits([replace(own, method="50 %")] * 4)


# Figures ---------------------------------------------------------------------------------------------------


def test_only_what_survives_holm_is_called_a_difference(regimes):
    rows = []
    for seed, noise in enumerate((-0.001, 0.001, 0.0005, -0.0005, 0.0, 0.0002)):
        for method, gain in (("never", 0.0), ("10 %", 0.02 + noise), ("50 %", 3 * noise)):
            after = {"never": 20, "10 %": 2, "50 %": 10}[method]
            row = {"setting": "a", "seed": seed, "method": method, "score": 0.5 + gain, "after": after}
            rows.append(row)
            if method == "10 %":  # of so few rounds the same run
                rows.append(row | {"method": "5 %"})
    assert [title for _, title, _ in regimes.tests(rows, ["a"], regimes.WARMUPS)] == ["5 % = 10 %", "50 %"]
    (only,) = regimes.significant(rows, ["a"])
    assert only.startswith("- a, 5 % = 10 %: +2.0")
    assert not list(regimes.significant([row for row in rows if row["seed"] < 4], ["a"]))  # too few seeds


def test_the_last_round_alone_is_judged_by_the_last_round(regimes):
    rows = [
        {"setting": "a", "seed": 0, "method": "never", "score": 0.5, "final": 0.4},
        {"setting": "a", "seed": 0, "method": "last", "score": 0.5, "final": 0.6},
    ]
    assert regimes.against_never(rows, "a", "last", "score").mean == pytest.approx(20)


def test_one_run_counts_for_all_warm_ups_of_its_length(regimes):
    row = {"setting": "a", "seed": 0, "method": "0 %", "after": 0, "rounds": 20, "every": 1, "score": 0.1}
    assert {each["method"] for each in regimes.fill_shared([row])} == {"0 %", "2 %"}
    ten = row | {"method": "50 %", "after": 5, "rounds": 10}
    assert {each["method"] for each in regimes.fill_shared([ten])} == {"50 %", "late"}


def test_rounds_to_a_target(regimes):
    row = {"every": 4, "curve": [0.1, 0.3, 0.2, 0.5]}
    assert regimes.reached(row, 0.3) == 8 and regimes.reached(row, 0.6) == math.inf


@pytest.mark.slow
def test_with_processes(tmp_path, regimes, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["regimes.py"])
    regimes.main([*command(tmp_path, "--seeds", "1", "--workers", "2")])
    assert len(lines(tmp_path)) == 3 * 8


def test_cells_of_a_rate_that_was_replaced_are_left_out(regimes):
    study = regimes.STUDIES["digits"]
    setting = study.settings[0]
    tuning = [
        {"group": setting.group, "lr": 0.1, "val": 0.5},
        {"group": setting.group, "lr": 0.2, "val": 0.9},
    ]
    rows = [{"setting": setting.name, "lr": regimes.rate_for(setting, part)} for part in (tuning[:1], tuning)]
    assert regimes.at_chosen_rates(study, rows, tuning) == rows[1:]


def test_at_equal_bytes_fedavg_stops_early(regimes):
    """Ten evaluations of 10 MB each: 75 MB pay for seven of them, of which the last five count."""
    whole = {"setting": "s", "seed": 0, "method": "never", "megabytes": 100.0, "score": 0.8}
    whole["curve"] = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.8, 0.8]
    assert regimes.cut(whole, 75.0) == whole["curve"][:7]
    assert regimes.cut(whole, 500.0) == whole["curve"] and regimes.cut(whole, 0.0) == [0.1]
    frozen = whole | {"method": "50 %", "megabytes": 75.0, "score": 0.6}
    told = list(regimes.equal_bytes_line([whole, frozen], "s"))
    assert told[:2] == ["", ""] and told[2].startswith("+10.0") and told[2].endswith("(0.75)")


@pytest.mark.parametrize(
    ("name", "experiment"),
    [
        ("Dirichlet 0.05, 40 steps", "digits_drift"),
        ("Dirichlet 0.1, 40 steps, participation 0.3", "digits_few"),
    ],
)
def test_the_experiment_of_the_headline_is_the_map_s_cell(regimes, tmp_path, name, experiment):
    """What README's command trains is what the table tells, but for what only serves a map of many runs."""
    study = regimes.STUDIES["digits_long"]
    setting = next(one for one in study.settings if one.name == name)
    cell = regimes.Cell(study.name, setting, 0, "50 %", 0.01)
    words = [word for word in cell.words(tmp_path, []) if not word.startswith(("from=", "checkpoint."))]
    mine, theirs = (flatten(resolved(compose_config(own))) for own in ([f"experiment={experiment}"], words))
    aside = {"track.tensorboard", "runtime.threads", "runtime.compile", "strategy.warmup_rounds"}
    assert {key for key in mine if mine[key] != theirs.get(key)} == aside


def test_what_foretells_a_gain(regimes):
    """Five settings: the swing grows with the gain of a late freeze, and the kernel's drift against it."""
    rows = []
    for number in range(5):
        whole = {
            "setting": str(number),
            "seed": 0,
            "method": "never",
            "score": 0.5,
            "swing": number,
            "rise": 0.1 * number,
        }
        whole |= {
            "classes_per_client": -number,
            "drift": [[1, 9.0, 1.0, 9.0, 1.0], [2, 5.0 - number, 1.0, 1.0, 1.0 + number]],
        }
        rows += [whole, whole | {"method": "late", "score": 0.5 + 0.01 * number}]
    (line,) = regimes.predictor_lines(rows, list("01234"))
    assert line == ["late", "-1.00", "-1.00", "-1.00", "+1.00", "+1.00", "-1.00"]
