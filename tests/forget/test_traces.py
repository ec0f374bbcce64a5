"""Membership inference on the rows of a client that left: it finds them before, and guesses after."""

import json
import random

import pytest

from fedfrozen_app.__main__ import run as command

# Labels drawn at random can only be learnt by heart: the model knows its members and nothing else.
BY_HEART = [
    *("dataset=table", "dataset.label_column=label", "model=mlp", "model.config.hidden_size=256"),
    *("strategy=fedavg", "partition=iid", "num_clients=3", "num_rounds=40", "eval_every=40"),
    *("client.local_epochs=5", "client.lr=3e-3", "client.lr_schedule=constant", "client.weight_decay=0"),
    *("baseline=false", "runtime.threads=1"),
]


def drawn_rows(path):
    draw = random.Random(0)
    rows = [[*(f"{draw.gauss(0, 1):.4f}" for _ in range(12)), draw.choice(["yes", "no"])] for _ in range(900)]
    lines = [[*(f"x{number}" for number in range(12)), "label"], *rows]
    path.write_text("".join(",".join(line) + "\n" for line in lines))
    return path


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_rows_of_a_client_that_left_are_no_longer_found(train, tmp_path, capsys):
    data = f"dataset.path={drawn_rows(tmp_path / 'rows.csv')}"
    run, out = train(*BY_HEART, data, small=False), tmp_path / "without"
    assert command(["forget", str(run.folder), "--client", "2", "--out", str(out)]) == 0
    found = {}
    for name, folder, client in (("before", run.folder, "2"), ("after", out, "2"), ("still in", out, "0")):
        capsys.readouterr()
        words = [f"members={client}", "shadow_pairs=1", "shadow_epochs=20"]
        assert command(["audit", str(folder), *words]) == 0
        assert f"Were the rows of client {client}?" in " ".join(capsys.readouterr().out.split())
        found[name] = json.loads((folder / "audit.json").read_text())["final_model"]
    print(json.dumps(found, indent=1))
    for attack in ("loss", "shadow"):
        before, after, still = (found[name][attack] for name in ("before", "after", "still in"))
        assert before["low"] > 0.5 and still["low"] > 0.5
        assert after["low"] < 0.5 < before["low"] and after["auc"] < before["low"]
    assert command(["audit", str(out), "members=9"]) == 2
    assert "has no client 9: choose one from 0 to 2." in capsys.readouterr().err
