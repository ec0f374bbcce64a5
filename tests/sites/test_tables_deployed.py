"""A table over Flower's own processes: three real sites with TLS and node keys; one forbids a column.

`pytest -m slow tests/sites/test_tables_deployed.py`
"""

import json

import numpy as np
import pandas
import pytest
from sksurv.nonparametric import kaplan_meier_estimator

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.sites.audit_log import read_audit
from fedfrozen_app.sites.kit import Kit
from tests.conftest import Run
from tests.sites.federation import SITES, federation
from tests.sites.test_tables import COLUMNS, VIEWS, patients
from tests.sites.twin import join

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
EDGES = [0, 60, 80, 100, 200]
POLICY = {
    "survival": "binned", "census_floor": 3, "survival_edges": EDGES, "survival_groups": {"sex": ["f", "m"]},
    "survival_columns": ["days", "died", "sex"], "strategies": ["fedfrozen"],
}  # fmt: skip


def test_a_run_and_a_survival_page_of_which_one_site_refuses_a_column(tmp_path):
    server, edges = tmp_path / "server.csv", tmp_path / "edges.txt"
    patients(3).to_csv(server, index=False)
    edges.write_text(" ".join(map(str, EDGES)))
    with federation(tmp_path / "fed") as deployment:
        for number, site in enumerate(SITES):
            patients(number).to_csv(deployment.kits / site / "patients.csv", index=False)
        join(deployment, SITES, network=False)
        for site in SITES:  # from the next message on
            deployment.change(site, "site.yaml", views={"main": VIEWS["classification"]})
            deployment.change(site, "policy.yaml", **POLICY)
        deployment.change("west", "policy.yaml", forbidden_columns=["sex"])
        own = ["runtime=deployed", f"runtime.server_kit={deployment.kits}/operator"]
        run = tmp_path / "run"
        table = ["dataset=table", f"dataset.path={server}", "dataset.label_column=ill"]
        table += ["dataset.columns=[" + ",".join(COLUMNS) + "]", "client.batch_size=8", "num_rounds=2"]
        table.append("client.local_epochs=10")  # enough of them to learn that age decides
        small = [
            f"model.config.{key}={value}" for key, value in {"hidden_size": 8, "num_hidden_layers": 1}.items()
        ]
        small += ["model.config.num_attention_heads=2", "model.config.intermediate_size=16", "device=cpu"]
        line = [*own, *table, *small, "strategy=fedfrozen", "strategy.warmup_rounds=1", "runtime.min_nodes=2"]
        assert command([*line, f"output_dir={run}", f"hydra.run.dir={run}"]) == 0
        rows = Run(run).rows
        assert [row["clients_ok"] for row in rows[1:]] == [2, 2] and rows[-1]["test_accuracy"] > 0.5
        assert rows[-1]["test_loss"] < rows[0]["test_loss"]
        asked = ["--time", "days", "--event", "died", "--group", "sex=f,m", "--edges", str(edges)]
        line = ["survival", *own, "runtime.min_nodes=3", *asked, f"output_dir={tmp_path / 'out'}"]
        assert command(line) == 0
        logs = {site: read_audit(Kit.read(deployment.kits / site).audit) for site in SITES}
    for site in ("north", "south"):
        assert [entry["event"] for entry in logs[site]] == ["hello", "sent", "sent", "survival"]
    assert {entry["reason"] for entry in logs["west"]} == {
        "the run reads the column sex, which its policy forbids",
        "the study reads the column sex, which its policy forbids",
    }
    found = json.loads((tmp_path / "out" / "survival.json").read_text())
    assert set(found["sites"]) == {"north", "south"} and list(found["refused"]) == ["west"]
    frame, shown = pandas.concat([patients(0), patients(1)]), np.array([0.0, *found["all"]["times"]])
    time = shown[np.maximum(np.searchsorted(shown, np.minimum(frame["days"], shown[-1])), 1)]
    event = ((frame["died"] == 1) & (frame["days"] <= shown[-1])).to_numpy()
    _, survival = kaplan_meier_estimator(event, time)
    np.testing.assert_allclose(found["all"]["survival"], survival, rtol=0, atol=1e-12)
    assert "Survival at 2 sites" in (tmp_path / "out" / "survival.html").read_text()
