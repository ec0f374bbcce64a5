"""FLamby's pages: our runs equal a plain loop with the same draws, and the tables' figures by hand."""

import json
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def _scripts(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture
def patients(tmp_path):
    """Two regions; all times differ, so that the loss has no ties."""
    rng = np.random.default_rng(5)
    lines = ["age,marker,E,T,site,split"]
    for row in range(60):
        split = "test" if row % 5 == 0 else "train"
        age, marker, event = rng.normal(60, 10), rng.integers(2), int(rng.random() < 0.6)
        time = rng.exponential(900 - 8 * age) + row * 1e-3
        lines.append(f"{age:.1f},{marker},{event},{time:.4f},{('South', 'West')[row % 3 // 2]},{split}")
    path = tmp_path / "patients.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedadagrad", "fedavg", "scaffold_rows", "fedadam"])
def test_a_run_is_the_plain_loop_with_its_first_weights_and_batches(patients, method):
    import flamby_same

    found = flamby_same.compared(patients, method, 42, "c")
    assert found["apart"] < 1e-9 and found["ours"] == found["value"]


def test_the_table_s_figures_by_hand(tmp_path):
    from flamby_report import Flamby

    def row(method, seed, value, **more):
        return json.dumps({"dataset": "heart", "method": method, "seed": seed, "value": value} | more)

    rows = [row("fedavg", seed, value) for seed, value in ((42, 0.752), (43, 0.7838), (0, 0.1))]
    rows += [row("fedprox", seed, value) for seed, value in ((42, 0.762), (43, 0.8038))]
    same = {"ours": 0.62, "apart": 1e-3, "age": -0.1}
    rows.append(row("same_fedadam", 42, 0.6226, **same))
    (tmp_path / "flamby.jsonl").write_text("\n".join(rows) + "\n")
    found = Flamby(tmp_path)
    assert found.score("heart", "fedavg") == "0.768 ± 0.022"  # a seed below 42 is of before
    assert found.published("heart", "fedavg") == "0.748 ± 0.027"
    assert found.inside("heart", "fedavg") and not found.inside("heart", "fedprox")
    assert found.paired("heart", "fedavg").startswith("+0.010 (")  # (0 + 0.02) / 2
    assert found.less("heart", "fedprox").startswith("+0.015 (")  # (0.01 + 0.02) / 2
    assert found.same_draws() == "0.0026 at most in 1 run"
    assert found.same_pairs() == "FedAdam, seed 42: 0.620 and 0.623"
    assert found.below_zero() == "FedAdam at seed 42 (0.620)"
    assert found.earlier("heart") == ""  # one seed has no spread
    (line,) = found.left_over()
    assert line.startswith("**FedProx, Heart**: 0.783 ± 0.030, published 0.748 ± 0.027")
