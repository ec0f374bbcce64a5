"""Grouping, baselines and figures, on small runs whose numbers can be checked by eye."""

import csv
import io
import json

import pytest

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import flatten
from fedfrozen_app.report.compare import collect
from fedfrozen_app.report.compare.grouping import differing_keys, labels
from fedfrozen_app.report.compare.tables import (
    footnotes,
    runs_csv,
    sheets,
    to_csv,
    to_latex,
    to_markdown,
    to_terminal,
)
from tests.report.compare.conftest import config


def test_groups_are_everything_but_the_seed(save, tmp_path):
    for strategy in ("fedavg", "fedprox", "fedfrozen"):
        for alpha in (0.1, 0.5):
            for seed in (0, 1):
                save(f"{strategy}-{alpha}-{seed}", [0.1, 0.8], strategy=strategy, alpha=alpha, seed=seed)
    found = collect([tmp_path])
    assert [group.label for group in found.groups] == [
        *("fedavg alpha=0.1", "fedfrozen alpha=0.1", "fedprox alpha=0.1"),
        *("fedavg alpha=0.5", "fedfrozen alpha=0.5", "fedprox alpha=0.5"),
    ]
    assert all([run.seed for run in group.runs] == [0, 1] for group in found.groups)
    # Each against FedAvg at its own alpha; strategy.mu tells nothing, for only one strategy has it.
    assert [group.test and group.test.baseline for group in found.groups] == [
        *(None, "fedavg alpha=0.1", "fedavg alpha=0.1"),
        *(None, "fedavg alpha=0.5", "fedavg alpha=0.5"),
    ]
    assert found.groups[0].settings == {"strategy.name": "fedavg", "partition.alpha": 0.1}
    assert found.common["num_rounds"] == 3 and "seed" not in found.common
    assert any("no test is meaningful" in note for note in found.notes)


def test_who_was_told_of_a_run_is_no_setting(save, tmp_path):
    for seed, told in enumerate([True, False]):
        save(str(seed), [0.1, 0.8], seed=seed, run_id=f"r{seed}", track={"wandb": told})
    (group,) = collect([tmp_path]).groups
    assert [run.seed for run in group.runs] == [0, 1]


def test_a_setting_of_one_strategy_counts_where_it_differs_within():
    found = [config("fedavg"), config("fedprox")]
    settings = [flatten(part) for part in (*found, {**found[1], "strategy": {"name": "fedprox", "mu": 1.0}})]
    differing = differing_keys(settings)
    assert differing == ["strategy.name", "strategy.mu"]
    assert labels(settings, differing) == ["fedavg", "fedprox mu=0.01", "fedprox mu=1"]


def test_figures_of_one_run(save, tmp_path):
    save("run", [0.1, 0.5, 0.9, *([0.85] * 18)])
    (group,) = collect([tmp_path / "run"], target=0.8).groups
    figures = group.runs[0].metrics
    assert figures["final"] == 0.85 and figures["best"] == 0.9
    assert figures["best_minus_final"] == pytest.approx(0.05)
    assert (figures["rounds_to_target"], figures["bytes_to_target"]) == (2, 220)
    assert figures["worst_client"] == pytest.approx(0.83)
    assert "std_last_10" not in figures and "selected" not in figures


def test_a_target_that_only_some_reach_is_a_restricted_mean(save, tmp_path):
    """A run that never reaches it counts with all rounds and bytes: it is no run of which to say nothing."""
    save("a", [0.1, 0.9, 0.9, 0.9, 0.9], seed=0)
    save("b", [0.1, 0.2, 0.2, 0.2, 0.2], seed=1)
    found = collect([tmp_path], target=0.5)
    (group,) = found.groups
    assert group.spreads["rounds_to_target"].values == {0: 1.0, 1: 4.0}
    assert group.spreads["bytes_to_target"].values == {0: 110.0, 1: 440.0}
    assert [run.reached for run in group.runs] == [True, False]
    cost = next(sheet for sheet in sheets(found) if sheet.title == "Cost")
    assert "rounds to 0.5 (of 4)" in cost.headings and "2.5 ± 2.1 (1 of 2 censored)" in cost.rows[0]
    assert any("restricted mean" in note and "all 4 rounds" in note for note in footnotes(found))
    cost = next(sheet for sheet in sheets(collect([tmp_path], target=0.95)) if sheet.title == "Cost")
    assert cost.rows[0].count("not reached") == 2  # neither rounds nor bytes are a figure


def test_all_runs_have_the_same_rounds_to_reach_a_target_in(save, tmp_path):
    """Longer runs count up to the end of the shortest; one that stopped early had what it was allowed."""
    save("long", [0.1, 0.2, 0.3, 0.4, 0.9], strategy="fedavg", num_rounds=4)
    save("short", [0.1, 0.2, 0.3], strategy="fedprox", num_rounds=2)
    found = collect([tmp_path], target=0.8)
    assert found.horizon == 2
    assert {group.label.split()[0]: group.spreads["rounds_to_target"].mean for group in found.groups} == {
        **{"fedavg": 2.0, "fedprox": 2.0}
    }
    assert not any(run.reached for group in found.groups for run in group.runs)
    save("stopped", [0.1, 0.2], strategy="fedfrozen", num_rounds=4, status="stopped early")
    assert collect([tmp_path], target=0.8).horizon == 2


def test_intervals_end_where_the_metric_does(save, tmp_path):
    for seed, value in enumerate([0.99, 0.9, 1.0]):
        save(str(seed), [0.1, value], seed=seed)
    found = collect([tmp_path])
    assert found.groups[0].spreads["final"].high == 1.0
    quality = next(sheet for sheet in sheets(found) if sheet.title == "Quality")
    assert quality.rows[0][3].endswith("to 1.0000")
    for seed, value in enumerate([0.01, 0.0, 0.1]):
        save(f"low-{seed}", [0.1, value], seed=seed, strategy="fedprox")
    assert collect([tmp_path]).groups[-1].spreads["final"].low == 0.0


def test_no_stability_of_a_few_rounds(save, tmp_path):
    few = save("few", [0.1, 0.9, 0.8])
    summary = json.loads((few / "summary.json").read_text())
    summary["stability"]["std_last_10"] = 0.07  # as older versions wrote it, of two rounds
    (few / "summary.json").write_text(json.dumps(summary))
    found = collect([few])
    assert not {"std_last_10", "best_minus_final"} & found.groups[0].spreads.keys()
    assert [sheet.title for sheet in sheets(found)] == ["Quality", "Cost"]
    assert any(note.startswith("No stability: it takes 20 evaluated rounds") for note in footnotes(found))
    many = save("many", [0.1, *([0.8, 0.9] * 10)], strategy="fedprox")
    found = collect([many])
    assert found.groups[0].spreads["best_minus_final"].mean == 0.0
    assert [sheet.title for sheet in sheets(found)] == ["Quality", "Stability", "Cost"]


SGD = {"optimizer": "sgd", "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "batch_size": 16}
ADAMW = {"optimizer": "adamw", "lr": 0.001, "momentum": 0.9, "weight_decay": 0.01, "batch_size": 16}


def test_a_method_that_brings_its_client_is_tested_and_the_comparison_says_so(save, tmp_path):
    for seed in range(6):
        wobble = ((seed * 7) % 10) / 1000
        for alpha in (0.1, 0.5):
            words = f"partition.alpha={alpha} seed={seed}"
            save(
                f"a{alpha}{seed}",
                [0.1, 0.8 + wobble],
                alpha=alpha,
                seed=seed,
                client=ADAMW,
                command=f"strategy=fedavg {words}",
            )
            save(
                f"s{alpha}{seed}",
                [0.1, 0.9 + wobble + (seed % 3) / 1000],
                strategy="scaffold",
                alpha=alpha,
                seed=seed,
                client=SGD,
                command=f"strategy=scaffold {words}",
            )
    found = collect([tmp_path])
    assert [group.label for group in found.groups] == [
        *("fedavg alpha=0.1", "scaffold alpha=0.1", "fedavg alpha=0.5", "scaffold alpha=0.5")
    ]
    tests = {group.label: group.test for group in found.groups if group.test}
    assert {label: (test.baseline, test.verdict) for label, test in tests.items()} == {
        "scaffold alpha=0.1": ("fedavg alpha=0.1", "better"),
        "scaffold alpha=0.5": ("fedavg alpha=0.5", "better"),
    }
    assert tests["scaffold alpha=0.1"].beside == [
        "client.lr=0.1 (baseline: 0.001)",
        "client.momentum=0 (baseline: 0.9)",
        "client.optimizer=sgd (baseline: adamw)",
        "client.weight_decay=0 (baseline: 0.01)",
    ]
    (_, *rows) = next(sheet for sheet in sheets(found) if "against the baseline" in sheet.title).rows
    assert rows[0][-2:] == ["better", "client (4 settings)"]
    (*_, table) = to_terminal(found)  # of 80 columns: the note below has the settings
    assert [str(column.header) for column in table.columns][-1] == "verdict"
    (note,) = [note for note in found.notes if "with the settings that the method brings" in note]
    assert note.startswith("scaffold alpha=0.1, scaffold alpha=0.5 are tested")
    beside = list(csv.DictReader(io.StringIO(to_csv(found))))[1]["test_beside"]
    assert beside.startswith("client.lr=0.1 (baseline: 0.001); client.momentum")

    # With a baseline of the same settings, that one counts, and nothing is left to say.
    for seed in range(6):
        save(
            f"even{seed}",
            [0.1, 0.85],
            seed=seed,
            client=SGD,
            command=f"strategy=fedavg client=sgd client.lr=0.1 partition.alpha=0.1 seed={seed}",
        )
    found = collect([tmp_path])
    (test,) = [group.test for group in found.groups if group.label.startswith("scaffold alpha=0.1")]
    assert "sgd" in test.baseline or "lr=0.1" in test.baseline
    assert test.beside == []


def test_settings_that_people_chose_are_no_property_of_a_method(save, tmp_path):
    save("a", [0.1, 0.8], client=ADAMW, command="strategy=fedavg client.lr=0.001")
    save(
        "b",
        [0.1, 0.8],
        strategy="fedprox",
        client=ADAMW | {"lr": 0.1},
        command="strategy=fedprox client.lr=0.1",
    )
    found = collect([tmp_path])
    assert [group.label for group in found.groups] == ["fedavg lr=0.001", "fedprox lr=0.1"]
    assert not any(group.test for group in found.groups)
    assert (
        "fedprox lr=0.1 is not tested: beside the method it differs in client.lr=0.1 (baseline: 0.001); "
        "run the baseline with these settings too." in found.notes
    )


def test_methods_on_other_data_are_not_tested_against_each_other(save, tmp_path):
    save("a", [0.1, 0.8], dataset={"name": "digits"}, command="strategy=fedavg")
    save("b", [0.1, 0.8], strategy="fedotp", dataset={"name": "digit_words"}, command="strategy=fedotp")
    found = collect([tmp_path])
    assert not any(group.test for group in found.groups)
    assert (
        "fedotp is not tested: beside the method it differs in dataset.name=digit_words (baseline: digits); "
        "its data are not the baseline's." in found.notes
    )


def test_a_long_value_is_cut_in_a_label_unless_two_groups_would_look_alike(save, tmp_path):
    places = [f"/a/long/folder/with/many/parts/{name}" for name in ("one", "two")]
    for place in places:
        save(place[-3:], [0.1, 0.8], num_rounds=3, note=place, command=f"note={place}")
    assert [group.label for group in collect([tmp_path]).groups] == [f"note={place}" for place in places]
    for place in ("one" + "x" * 60, "two" + "x" * 60):
        save(place[:2], [0.1, 0.8], strategy="fedprox", note=place, command=f"strategy=fedprox note={place}")
    own = [group.label for group in collect([tmp_path / "on", tmp_path / "tw"]).groups]
    assert own == [f"note={place}{'x' * 24}…" for place in ("one", "two")]


def test_the_default_target_is_reached_by_every_group_on_average(save, tmp_path):
    save("a", [0.1, 0.937], strategy="fedavg")
    save("b", [0.1, 0.912], strategy="fedprox")
    assert collect([tmp_path]).target == 0.91


def test_what_is_left_out_is_told(save, tmp_path):
    whole = save("a", [0.1, 0.9])
    save("b", [0.1, 0.9])
    save("c", [0.1, 0.5], status="interrupted", seed=1)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "status.json").write_text(json.dumps({"reason": "it had no clients"}))
    save("e", [0.1, float("nan")], seed=2)
    found = collect([tmp_path])
    assert [run.folder for group in found.groups for run in group.runs] == [whole]
    reasons = {folder.name: reason for folder, reason in found.left_out}
    assert reasons["b"].startswith("the same settings and seed as")
    assert reasons["c"] == "interrupted" and reasons["d"] == "it had no clients"
    assert "NaN" in reasons["e"]


def test_bad_questions(save, tmp_path):
    with pytest.raises(UserError, match="There is no folder"):
        collect([tmp_path / "nowhere"])
    with pytest.raises(UserError, match="no finished run"):
        collect([tmp_path])
    for seed in (0, 1):
        for alpha in (0.1, 0.5):
            save(f"{alpha}-{seed}", [0.1, 0.9], alpha=alpha, seed=seed)
    assert "No baseline was named" in collect([tmp_path]).notes[0]
    with pytest.raises(
        UserError, match=r"None of these runs has the baseline's settings \(partition.alpha=7\)"
    ):
        collect([tmp_path], baseline=["partition.alpha=7"])
    with pytest.raises(UserError, match="is no setting"):
        collect([tmp_path], baseline=["fedavg"])
    save("f1", [0.1, 0.9], metric="f1", seed=2)
    with pytest.raises(UserError, match="compare them separately"):
        collect([tmp_path])


def test_a_baseline_that_could_be_several(save, tmp_path):
    save("a", [0.1, 0.9], strategy="fedprox")
    save("b", [0.1, 0.9], strategy="fedavg")
    save("c", [0.1, 0.9], strategy="fedavg", alpha=0.5)
    found = collect([tmp_path], baseline=["strategy=fedavg"])
    assert [g.test.baseline for g in found.groups if g.test] == ["fedavg alpha=0.1"]
    with pytest.raises(UserError, match="add settings to --baseline"):
        collect([tmp_path], baseline=["strategy=fedavg", "partition=dirichlet"])


def test_a_group_without_its_like_is_not_tested(save, tmp_path):
    save("a", [0.1, 0.9], strategy="fedavg", num_rounds=5)
    save("b", [0.1, 0.9], strategy="fedprox", num_rounds=9)
    found = collect([tmp_path])
    assert not any(group.test for group in found.groups)
    assert any(
        note.startswith("fedprox num_rounds=9 is not tested: beside the method it differs in num_rounds=9 (")
        for note in found.notes
    )


@pytest.fixture
def ten_seeds(save, tmp_path):
    for seed in range(10):
        wobble = ((seed * 7) % 10) / 1000
        save(f"base-{seed}", [0.1, 0.90 + wobble], seed=seed)
        save(f"better-{seed}", [0.1, 0.92 + wobble + (seed % 3) / 1000], strategy="fedprox", seed=seed)
    return tmp_path


def test_a_two_point_gain_is_found_from_folders(ten_seeds):
    found = collect([ten_seeds])
    (test,) = [group.test for group in found.groups if group.test]
    assert test.verdict == "better" and test.difference == pytest.approx(0.0209)
    assert len(test.seeds) == 10


def test_the_command_prints_tables_and_writes_files(ten_seeds, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert command(["compare", str(ten_seeds), "--baseline", "strategy=fedavg", "--target", "0.91"]) == 0
    out = capsys.readouterr().out
    assert "fedprox" in out and "better" in out and "Student interval" in out
    assert {path.name for path in ten_seeds.glob("comparison*")} >= {
        *("comparison.csv", "comparison_runs.csv", "comparison.md", "comparison.tex", "comparison.html")
    }
    (first, second) = csv.DictReader((ten_seeds / "comparison.csv").open())
    assert first["label"] == "fedavg" and second["test_verdict"] == "better"
    assert float(second["final_mean"]) == pytest.approx(0.9254)
    assert len(list(csv.DictReader((ten_seeds / "comparison_runs.csv").open()))) == 20
    assert command(["compare", str(ten_seeds / "nowhere")]) == 2


def test_markdown_and_latex_have_whole_tables(ten_seeds):
    found = collect([ten_seeds])
    lines = [line for line in to_markdown(found).splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines[:4]}) == 1 and len(lines) == 4 + 4 + 3
    latex = to_latex(found)
    assert latex.count(r"\begin{tabular}") == latex.count(r"\end{tabular}") == 3
    rows = [line for line in latex.splitlines() if line.endswith(r"\\")]
    assert r"$\pm$" in latex and r"d\_z" in latex
    assert len({row.count("&") for row in rows[:3]}) == 1
    assert len(list(csv.reader(io.StringIO(to_csv(found))))) == 3
    assert len(list(csv.reader(io.StringIO(runs_csv(found))))) == 21


def test_different_versions_are_told(save, tmp_path):
    save("a", [0.1, 0.9], seed=0)
    other = save("b", [0.1, 0.9], seed=1)
    summary = json.loads((other / "summary.json").read_text())
    summary["versions"]["torch"] = "9.9"
    (other / "summary.json").write_text(json.dumps(summary))
    assert "The runs were made with different versions of torch: 2.13, 9.9." in collect([tmp_path]).notes
