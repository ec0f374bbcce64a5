"""`fedfrozen baselines`: the run's own model on all rows and at each site alone, in report and comparison."""

import json
from dataclasses import replace

import numpy as np
import pytest

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.baselines.own_model import ALONE, MOST_ALONE, POOLED, of_run, plain_settings, why_not
from fedfrozen_app.config import compose_run
from fedfrozen_app.data.federated import Shares
from fedfrozen_app.data.partition_spec import Partition
from fedfrozen_app.report.baseline_tables import read_baselines, spread_text
from fedfrozen_app.report.compare.collect import collect
from fedfrozen_app.report.compare.tables import sheets
from tests.conftest import slowly

SITES = "aabbbccccc"


@pytest.fixture(scope="module")
def patients(tmp_path_factory):
    """Three sites; age and dose say who is ill, and when an event comes."""
    rng = np.random.default_rng(3)
    lines = ["site,age,dose,ill,days,died"]
    for row in range(100):
        age, dose = rng.normal(60, 10), rng.normal()
        ill = age / 10 + dose + rng.normal(0, 0.5) > 6
        days = max(1, round(300 - 3 * age - 20 * dose + rng.normal(0, 5)))
        lines.append(f"{SITES[row % 10]},{age:.2f},{dose:.3f},{int(ill)},{days},{int(rng.random() < 0.8)}")
    path = tmp_path_factory.mktemp("patients") / "patients.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def words(path, *more):
    """Rates fall over the rounds, as a run's do; all in float64."""
    return [
        *("strategy=fedavg", "dataset=table", f"dataset.path={path}", "dataset.columns=[age,dose]"),
        *("model=linear", "model.dtype=float64", "partition=natural", "partition.column=site"),
        *("partition.min_size=1", "num_rounds=2", "client=sgd", "client.lr=0.1", "client.batch_size=8"),
        *("track.tensorboard=false", "runtime.threads=1", "baseline=false", "checkpoint.every=0"),
        *more,
    ]


ILL = "dataset.label_column=ill"
DAYS = ("dataset.task=survival", "dataset.time_column=days", "dataset.event_column=died")


def entries(run):
    return {one["name"]: one for one in json.loads((run.folder / "baselines.json").read_text())["baselines"]}


@pytest.mark.parametrize("task", [(ILL,), *slowly(DAYS)], ids=["classification", "survival"])
def test_pooled_and_alone_are_the_runs_that_they_stand_for(train, patients, task):
    """Pooled: one client with every row. Alone: a run that leaves all other clients out."""
    run = train(*words(patients, *task), small=False)
    metric = "c_index" if task is DAYS else "accuracy"
    assert command(["baselines", str(run.folder)]) == 0
    found = entries(run)
    one = words(patients, *task, "partition=iid", "num_clients=1", "partition.column=null")
    pooled = train(*one, folder="pooled", small=False)
    final = pooled.rows[-1]
    assert found[POOLED][metric] == pytest.approx(final[f"test_{metric}"], abs=1e-12)
    assert found[POOLED]["loss"] == pytest.approx(final["test_loss"], abs=1e-12)
    alone = {}
    for client, name in enumerate("abc"):
        others = ",".join(str(other) for other in range(3) if other != client)
        own = train(*words(patients, *task, f"exclude_clients=[{others}]"), folder=name, small=False)
        alone[name] = own.rows[-1]["test_loss"]
    own_losses = {name: values["loss"] for name, values in found[ALONE]["by_client"].items()}
    assert own_losses == pytest.approx(alone, abs=1e-12) and len(set(alone.values())) == 3
    assert found[ALONE]["loss"] == pytest.approx(np.mean(list(alone.values())), abs=1e-12)
    assert found[POOLED]["train_rows"] == found[ALONE]["train_rows"] == found[POOLED]["of_rows"]


def test_of_one_client_the_pooled_model_is_the_run_s_own_to_the_bit(train, patients):
    given = words(patients, ILL, "partition=iid", "num_clients=1", "partition.column=null")
    run = train(*given, "strategy=fedprox", "strategy.mu=1e-30", small=False)
    assert command(["baselines", str(run.folder)]) == 0
    found = entries(run)
    assert found[POOLED]["loss"] == found[ALONE]["loss"] == run.rows[-1]["test_loss"]
    page = (run.folder / "report.html").read_text()
    assert "<h2>Baselines</h2>" in page and POOLED.replace("'", "&#39;") in page
    assert f"{found[POOLED]['accuracy']:.4f}" in page


def test_report_and_comparison_say_what_baselines_have_by_hand(train, patients):
    runs = [train(*words(patients, ILL, f"seed={seed}"), folder=f"s{seed}", small=False) for seed in (0, 1)]
    assert "Baselines of the same rows" not in [sheet.title for sheet in sheets(compared(runs))]
    for run, value in zip(runs, (0.5, 0.7), strict=True):
        stored = {"rounds": 2, "baselines": [{"name": POOLED, "accuracy": value, "train_rows": 80}]}
        (run.folder / "baselines.json").write_text(json.dumps(stored))
    sheet = sheets(compared(runs))[-1]
    differences = [run.rows[-1]["test_accuracy"] - value for run, value in zip(runs, (0.5, 0.7), strict=True)]
    ((_, name, seeds, mean, change),) = sheet.rows
    assert (name, seeds, mean) == (POOLED, "2", "0.6000 ± 0.1414")
    assert change.startswith(f"{np.mean(differences):+.4f}")
    # A run that has gone on since has another model: its old baselines are not shown.
    assert read_baselines(runs[0].folder, 2) and not read_baselines(runs[0].folder, 3)


def compared(runs):
    return collect([run.folder for run in runs])


def test_a_damaged_file_is_left_out_with_a_line(tmp_path, caplog):
    (tmp_path / "baselines.json").write_text('{"baselines": [1]}')
    assert read_baselines(tmp_path, 2) == [] and "The baselines are left out" in caplog.text
    entry = {"by_client": {"a": {"r2": 0.25}, "b": {"r2": None}, "c": {"r2": 0.5}}, "of_clients": 40}
    assert spread_text(entry, "r2") == "0.2500 to 0.5000 (2 of 40)"


def test_a_model_that_its_method_brings_is_not_trained_without_it(caplog):
    def reason(*given):
        run, plain = (compose_run(["strategy=fedavg", *more]).config for more in (given, ()))
        return why_not(run, plain)

    assert reason() is None and reason("strategy=fedper") is None and reason("adapter=lora") is None
    assert "pictures of its own" in reason("partition=noise")
    assert "trains parts of a model" in reason("strategy=pfedmoap")


@pytest.mark.parametrize(
    "given", [("pacing=buffered", "pacing.concurrency=3", "pacing.buffer=2"), ("pacing=deadline",)]
)
def test_a_run_in_virtual_time_is_compared_with_models_that_wait_for_nobody(given):
    composed = compose_run(["strategy=fedavg", "clock=profiles", "num_clients=3", *given])
    plain = replace(composed, overrides=[], resolved=plain_settings(composed.resolved), recorded=True)
    assert (plain.config.clock.name, plain.config.pacing.name) == ("none", "synchronous")


def test_of_many_clients_some_train_alone_at_even_distances():
    rows = tuple(np.array([client]) for client in range(50))
    shares = Shares(np.array([], int), Partition(rows, "", tuple(f"s{n}" for n in range(50))))
    central = of_run(shares, frozenset({"49"}))
    drawn = central.drawn()
    assert len(drawn) == MOST_ALONE and drawn[0] == 0 and drawn[-1] == 48 and len(set(drawn)) == MOST_ALONE
    joined = central.together().partition
    assert joined.indices[0].tolist() == list(range(49)) and joined.names == ("all rows",)
