"""The study of coverage: what one drawn split measures, and what its tables say of the rows."""

import json
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def _scripts(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")


ROW = {"accuracy": 0.8, "calibration_rows": 50, "size": 1.5, "temperature": 1.0, "threshold": 0.5}


def row(data, split, clients, off=0.0):
    rows, covered = (sum(one[place] for one in clients.values()) for place in (0, 1))
    other = {"temperature": off, "threshold": 0.0}
    more = {"central": other, "masked": other | {"sums": 12, "rounding": 1e-12}}
    return ROW | more | {"data": data, "split": split, "clients": clients, "rows": rows, "covered": covered}


@pytest.fixture
def study(tmp_path):
    import conformal_results

    rows = [
        row("digits", 0, {"0": [40, 38], "1": [10, 6]}, off=2e-13),
        row("digits", 1, {"0": [42, 40], "1": [8, 6]}),
        row("cifar10", 0, {"0": [50, 40]}),
    ]
    text = "".join(json.dumps(one) + "\n" for one in rows)
    (tmp_path / conformal_results.NAME).write_text(text)
    return conformal_results.Conformal(tmp_path)


def test_coverage_by_hand(study):
    assert study.coverage("digits") == pytest.approx((44 / 50 + 46 / 50) / 2)
    assert study.measured == ["digits", "cifar10"] and study.within == ["digits"]
    assert study.by_client("digits") == {"1": 12 / 18, "0": 78 / 82}  # the least covered first
    assert "90.0 %" in study.overview() and "88.0 to 92.0 %" in study.overview()
    assert "67 %" in study.clients() and study.off("central", "temperature") == "2e-13"
    assert study.off("masked", "threshold") == "0" and study.sums == "12 to 12"


def test_a_split_measures_what_it_says():
    """Labels are drawn from the model's own probabilities at temperature 2."""
    import conformal

    generator = np.random.default_rng(0)
    logits = 3 * generator.normal(size=(1200, 4))
    shares = np.exp(logits / 2) / np.exp(logits / 2).sum(axis=1, keepdims=True)
    labels = np.array([generator.choice(4, p=one) for one in shares])
    found = conformal.measured(logits, labels, np.arange(1200) % 5, 3)
    assert found["calibration_rows"] == found["rows"] == 600
    assert sum(count for count, _ in found["clients"].values()) == 600
    assert sum(covered for _, covered in found["clients"].values()) == found["covered"]
    assert abs(found["covered"] / 600 - 0.9) < 0.05 and found["temperature"] == pytest.approx(2, rel=0.2)
    for other in ("central", "masked"):
        assert max(found[other]["temperature"], found[other]["threshold"]) <= 1e-12
    assert found["masked"]["sums"] >= 10 and found["masked"]["rounding"] == 5 * 2.0**-41
