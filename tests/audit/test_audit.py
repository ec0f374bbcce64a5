"""The attacks on what a run leaves find what is there to find, and nothing else."""

import json

import numpy as np
import pytest
import torch

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.audit import command as audit_command
from fedfrozen_app.audit.membership_inference import area, interval, pool_of
from fedfrozen_app.commands.training import load_run
from fedfrozen_app.data.table import Table


def test_area_by_hand():
    # 3 beats all three; 1 beats 0, ties with 1 and loses to 2: (3 + 1.5) of six pairs.
    assert area(np.array([3.0, 1.0]), np.array([2.0, 1.0, 0.0])) == pytest.approx((3 + 1.5) / 6)
    assert area(np.array([1.0, 2.0]), np.array([0.0])) == 1.0


def test_the_interval_holds_the_area_and_half_when_there_is_nothing_to_find():
    generator = np.random.default_rng(0)
    found = interval(generator.normal(size=300), generator.normal(size=300), seed=0)
    assert found["low"] < 0.5 < found["high"] and found["low"] < found["auc"] < found["high"]


def test_a_pool_has_as_many_of_each_label_on_both_sides():
    members = Table({"x": torch.arange(10)}, torch.tensor([0] * 8 + [1] * 2))
    others = Table({"x": torch.arange(10)}, torch.tensor([0] * 3 + [1] * 5 + [2] * 2))
    pool = pool_of(members, others, limit=100, seed=0)
    assert pool.members.labels.tolist().count(0) == pool.others.labels.tolist().count(0) == 3
    assert pool.members.labels.tolist().count(1) == pool.others.labels.tolist().count(1) == 2
    assert len(pool.members) == 5


@pytest.mark.slow
def test_an_overfitted_model_gives_its_members_away(train, capsys):
    run = train(
        "strategy=fedavg",
        "num_rounds=4",
        "eval_every=4",
        "client.local_epochs=15",
        "client.lr=5e-3",
        "client.lr_schedule=constant",
        "client.weight_decay=0",
        "checkpoint.uploads='0'",
    )
    words = ["shadow_pairs=1", "shadow_epochs=5"]
    assert command(["audit", str(run.folder), *words]) == 0
    found = json.loads((run.folder / "audit.json").read_text())
    for attack in found["final_model"].values():
        assert attack["low"] > 0.5
    assert found["uploads"]["rounds"] == 4 and found["uploads"]["gain"]["auc"] > 0.5
    assert found["claims"] == []
    assert "AUC" in capsys.readouterr().out


@pytest.mark.slow
def test_who_never_took_part_is_no_member(train, capsys, monkeypatch):
    run = train(
        "strategy=fedavg", "privacy=dp_sgd", "client.local_steps=1", "num_rounds=1", "participation=0.3"
    )
    (there,) = run.rows[-1]["clients"]
    words = ["shadow_pairs=1", "shadow_epochs=1"]
    pools = []
    monkeypatch.setattr(
        audit_command, "pool_of", lambda members, *rest: pools.append(members) or pool_of(members, *rest)
    )
    assert command(["audit", str(run.folder), *words, f"client={there}"]) == 0
    assert len(pools[0]) == len(load_run(run.folder, []).rows(there).train)
    for nobody in ("3", "-1", "north"):
        assert command(["audit", str(run.folder), *words, f"client={nobody}"]) == 2
        assert f"has no client {nobody}: choose one from 0 to 2." in capsys.readouterr().err


def test_bad_words_are_one_sentence(tmp_path, capsys):
    assert command(["audit", str(tmp_path / "none")]) == 2
    assert "There is no run folder" in capsys.readouterr().err
    assert command(["audit", str(tmp_path), "canarys=3"]) == 2
    assert "fedfrozen audit: " in capsys.readouterr().err
    assert command(["audit", str(tmp_path), "rows=3"]) == 2
    assert "rows=3 is too few" in capsys.readouterr().err


def test_a_run_without_rounds_is_one_sentence(train, capsys):
    run = train("strategy=fedavg", "num_rounds=0")
    assert command(["audit", str(run.folder)]) == 2
    assert "it needs trained rounds" in capsys.readouterr().err
