"""The attacks find what is there to find, and nothing where noise and clipping do their work."""

import json

import numpy as np
import pytest
import torch
from scipy.stats import beta

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.audit import command as audit_command
from fedfrozen_app.audit.canaries import epsilon_lower, p_value, rehearse
from fedfrozen_app.audit.membership import area, interval, pool_of
from fedfrozen_app.commands.training import load_run
from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.data.table import Table
from fedfrozen_app.local.resident import Resident
from fedfrozen_app.privacy.accountant import solve_noise
from fedfrozen_app.privacy.dpsgd import NoisyOptimizer, Recipe
from fedfrozen_app.privacy.opacus_parts import GradSampleHooksFastGradientClipping
from tests.conftest import SMALL

EPSILON, DELTA = 1.0, 1e-5


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


def test_the_bound_without_delta_is_clopper_and_pearson_s():
    for right in (60, 80, 100):
        lower = beta.ppf(0.05, right, 100 - right + 1)
        expected = max(0.0, np.log(lower / (1 - lower)))
        assert epsilon_lower(200, 100, right, 0.0) == pytest.approx(expected, abs=1e-6)
    assert epsilon_lower(200, 100, 50, 0.0) == 0.0


def test_delta_can_only_weaken_the_bound():
    assert p_value(200, 100, 90, 1.0, 1e-3) > p_value(200, 100, 90, 1.0, 0.0)
    assert epsilon_lower(200, 100, 90, 1e-3) < epsilon_lower(200, 100, 90, 0.0)


@pytest.fixture(params=["per_example", "ghost"])
def clipping(request):
    return request.param


@pytest.fixture
def rehearsal(clipping):
    """A small client's steps with canaries, exactly as they are taken in a run that claims ε = 1."""
    torch.set_num_threads(1)
    words = ["strategy=fedavg", "privacy=dp_sgd", f"privacy.clipping={clipping}"]
    config = read(resolved(compose_config([*SMALL, *words])))
    corpus = load_corpus(config)
    resident = Resident(config, corpus, shares=share_out(corpus, config, 3))
    noise = solve_noise(0.5, 12, epsilon=EPSILON, delta=DELTA, kind="prv")
    recipe = Recipe(rate=0.5, steps=12, noise=noise, max_grad_norm=0.001, batch=1.0, physical_batch=128)
    return lambda: rehearse(resident, resident.rows("0").train, recipe, canaries=200, delta=DELTA, seed=1)


def test_with_noise_and_clipping_on_the_bound_stays_below_the_claim(rehearsal):
    found = rehearsal()
    assert found.canaries == 200 and 70 < found.planted < 130 and found.guesses == 100
    assert found.epsilon_lower < EPSILON


def test_without_noise_the_bound_exceeds_the_claim(rehearsal, monkeypatch):
    def no_noise(self):
        for parameter in self.params:
            parameter.grad = parameter.summed_grad

    monkeypatch.setattr(NoisyOptimizer, "add_noise", no_noise)
    assert rehearsal().epsilon_lower > EPSILON


def test_without_clipping_the_bound_exceeds_the_claim(rehearsal, clipping, monkeypatch):
    def no_clipping(self):
        for parameter in self.params:
            total = parameter.grad_sample.sum(dim=0)
            held = parameter.summed_grad
            parameter.summed_grad = total if held is None else held + total

    if clipping == "per_example":
        monkeypatch.setattr(NoisyOptimizer, "clip_and_accumulate", no_clipping)
    else:
        hooks = GradSampleHooksFastGradientClipping
        monkeypatch.setattr(hooks, "get_clipping_coef", lambda self: torch.ones_like(self.get_norm_sample()))
    assert rehearsal().epsilon_lower > EPSILON


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
    words = ["shadow_pairs=1", "shadow_epochs=5", "canaries=100", "steps=12"]
    assert command(["audit", str(run.folder), *words]) == 0
    found = json.loads((run.folder / "audit.json").read_text())
    for attack in found["final_model"].values():
        assert attack["low"] > 0.5
    assert found["uploads"]["rounds"] == 4 and found["uploads"]["gain"]["auc"] > 0.5
    assert found["canaries"]["epsilon_claimed"] is None and found["canaries"]["epsilon_lower"] > 0
    assert "AUC" in capsys.readouterr().out


def test_a_private_run_is_audited_against_its_claim(train, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    run = train("strategy=fedavg", "privacy=dp_sgd", "client.local_steps=2", "num_rounds=1")
    assert command(["audit", str(run.folder), "shadow_pairs=1", "shadow_epochs=1", "canaries=40"]) == 0
    found = json.loads((run.folder / "audit.json").read_text())
    canaries = found["canaries"]
    assert canaries["steps"] == 2 and canaries["epsilon_claimed"] == pytest.approx(8.0, rel=0.01)
    assert not canaries["exceeds_claim"] and found["uploads"] is None
    assert canaries["privacy_unit"] == "example" and "per example" in " ".join(
        capsys.readouterr().out.split()
    )


def test_who_never_took_part_is_no_member_and_has_no_steps_to_rehearse(train, capsys, monkeypatch):
    """Not attacked as if the run had claimed no privacy, and its rows not counted as trained on."""
    run = train(
        "strategy=fedavg", "privacy=dp_sgd", "client.local_steps=1", "num_rounds=1", "participation=0.3"
    )
    (there,) = run.rows[-1]["clients"]
    away = next(client for client in "012" if client != there)
    words = ["shadow_pairs=1", "shadow_epochs=1", "canaries=8"]
    pools = []
    monkeypatch.setattr(
        audit_command, "pool_of", lambda members, *rest: pools.append(members) or pool_of(members, *rest)
    )
    assert command(["audit", str(run.folder), *words, f"client={there}"]) == 0
    resident = load_run(run.folder, [])
    assert len(pools[0]) == len(resident.rows(there).train)
    assert command(["audit", str(run.folder), *words, f"client={away}"]) == 2
    assert f"client {away} took no private step" in capsys.readouterr().err
    for nobody in ("3", "-1", "north"):
        assert command(["audit", str(run.folder), *words, f"client={nobody}"]) == 2
        assert f"has no client {nobody}: choose one from 0 to 2." in capsys.readouterr().err


def test_bad_words_are_one_sentence(tmp_path, capsys):
    assert command(["audit", str(tmp_path / "none")]) == 2
    assert "There is no run folder" in capsys.readouterr().err
    assert command(["audit", str(tmp_path), "canarys=3"]) == 2
    assert "fedfrozen audit: " in capsys.readouterr().err
    assert command(["audit", str(tmp_path), "canaries=3"]) == 2
    assert "canaries=3 is too few" in capsys.readouterr().err


def test_a_run_without_rounds_is_one_sentence(train, capsys):
    run = train("strategy=fedavg", "num_rounds=0")
    assert command(["audit", str(run.folder)]) == 2
    assert "it needs trained rounds" in capsys.readouterr().err
