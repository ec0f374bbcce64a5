"""Tables at real sites: columns, levels and scales come with the proposal; a policy forbids columns."""

import json
from dataclasses import replace

import numpy as np
import pandas
import pytest
import torch

from fedfrozen_app.config import compose_run
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.federated import load_corpus
from fedfrozen_app.exchange.proposal import propose, read_proposal
from fedfrozen_app.exchange.strict import canonical
from fedfrozen_app.files.status import Detached
from fedfrozen_app.local.worker import make_data_spec
from fedfrozen_app.run.job import Job
from fedfrozen_app.sites.audit_log import read_audit
from fedfrozen_app.sites.site_check import check_data
from tests.conftest import slowly
from tests.sites.inprocess import Sites, copy_of

COLUMNS = ["age", "sex", "dose"]
VIEW = {"kind": "table", "path": "patients.csv", "columns": COLUMNS, "client_validation": 0.0}
VIEWS = {
    "classification": VIEW | {"label_column": "ill", "classes": ["0", "1"]},
    "regression": VIEW | {"label_column": "days", "task": "regression"},
    "survival": VIEW | {"time_column": "days", "event_column": "died", "task": "survival"},
}
TASKS = {
    "classification": ["dataset.label_column=ill"],
    "regression": ["dataset.task=regression", "dataset.label_column=days"],
    "survival": ["dataset.task=survival", "dataset.time_column=days", "dataset.event_column=died"],
    "discrete": [
        *("dataset.task=survival", "dataset.time_column=days", "dataset.event_column=died"),
        *("dataset.survival_model=discrete", "dataset.intervals=3"),
    ],
}


def patients(number: int, rows: int = 60) -> pandas.DataFrame:
    """A site's rows: ages decide; of the third site everybody is ill, and nobody has the event."""
    rng = np.random.default_rng(number)
    age, sex = rng.normal(55 + 5 * number, 10, rows), rng.choice(["f", "m"], rows)
    dose = np.where(rng.random(rows) < 0.1, np.nan, rng.normal(size=rows))
    ill = (age + rng.normal(0, 4, rows) > 58).astype(int)
    days = np.maximum(1, 200 - 2 * age + rng.normal(0, 8, rows)).round()
    frame = pandas.DataFrame({"age": age, "sex": sex, "dose": dose, "ill": ill, "days": days, "died": 1})
    return frame.assign(ill=1, died=0) if number == 2 else frame


WORDS = ("strategy=fedavg", "model=linear", "num_rounds=2", "client=sgd", "client.batch_size=8")


class TableSites(Sites):
    """Three sites with a table each, and a server with rows of its own."""

    def prepare(self) -> None:
        super().prepare()
        for number, name in enumerate(self.names):
            patients(number).to_csv(self.folder / "kits" / name / "patients.csv", index=False)
            self.change(name, "policy.yaml", strategies=["fedavg"])
        patients(3).to_csv(self.folder / "data" / "server.csv", index=False)
        set_view(self, "classification")

    def words(self, *overrides: str) -> list[str]:
        apart = ("dataset", "model")
        table = ["dataset=table", f"dataset.path={self.folder}/data/server.csv"]
        table.append("dataset.columns=[" + ",".join(COLUMNS) + "]")
        return [*table, *WORDS, *(word for word in super().words() if not word.startswith(apart)), *overrides]


def set_view(sites: Sites, task: str, /, **changes: object) -> None:
    for name in sites.names:
        sites.change(name, "site.yaml", views={"main": VIEWS[task] | changes})


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    TableSites(folder, rows=9).prepare()
    return folder


@pytest.fixture
def sites(prepared, tmp_path, monkeypatch):
    monkeypatch.setattr("fedfrozen_app.report.output.write_curves", lambda *args, **kwargs: None)
    copy_of(prepared, tmp_path / "sites")
    return TableSites(tmp_path / "sites", settings=())


def reason(sites: Sites, name: str = "north") -> str:
    return read_audit(sites.kit(name).audit)[-1].get("reason", "")


@pytest.mark.parametrize("task", ["classification", *slowly("regression", "survival", "discrete")])
def test_three_sites_train_on_their_tables(sites, task):
    """A site with one class, or without any event, trains as the others do."""
    set_view(sites, "survival" if task == "discrete" else task)
    run = sites.train(*TASKS[task])
    assert [row["clients_ok"] for row in run.rows[1:]] == [3, 3]
    assert all(np.isfinite(row["test_loss"]) for row in run.rows)
    for name in sites.names:
        assert [entry["event"] for entry in read_audit(sites.kit(name).audit)][-2:] == ["sent", "sent"]


@pytest.mark.parametrize("task", TASKS)
def test_a_table_run_is_handed_in_with_its_columns(sites, monkeypatch, task):
    """Before it is handed in the run is proposed once, so that what no site could be asked for ends here."""
    from fedfrozen_app.runtimes.flower import deployed

    handed = []

    class Federation:
        def sites(self):
            return list(sites.names)

        def submit(self, app, settings, resources):
            handed.append(settings)
            return 1

    monkeypatch.setattr(deployed, "connect", lambda config, folder: Federation())
    kit = f"runtime.server_kit={sites.folder}/kits/operator"
    composed = compose_run([*sites.words(*TASKS[task]), "runtime=deployed", kit])
    folder = sites.folder / "handed"
    (folder / "flower").mkdir(parents=True)
    with pytest.raises(Detached, match="Flower's run 1 goes on"):
        deployed.run_deployed(Job(composed, folder, detach=True))
    assert f"{sites.folder}/data/server.csv" not in handed[0]["overrides"]  # a path stays at the server


def test_sites_give_what_one_process_gives(sites, tmp_path, train):
    """The same rows by `partition=natural`, in whole batches, made into numbers by the run's table.json."""
    frames = []
    for number, name in enumerate(sites.names):
        frame = patients(number).assign(split=["train"] * 59 + ["test"])
        frame.to_csv(sites.folder / "kits" / name / "patients.csv", index=False)
        frames.append(frame.assign(site=name))
    more = [
        *TASKS["classification"],
        "model.dtype=float64",
        "client.batch_size=1000",
        "client.local_epochs=2",
    ]
    run = sites.train(*more)
    pandas.concat(frames).to_csv(tmp_path / "all.csv", index=False)
    apart = ("dataset.path", "runtime", "++runtime", "++run_id")
    kept = [word for word in sites.words(*more) if not word.startswith(apart)]
    kept += [f"dataset.path={tmp_path}/all.csv", f"dataset.statistics={run.folder / 'table.json'}"]
    held = ["dataset.client_validation=0", "dataset.validation=0"]
    twin = train(*kept, *held, "partition=natural", "partition.column=site", small=False)
    for name, value in run.model.items():
        torch.testing.assert_close(value, twin.model[name], rtol=0, atol=1e-12)


@pytest.mark.slow
def test_a_run_that_leaves_a_forbidden_column_out_has_all_sites(sites):
    sites.change("west", "policy.yaml", forbidden_columns=["sex"])
    run = sites.train(*TASKS["classification"], "dataset.columns=[age,dose]")
    assert [row["clients_ok"] for row in run.rows[1:]] == [3, 3]
    sites.change("west", "policy.yaml", forbidden_columns=["ill"])
    sites.train(*TASKS["classification"], "++runtime.min_nodes=2", folder="label")
    assert reason(sites, "west") == "the run reads the column ill, which its policy forbids"


def test_a_policy_forbids_a_column_by_name(sites):
    sites.change("west", "policy.yaml", forbidden_columns=["sex"])
    run = sites.train(*TASKS["classification"], "++runtime.min_nodes=2")
    assert [row["clients_ok"] for row in run.rows[1:]] == [2, 2]
    assert reason(sites, "west") == "the run reads the column sex, which its policy forbids"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"columns": ["age", "sex"]}, "reads the column dose, which the view main does not have"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ({"columns": None}, "does not say its columns"),
                ({"task": "regression"}, "a target of the kind table, and the view main has regression"),
                ({"kind": "text"}, "reads a table, and the view main is none"),
            )
        ),
    ],
)
def test_a_run_that_does_not_fit_the_view_is_refused(sites, change, sentence):
    set_view(sites, "classification", **change)
    with pytest.raises(UserError, match="Only 0 of 3"):
        sites.train(*TASKS["classification"])
    assert sentence in reason(sites)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda frame: frame.drop(columns="dose"), "names 'dose', which is no column"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (lambda frame: frame.assign(age="old"), "'old' in line 2 of patients.csv is no number"),
                (lambda frame: frame.assign(ill=7), "label"),
                (lambda frame: frame.assign(age=None, sex=None, dose=None), ""),
            )
        ),
    ],
)
def test_a_site_whose_rows_do_not_fit_is_left_out_and_its_log_says_why(sites, change, sentence, caplog):
    path = sites.folder / "kits" / "west" / "patients.csv"
    change(pandas.read_csv(path)).to_csv(path, index=False)
    run = sites.train(*TASKS["classification"], "++runtime.min_nodes=2")
    assert [row["clients_ok"] for row in run.rows[1:]] == [2, 2]
    entry = read_audit(sites.kit("west").audit)[-1]
    assert entry["event"] != "sent" and sentence in caplog.text + entry.get("reason", "")


def proposal_of(sites: Sites):
    config = compose_run([*sites.words(), *TASKS["classification"]]).config
    return propose(config, make_data_spec(load_corpus(config), config), "test", ["head"])


@pytest.mark.parametrize(
    "change",
    [
        {"columns": {}},
        {"columns": {"age": {"levels": []}}},
        {"columns": {"age": {"levels": ["a", "a"]}}},
        {"columns": {"age": {"levels": ["a\nb"]}}},
        {"columns": {"age": {"median": 0, "mean": 0, "scale": 0, "indicator": False}}},
        {"columns": {"age": {"median": 0, "mean": 0, "scale": 1}}},
        {"columns": {"age": {"median": 0, "mean": 0, "scale": 1, "indicator": False, "path": "/etc"}}},
        {"columns": {"": {"levels": ["a"]}}},
        {"normalise": "row"},
        {"target": {"edges": {"a": 1}}},
        {"path": "/etc/passwd"},
        {"query": "SELECT 1"},
    ],
    ids=str,
)
def test_a_hostile_table_part_is_no_proposal(sites, change):
    proposal = proposal_of(sites)
    assert read_proposal(proposal.text).table == proposal.table
    plain = json.loads(proposal.text)
    plain["table"] |= change
    with pytest.raises(ValueError, match="table"):
        read_proposal(canonical(plain))


def test_a_run_without_the_part_does_not_read_a_table(sites):
    kit = sites.kit("north")
    other = replace(proposal_of(sites), table=None)
    assert "reads no table, and the view main is one" in str(kit.views["main"].problem_of_table(other.table))


def test_the_check_names_what_a_view_lacks(sites):
    assert "60 rows to train on" in check_data(sites.kit("north")).replace("48", "60")
    set_view(sites, "survival", columns=None)
    with pytest.raises(Exception, match=r"does not say its columns.*columns: \[age, dose"):
        check_data(sites.kit("north"))
