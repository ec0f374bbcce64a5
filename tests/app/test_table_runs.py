"""Whole runs on a table: both runners, strategies that act on the attention kernel, adapters, privacy."""

import json

import numpy as np
import pandas
import pytest
import torch

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.preprocessing import read_statistics
from fedfrozen_app.report.compare.collect import collect as compare_runs
from tests.conftest import slowly
from tests.local.runners import THREE_ROUNDS, compare

TASKS = {
    "classification": ["dataset.label_column=ill"],
    "multilabel": ["dataset.label_column=signs"],
    "regression": ["dataset.label_column=days"],
    "survival": ["dataset.time_column=days", "dataset.event_column=died"],
    "discrete": ["dataset.time_column=days", "dataset.event_column=died", "dataset.survival_model=discrete"],
}
METRICS = {"classification": "accuracy", "multilabel": "f1", "regression": "r2"}


@pytest.fixture
def table(tmp_path):
    """Three sites of unlike sizes, with missing values; ages decide."""
    rng = np.random.default_rng(0)
    lines = ["site,age,sex,dose,ill,signs,days,died"]
    for row in range(90):
        age, sex = rng.normal(60, 10), "mf"[int(rng.integers(2))]
        dose = "" if rng.random() < 0.1 else f"{rng.normal():.3f}"
        ill = age + rng.normal(0, 4) > 60
        days = max(1, round(200 - 2 * age + rng.normal(0, 8)))
        signs = ";".join(name for name, has in (("old", age > 60), ("m", sex == "m")) if has) or "none"
        lines.append(
            f"{'abbccc'[row % 6]},{age:.2f},{sex},{dose},{int(ill)},{signs},{days},{int(rng.random() < 0.7)}"
        )
    path = tmp_path / "patients.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def words(table, task, *more):
    asked = "survival" if task == "discrete" else task
    columns = ["dataset.columns=[age,sex,dose]", "partition=natural", "partition.column=site"]
    own = ["num_clients=null", "dataset.limit=null", "track.tensorboard=false", "client.batch_size=8"]
    return [
        "dataset=table",
        f"dataset.path={table}",
        f"dataset.task={asked}",
        *TASKS[task],
        *columns,
        *own,
        *more,
    ]


@pytest.mark.parametrize("task", ["survival", *slowly(*(task for task in TASKS if task != "survival"))])
def test_both_runners_train_the_same_model_in_float64(train, table, task):
    """Sites with unlike numbers of batches, so that some rows are padding."""
    given = words(table, task, "strategy=fedfrozen", "model.dtype=float64", *THREE_ROUNDS)
    one = train(*given, folder="one")
    other = train(*given, "runtime.runner=cohort", folder="other")
    # A constant cancels in Cox's likelihood: the last norm's bias has no gradient but rounding noise.
    compare(one, other, 1e-9, per_tensor=task != "survival")
    metric = METRICS.get(task, "c_index")
    for row, twin in zip(one.rows, other.rows, strict=True):
        assert row[f"test_{metric}"] == pytest.approx(twin[f"test_{metric}"], abs=1e-9)
    summary = one.summary
    assert summary[f"final_test_{metric}"] == one.rows[-1][f"test_{metric}"]
    assert summary[f"best_test_{metric}"] == max(row[f"test_{metric}"] for row in one.rows)
    assert "client_val_after" in one.rows[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [["strategy=safl", "strategy.top_k=1"], ["strategy=fedavg", "adapter=lora", "adapter.rank=2"]],
    ids=["safl", "lora"],
)
def test_both_runners_agree_where_layers_or_adapters_train(train, table, more):
    given = words(table, "classification", *more, "model.dtype=float64", *THREE_ROUNDS)
    one = train(*given, folder="one")
    other = train(*given, "runtime.runner=cohort", folder="other")
    compare(one, other, 1e-9)
    assert one.rows[-1]["test_loss"] == pytest.approx(other.rows[-1]["test_loss"], abs=1e-9)


@pytest.mark.parametrize("model", ["cox", "discrete"])
def test_a_survival_report_has_scores_by_site(train, table, model):
    """By hand from the stored model: C-index and Brier score on each site's test rows, and on all."""
    from fedfrozen_app.tasks.survival_scores import baseline_hazard, brier_of_site, harrell_c
    from tests.conftest import worker_of

    task = "survival" if model == "cox" else "discrete"
    given = words(table, task, "strategy=fedavg", "model=linear", "num_rounds=2", "runtime.threads=1")
    given = [word for word in given if word != "dataset.limit=null"]
    run = train(*given, "dataset.limit=null", small=False)
    found = json.loads((run.folder / "sites.json").read_text())
    worker = worker_of(*given)
    worker.load(run.model, {})
    names = ("all test rows", *worker.shares.partition.names)
    assert [row["name"] for row in found["rows"]] == list(names) and found["reference"] == "train"
    assert sum(row["rows"] for row in found["rows"][1:]) == found["rows"][0]["rows"]
    assert found["rows"][0]["c_index"] == pytest.approx(run.rows[-1]["test_c_index"])
    page = (run.folder / "report.html").read_text()
    assert "<h2>Sites</h2>" in page and f"{found['rows'][0]['brier']:.4f}" in page
    if model == "discrete":
        assert all(0 < row["brier"] < 0.6 for row in found["rows"])
        return
    rows = np.concatenate([worker.rows(client).train.numpy() for client in "012"])
    known = worker.train_table.take(torch.as_tensor(rows))
    risk = worker.task.all_logits(known)[:, 0].double().numpy()
    time, event = known.labels.numpy().T
    times = np.unique(np.quantile(time[event > 0], np.linspace(0.1, 0.9, 33)))
    hazard = baseline_hazard(time, event, risk, times)
    for row, index in zip(found["rows"][1:], worker.shares.test, strict=True):
        own = worker.data.test_table.take(torch.as_tensor(index))
        scores = worker.task.all_logits(own)[:, 0].double().numpy()
        curves = np.exp(-np.exp(scores)[:, None] * hazard)
        brier = brier_of_site(time, event, *own.labels.numpy().T, curves, times)
        assert row["brier"] == pytest.approx(brier, rel=1e-6)
        assert row.get("c_index", np.nan) == pytest.approx(
            harrell_c(*own.labels.numpy().T, scores), rel=1e-6, nan_ok=True
        )


def test_scores_by_site_of_a_masked_run_read_no_client_s_rows(train, table):
    run = train(*words(table, "survival", "strategy=fedavg", "model=linear", "num_rounds=1",
                       "secure_aggregation=on"), small=False)  # fmt: skip
    found = json.loads((run.folder / "sites.json").read_text())
    assert found["reference"] == "test" and not any("brier" in row for row in found["rows"])
    assert "no Brier score" in (run.folder / "report.html").read_text()


def test_a_run_writes_how_its_cells_became_numbers_and_another_reads_it(train, table):
    run = train(*words(table, "regression", "strategy=fedavg", "num_rounds=1"))
    written = json.loads((run.folder / "table.json").read_text())
    assert set(written["columns"]) == {"age", "sex", "dose"} and written["columns"]["dose"]["indicator"]
    record = json.loads((run.folder / "data.json").read_text())
    assert record["columns"] == {"numeric": ["age", "dose"], "categorical": {"sex": 2}}
    assert "final_test_mae" in run.summary
    again = train(
        *words(table, "regression", "strategy=fedavg", "num_rounds=1"),
        f"dataset.statistics={run.folder / 'table.json'}",
        folder="again",
    )
    assert again.rows[-1]["test_r2"] == run.rows[-1]["test_r2"]
    found = compare_runs([run.folder, again.folder])
    assert found.metric == "r2"


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ["strategy=safl"],
        ["strategy=fedper"],
        ["strategy=fedavg", "adapter=lora", "adapter.rank=2"],
        ["strategy=scaffold", "client=sgd", "model=mlp", "~model.config.intermediate_size"],
        ["strategy=fedavg", "dataset.normalise=site", "personal=true"],
        ["strategy=fedavg", "secure_aggregation=on"],
    ],
    ids=lambda more: " ".join(more[:2]),
)
def test_methods_act_on_tables(train, table, more):
    small = not any("model=mlp" in word for word in more)
    more = [word for word in more if not word.startswith("~")]
    given = words(table, "classification", "num_rounds=2", *more)
    run = train(*given, small=small)
    assert run.rows[-1]["round"] == 2 and "test_accuracy" in run.summary | run.rows[-1]


def test_plain_models_of_the_same_table(train, table):
    """On rows that age decides trees do well, and a site alone no better than all together."""
    from fedfrozen_app.baselines.same_rows import same_rows, table_cells
    from fedfrozen_app.baselines.score import scores
    from tests.conftest import worker_of

    cells = table_cells({"numbers": torch.ones(2, 1), "categories": torch.tensor([[0], [2]])}, (3,))
    assert cells.tolist() == [[1, 1, 0, 0], [1, 0, 0, 1]]
    for task, metric in (("classification", "accuracy"), ("regression", "r2")):
        given = words(table, task, "strategy=fedavg", "model=linear", "runtime.threads=1")
        worker = worker_of(*(word for word in given if word != "dataset.limit=null"))
        rows = same_rows(worker.config, worker.corpus, worker.shares, quick=False)
        linear, trees, alone = scores(rows)
        parts = worker.shares.partition
        assert {name: len(places) for name, places in rows.sites.items()} == {
            name: len(part) for name, part in zip(parts.names, parts.indices, strict=True)
        }
        by_site = [own[metric] for own in alone["by_client"].values() if metric in own]
        assert list(alone["by_client"]) == list("abc") and alone[metric] == pytest.approx(np.mean(by_site))
        assert linear["name"].endswith("on the columns") and linear[metric] > 0.5
        assert "each site alone" in alone["name"] and alone[metric] <= trees[metric]


def test_own_scale_is_the_client_s_own(table):
    from tests.conftest import worker_of

    given = words(table, "classification", "strategy=fedavg", "model=linear", "runtime.threads=1")
    given = [word for word in given if word != "dataset.limit=null"]
    site, federation = (worker_of(*given, f"dataset.normalise={how}") for how in ("site", "federation"))
    for client in "012":
        rows = site.rows(client).train
        own = site.train_table.inputs["numbers"][rows][:, :2]
        assert own.mean(dim=0).abs().max() < 1e-12
        assert (own.std(dim=0, unbiased=False) - 1).abs().max() < 1e-12
        tested = site.data.client_test_rows(client)
        plain = federation.data.client_test_rows(client)
        assert len(tested) == len(plain) and not tested.inputs["numbers"].equal(plain.inputs["numbers"])
    held = site.shares.validation
    same = site.train_table.inputs["numbers"][held], federation.train_table.inputs["numbers"][held]
    assert same[0].equal(same[1])  # the server's own rows


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ([], "does not cover a table's medians"),
        (["dataset.statistics=FILE", "dataset.normalise=site"], "dataset.normalise=site scales"),
    ],
)
def test_a_private_run_needs_public_statistics(train, table, more, sentence):
    given = [word.replace("FILE", str(table)) for word in more]
    with pytest.raises(UserError, match=sentence):
        train(*words(table, "classification", "strategy=fedavg", "privacy=dp_sgd", *given))


def test_a_private_cox_model_is_refused(train, table):
    given = words(table, "survival", "strategy=fedavg", "privacy=dp_sgd", f"dataset.statistics={table}")
    with pytest.raises(UserError, match="Cox's loss compares the people of a batch"):
        train(*given)


def test_a_census_of_the_sites_says_how_cells_become_numbers(train, table, tmp_path):
    """No row is read for it: intervals and words, with floors, or with noise that a private run needs."""
    place = tmp_path / "census"
    columns = ["--column", "age=30,45,55,65,90", "--column", "sex=f,m", "--column", "dose=-4,0,4"]
    shared = ["dataset=table", f"dataset.path={table}", "dataset.label_column=ill", "partition=natural"]
    line = ["census", *shared, "partition.column=site", "num_clients=null", *columns, "--floor", "2"]
    assert command([*line, f"output_dir={place}"]) == 0
    census = json.loads((place / "census.json").read_text())
    found = read_statistics(str(place / "census.json"))["columns"]
    frame = pandas.read_csv(table)
    assert set(found) == {"age", "sex", "dose"} and found["sex"] == {"levels": ["f", "m"]}
    assert census["pooled"]["rows"] <= len(frame)  # less the server's own
    assert found["age"]["mean"] == pytest.approx(frame["age"].mean(), abs=2)
    assert found["age"]["scale"] == pytest.approx(frame["age"].std(), abs=2)
    assert found["age"]["median"] == pytest.approx(frame["age"].median(), abs=5)
    given = words(table, "classification", "strategy=fedavg", "model=linear", "num_rounds=1")
    run = train(*given, f"dataset.statistics={place / 'census.json'}", small=False)
    assert json.loads((run.folder / "table.json").read_text())["columns"] == found

    private = [*given, "privacy=dp_sgd", "privacy.seeded_noise=true"]
    private = [word for word in private if not word.startswith("dataset.client_validation")]
    with pytest.raises(UserError, match="a census without noise, which privacy=dp_sgd does not cover"):
        train(*private, f"dataset.statistics={place / 'census.json'}", folder="refused", small=False)
    assert command([*line, "--epsilon", "20", f"output_dir={tmp_path / 'noised'}"]) == 0
    private.append(f"dataset.statistics={tmp_path / 'noised' / 'census.json'}")
    noised = train(*private, folder="private", small=False)
    assert noised.rows[-1]["epsilon_max"] > 0


def test_a_census_that_counted_no_column_is_no_statistics(tmp_path):
    path = tmp_path / "census.json"
    path.write_text(json.dumps({"pooled": {"tables": {"total": {}}, "moments": {}, "quantiles": {}}}))
    with pytest.raises(UserError, match="the census counted no column"):
        read_statistics(str(path))
