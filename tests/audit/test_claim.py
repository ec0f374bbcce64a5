"""A client's claim is tried on its real rounds: an honest one passes, a broken one is caught, with exit code
1."""

import hashlib
import itertools
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.audit import command as audit_command
from fedfrozen_app.audit.claim import EXCEEDED, PASS, UNTOLD
from fedfrozen_app.audit.command import judge_claims
from fedfrozen_app.errors import UserError
from fedfrozen_app.privacy import keystream
from fedfrozen_app.privacy.opacus_parts import GradSampleHooksFastGradientClipping
from fedfrozen_app.privacy.watched import Canaries, read_rounds
from fedfrozen_app.report.run_page import run_page
from tests.conftest import same_bits

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import audit as benchmark

AUDITED = ("strategy=fedavg", "privacy=dp_sgd", "privacy.audited='0'", "num_rounds=2", "eval_every=2")
DROPOUT = "model.config.hidden_dropout_prob=0.2"
CANARIES = "privacy.canaries=150"


def words_of(claim):
    return {name: check["word"] for name, check in claim["checks"].items()}


@pytest.fixture(autouse=True)
def _same_keys(monkeypatch):
    """A test that passes passes again: the keys of the noise come in a fixed order, each another."""
    numbers = itertools.count()
    monkeypatch.setattr(
        keystream.secrets, "token_bytes", lambda size: hashlib.sha256(b"%d" % next(numbers)).digest()[:size]
    )


@pytest.fixture
def only_claims(monkeypatch):
    """Without the attacks on the final model, which have tests of their own."""
    for name in ("attack_model", "attack_uploads"):
        monkeypatch.setattr(audit_command, name, lambda *args: None)
    monkeypatch.setattr(audit_command, "as_attack_grid", lambda found: "")
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.slow
def test_an_honest_client_passes_and_every_output_is_marked(train, only_claims, capsys, caplog):
    run = train(*AUDITED, DROPOUT, CANARIES, "privacy.epsilon=1")
    assert command(["audit", str(run.folder)]) == 0
    (claim,) = json.loads((run.folder / "audit.json").read_text())["claims"]
    assert words_of(claim) == dict.fromkeys(claim["checks"], PASS) and claim["verdict"] == PASS
    assert claim["epsilon_claimed"] == run.rows[-1]["epsilon"]["0"] == pytest.approx(1.0, rel=0.01)
    assert claim["steps"] == claim["checks"]["accounts"]["paid"] and claim["rounds"] == 2
    assert claim["checks"]["sent"]["rounds"] == 2 and claim["checks"]["canaries"]["epsilon_most"] > 1
    shown = capsys.readouterr().out
    assert "Client 0 claims epsilon 1.000 per example" in shown and "the claim" in shown
    mark = {"client": "0", "canaries": 150}
    assert all(row["audited"] == mark for row in run.rows) and run.summary["audited"] == mark
    with safe_open(run.folder / "model.safetensors", "pt") as file:
        assert file.metadata()["audit"] == "NOT FOR USE: up to 150 canaries among the examples of client 0"
    page = run_page(run.folder)
    assert "An audit, and no model to use: up to 150 canaries" in page and "AUDITED, not for use" in page
    assert "its model not for use" in caplog.text


def test_noise_off_is_caught_and_the_exit_code_says_so(train, only_claims, capsys):
    with benchmark.broken("noise off"):
        run = train(*AUDITED, "privacy.canaries=1000", "privacy.epsilon=8")
    assert command(["audit", str(run.folder)]) == 1
    (claim,) = json.loads((run.folder / "audit.json").read_text())["claims"]
    found = words_of(claim)
    assert claim["verdict"] == found["noise"] == found["canaries"] == EXCEEDED and found["sent"] == PASS
    assert claim["checks"]["noise"]["deviation"] < 0.01
    assert "EXCEEDED" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [1.0, 8.0])
@pytest.mark.parametrize("name", benchmark.BREAKS)
def test_each_break_is_caught(name, epsilon):
    """As in the table of docs/privacy.md, which `python benchmarks/audit.py` makes."""
    claim = benchmark.audit(name, epsilon, 1000)
    assert claim["verdict"] == (PASS if name == "nothing" else EXCEEDED), words_of(claim)


@pytest.mark.slow
def test_watching_changes_nothing(train):
    """Without canaries, and with the noise of the same seed, the model is the same to the bit."""
    words = ("strategy=fedavg", "privacy=dp_sgd", "privacy.seeded_noise=true", DROPOUT, "num_rounds=2")
    plain = train(*words, folder="plain")
    watched = train(*words, "privacy.audited='0'", "privacy.canaries=0", folder="watched")
    assert same_bits(plain.model, watched.model)
    (claim,) = judge_claims(watched.folder)
    found = words_of(claim)
    assert found["draws"] == EXCEEDED and claim["checks"]["draws"]["repeats"] == [
        "dropout",
        "noise",
        "samples",
    ]
    assert found["noise"] == found["sent"] == found["accounts"] == PASS  # the noise is there; it is no secret
    assert found["canaries"] == found["clipping"] == UNTOLD


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.slow
def test_ghost_clipping_is_watched_without_canaries(train, monkeypatch, broken):
    """Its sum is worked out again from the gradients of single examples, dropout and all."""
    if broken:
        hooks = GradSampleHooksFastGradientClipping
        monkeypatch.setattr(hooks, "get_clipping_coef", lambda self: torch.ones_like(self.get_norm_sample()))
    words = ("strategy=safl", "privacy=dp_sgd", "privacy.clipping=ghost", "privacy.max_grad_norm=0.01")
    run = train(
        *words, "privacy.audited='0'", "privacy.canaries=0", "num_rounds=2", "privacy.epsilon=8", DROPOUT
    )
    (claim,) = judge_claims(run.folder)
    assert claim["checks"]["noise"]["word"] == (EXCEEDED if broken else PASS)
    assert claim["checks"]["sent"]["word"] == PASS
    assert claim["verdict"] == (EXCEEDED if broken else UNTOLD)


@pytest.mark.slow
def test_with_few_canaries_a_large_claim_cannot_be_told(train, only_claims, capsys):
    run = train(*AUDITED, "privacy.canaries=20", "privacy.epsilon=8")
    assert command(["audit", str(run.folder)]) == 0
    (claim,) = judge_claims(run.folder)
    assert claim["verdict"] == claim["checks"]["canaries"]["word"] == UNTOLD
    assert claim["checks"]["canaries"]["epsilon_most"] < 8
    assert "20 canaries could show" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_nobody_watched_is_nothing_proved(train, only_claims, capsys):
    run = train("strategy=fedavg", "privacy=dp_sgd", "client.local_steps=1", "num_rounds=1")
    assert command(["audit", str(run.folder)]) == 0
    (claim,) = json.loads((run.folder / "audit.json").read_text())["claims"]
    assert claim["verdict"] == UNTOLD and claim["epsilon_claimed"] == pytest.approx(8.0, rel=0.01)
    assert "privacy.audited=CLIENT" in capsys.readouterr().out


@pytest.mark.slow
def test_what_was_sent_must_be_what_was_watched(train):
    run = train(*AUDITED, "privacy.canaries=20")
    path = run.folder / "uploads" / "2" / "0.safetensors"
    arrays = load_file(path)
    name = next(iter(arrays))
    arrays[name].view(-1)[0] += 1e-3
    save_file(arrays, path)
    (claim,) = judge_claims(run.folder)
    assert claim["checks"]["sent"]["word"] == claim["verdict"] == EXCEEDED
    assert claim["checks"]["sent"]["differ"] == [f"{name} in round 2"]


@pytest.mark.slow
def test_a_codec_may_leave_elements_out(train):
    run = train(
        "strategy=safl",
        "strategy.keep=0.5",
        "privacy=dp_sgd",
        "privacy.audited='0'",
        "num_rounds=1",
        CANARIES,
    )
    (claim,) = judge_claims(run.folder)
    assert claim["checks"]["sent"]["word"] == claim["checks"]["noise"]["word"] == PASS


def test_a_site_judges_its_own_record(train, capsys):
    """It has no copy of what arrived, and says so."""
    run = train(*AUDITED, "privacy.canaries=20")
    assert command(["audit", str(run.folder / "privacy")]) == 0
    (claim,) = json.loads((run.folder / "privacy" / "audit.json").read_text())["claims"]
    found = words_of(claim)
    assert found["sent"] == UNTOLD and found["noise"] == found["accounts"] == PASS
    assert claim["epsilon_claimed"] == run.rows[-1]["epsilon"]["0"]


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_its_canaries(train):
    run = train(*AUDITED, "privacy.canaries=20")
    record = run.folder / "privacy" / "audit" / "0"
    coins = Canaries.read(record).coins
    train(*AUDITED[:-2], "num_rounds=3", "privacy.canaries=20", "privacy.epsilon=20", resume=True)
    assert len(read_rounds(record)) == 3 and (Canaries.read(record).coins == coins).all()


def test_canaries_lie_apart_and_half_are_planted():
    parameters = {"a": torch.zeros(20, 30), "b": torch.zeros(500)}
    canaries = Canaries.draw(parameters, 1000)
    elements = canaries.elements(parameters)
    assert len(set(elements.tolist())) == 1000 and elements.min() >= 0 and elements.max() < 1100
    assert 400 < canaries.coins.sum() < 600
    # Where only b trains, its elements come first, and a's have no place.
    alone = canaries.elements({"b": parameters["b"]})
    assert ((alone >= 0) == (elements >= 600)).all() and (
        alone[alone >= 0] == elements[alone >= 0] - 600
    ).all()
    with pytest.raises(UserError, match="more than the 1100 elements"):
        Canaries.draw(parameters, 1101)


def test_bad_settings_are_one_sentence(train):
    with pytest.raises(UserError, match="needs a claim to audit: add privacy=dp_sgd"):
        train("strategy=fedavg", "privacy.audited='0'")
    with pytest.raises(UserError, match="audited=7 is no client: give a number from 0 to 2"):
        train("strategy=fedavg", "privacy=dp_sgd", "privacy.audited='7'")
    with pytest.raises(UserError, match="takes no canaries"):
        train("strategy=safl", "privacy=dp_sgd", "privacy.audited='0'", "privacy.clipping=ghost")


@pytest.mark.slow
def test_a_model_that_has_seen_canaries_starts_no_other_run(train):
    run = train(*AUDITED, "privacy.canaries=20")
    words = ("strategy=fedavg", "privacy=dp_sgd", "num_rounds=3", f"from={run.folder / 'checkpoints' / '2'}")
    with pytest.raises(UserError, match="a model that has seen canaries"):
        train(*words, folder="next")
