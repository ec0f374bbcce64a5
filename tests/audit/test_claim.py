"""A client's claim is tried on its real rounds: an honest one passes, a broken one is caught, with exit code
1."""

import hashlib
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.audit import command as audit_command
from fedfrozen_app.audit.claim import EXCEEDED, PASS, UNDECIDED
from fedfrozen_app.audit.command import check_claims
from fedfrozen_app.config import check_config, compose_run
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.files.uploads import read_upload, write_upload
from fedfrozen_app.privacy import keystream
from fedfrozen_app.privacy.audit_record import read_rounds
from fedfrozen_app.privacy.canaries import Canaries
from fedfrozen_app.privacy.opacus_parts import GradSampleHooksFastGradientClipping
from fedfrozen_app.report.run_page import run_page
from fedfrozen_app.secure import work
from tests.conftest import same_bits, slowly

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
    """As in the table of docs/privacy-results.md, which `python benchmarks/audit.py` makes."""
    claim = benchmark.audit(name, epsilon, 1000)
    assert claim["verdict"] == (PASS if name == "nothing" else EXCEEDED), words_of(claim)


@pytest.mark.slow
def test_watching_changes_nothing(train):
    """Without canaries, and with the noise of the same seed, the model is the same to the bit."""
    words = ("strategy=fedavg", "privacy=dp_sgd", "privacy.seeded_noise=true", DROPOUT, "num_rounds=2")
    plain = train(*words, folder="plain")
    watched = train(*words, "privacy.audited='0'", "privacy.canaries=0", folder="watched")
    assert same_bits(plain.model, watched.model)
    (claim,) = check_claims(watched.folder)
    found = words_of(claim)
    assert found["draws"] == EXCEEDED and claim["checks"]["draws"]["repeats"] == [
        "dropout",
        "noise",
        "samples",
    ]
    assert found["noise"] == found["sent"] == found["accounts"] == PASS  # the noise is there; it is no secret
    assert found["canaries"] == found["clipping"] == UNDECIDED


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
    (claim,) = check_claims(run.folder)
    assert claim["checks"]["noise"]["word"] == (EXCEEDED if broken else PASS)
    assert claim["checks"]["sent"]["word"] == PASS
    assert claim["verdict"] == (EXCEEDED if broken else UNDECIDED)


@pytest.mark.slow
def test_with_few_canaries_a_large_claim_cannot_be_told(train, only_claims, capsys):
    run = train(*AUDITED, "privacy.canaries=20", "privacy.epsilon=8")
    assert command(["audit", str(run.folder)]) == 0
    (claim,) = check_claims(run.folder)
    assert claim["verdict"] == claim["checks"]["canaries"]["word"] == UNDECIDED
    assert claim["checks"]["canaries"]["epsilon_most"] < 8
    assert "20 canaries could show" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_nobody_watched_is_nothing_proved(train, only_claims, capsys):
    run = train("strategy=fedavg", "privacy=dp_sgd", "client.local_steps=1", "num_rounds=1")
    assert command(["audit", str(run.folder)]) == 0
    (claim,) = json.loads((run.folder / "audit.json").read_text())["claims"]
    assert claim["verdict"] == UNDECIDED and claim["epsilon_claimed"] == pytest.approx(8.0, rel=0.01)
    assert "privacy.audited=CLIENT" in capsys.readouterr().out


@pytest.mark.slow
def test_what_was_sent_must_be_what_was_watched(train):
    run = train(*AUDITED, "privacy.canaries=20")
    folder = run.folder / "uploads" / "2"
    base, arrays = read_upload(folder, "0")
    name = next(iter(arrays))
    arrays[name].view(-1)[0] += 1e-3
    write_upload(folder, "0", base, arrays)
    (claim,) = check_claims(run.folder)
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
    (claim,) = check_claims(run.folder)
    assert claim["checks"]["sent"]["word"] == claim["checks"]["noise"]["word"] == PASS


def test_a_site_judges_its_own_record(train, capsys):
    """It has no copy of what arrived, and says so."""
    run = train(*AUDITED, "privacy.canaries=20")
    assert command(["audit", str(run.folder / "privacy")]) == 0
    (claim,) = json.loads((run.folder / "privacy" / "audit.json").read_text())["claims"]
    found = words_of(claim)
    assert found["sent"] == UNDECIDED and found["noise"] == found["accounts"] == PASS
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
    with pytest.raises(UserError, match=r"privacy=none ignores privacy\.audited: add privacy=dp_sgd"):
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


IN_SUM = (
    *("strategy=fedavg", "model=linear", "privacy=dp_sgd", "privacy.epsilon=4", "privacy.canaries=0"),
    *("secure_aggregation=on", "secure_aggregation.noise=sum", "secure_aggregation.max_examples=200"),
    *("client.optimizer=sgd", "client.weight_decay=0", "client.lr=0.5", "num_clients=3", "num_rounds=2"),
    *("privacy.audited='0'", "client.batch_size=16", "client.local_epochs=1", "runtime.threads=1"),
    *("dataset.limit=160", "partition.min_size=8"),
)


def test_noise_in_the_sum_is_audited(train, only_claims):
    """Its share is read off the vector that is masked. No canary is guessed, so the claim cannot be told."""
    run = train(*IN_SUM, small=False)
    assert command(["audit", str(run.folder)]) == 0
    (claim,) = json.loads((run.folder / "audit.json").read_text())["claims"]
    found = words_of(claim)
    assert found["sent"] == found["noise"] == found["draws"] == found["accounts"] == PASS
    assert found["canaries"] == claim["verdict"] == UNDECIDED
    assert claim["checks"]["noise"]["elements"] == 2 * 650
    assert claim["steps"] == 2 and claim["epsilon_claimed"] <= 4


@pytest.mark.parametrize("fault", ["share halved", *slowly("no share", "something else is sent")])
def test_a_halved_share_exceeds_the_claim(train, only_claims, monkeypatch, fault):
    if fault in ("share halved", "no share"):
        drawn, times = work.discrete_gaussian, 0.5 if fault == "share halved" else 0.0
        monkeypatch.setattr(
            work, "discrete_gaussian", lambda *args: (drawn(*args).astype(float) * times).astype(np.int64)
        )
    else:
        updates_of = work.updates_of
        monkeypatch.setattr(
            work, "updates_of", lambda *args: {n: 3 * value for n, value in updates_of(*args).items()}
        )
    run = train(*IN_SUM, small=False)
    assert command(["audit", str(run.folder)]) == 1
    (claim,) = json.loads((run.folder / "audit.json").read_text())["claims"]
    assert claim["verdict"] == EXCEEDED, words_of(claim)


def test_masks_hide_canaries_and_single_updates():
    with pytest.raises(UserError, match=r"use privacy\.canaries=0"):
        check_config(compose_run([*IN_SUM, "privacy.canaries=10"]).config)
    with pytest.raises(UserError, match="watches updates one by one"):
        check_config(compose_run([*IN_SUM, "secure_aggregation.noise=site"]).config)
