"""A survival study over Flower's own processes: three real sites with TLS and node keys.

`pytest -m slow tests/sites/test_survival_deployed.py`
"""

import json

import numpy as np
import pandas
import pytest
from sksurv.nonparametric import kaplan_meier_estimator
from statsmodels.duration.hazard_regression import PHReg

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.sites.audit_log import check_anchors, read_audit
from fedfrozen_app.sites.kit import Kit
from tests.sites.federation import SITES, federation
from tests.sites.test_survival_study import EDGES, POLICY, VIEW, people, rounded
from tests.sites.twin import join

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
ASKED = ["--time", "days", "--event", "died", "--group", "arm=0,1", "--covariates", "age,marker"]


def with_people(deployment):
    """Each site has people of its own, and a policy that lets them be counted."""
    join(deployment, SITES, network=False)
    for number, site in enumerate(SITES):
        people(number).to_csv(deployment.kits / site / "people.csv", index=False)
        deployment.change(site, "site.yaml", views={"main": VIEW})
        deployment.change(site, "policy.yaml", **POLICY)


def studied(deployment, out, *words):
    """What the command leaves."""
    edges = out.with_name("edges.txt")
    edges.write_text(" ".join(f"{edge:g}" for edge in EDGES))
    kit = f"runtime.server_kit={deployment.kits}/operator"
    line = ["survival", "runtime=deployed", kit, "runtime.min_nodes=3", *words, *ASKED]
    assert command([*line, "--edges", str(edges), f"output_dir={out}"]) == 0
    return json.loads((out / "survival.json").read_text())


def fitted(found, sites):
    """The study's curve and coefficients are those of the pooled rows of so many sites."""
    frame = pandas.concat([people(number) for number in range(sites)])
    time, event = rounded(frame, [0.0, *found["all"]["times"]])
    _, survival = kaplan_meier_estimator(event, time)
    np.testing.assert_allclose(found["all"]["survival"], survival, rtol=0, atol=1e-12)
    fit = PHReg(time, frame[["age", "marker"]].to_numpy(), status=event, ties="efron").fit(tol=1e-12)
    rows = found["cox"]["covariates"]
    assert [row["coefficient"] for row in rows] == pytest.approx(fit.params, abs=1e-6)
    assert [row["error"] for row in rows] == pytest.approx(fit.bse, abs=1e-6)


def test_three_sites_with_tls_under_masks(tmp_path):
    """The server learns sums alone, and they are those of the pooled rows."""
    out = tmp_path / "out"
    with federation(tmp_path / "fed") as deployment:
        with_people(deployment)
        found = studied(deployment, out, "secure_aggregation=on", "secure_aggregation.min_cohort=3")
        assert found["masks"]["sites"] == list(SITES)
        assert all(site["events"] is site["people"] is None for site in found["sites"].values())
        for site in SITES:
            kit = Kit.read(deployment.kits / site)
            steps = [entry["step"] for entry in read_audit(kit.audit)]
            assert steps[:6] == ["edges", "keys", "shares", "masked counts", "confirm", "unmask"]
            assert steps.count("masked cox") == found["masks"]["sums"] - 1
            assert check_anchors(kit.audit, site, out / "anchors.jsonl") == len(steps)
    fitted(found, 3)


def test_three_sites_with_tls_of_which_one_refuses(tmp_path):
    out = tmp_path / "out"
    with federation(tmp_path / "fed") as deployment:
        with_people(deployment)
        deployment.change("west", "policy.yaml", survival="none")
        found = studied(deployment, out)
        assert set(found["sites"]) == {"north", "south"} and list(found["refused"]) == ["west"]
        for site in ("north", "south"):
            kit = Kit.read(deployment.kits / site)
            entries = read_audit(kit.audit)
            assert [entry["event"] for entry in entries] == ["survival"] * len(entries)
            assert [entry["step"] for entry in entries] == ["counts", *["cox"] * found["cox"]["steps"], "cox"]
            assert check_anchors(kit.audit, site, out / "anchors.jsonl") == len(entries)
        (entry,) = read_audit(Kit.read(deployment.kits / "west").audit)
        assert (entry["event"], entry["reason"]) == ("refused", "it takes part in no survival study")
    fitted(found, 2)
    assert "Survival at 2 sites" in (out / "survival.html").read_text()
