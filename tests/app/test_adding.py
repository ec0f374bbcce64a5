"""docs/adding-a-strategy.md does what it says: its own text as a package, installed from a wheel."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.core import registry
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.exchange.names import flattened
from fedfrozen_app.files import checkpoint
from fedfrozen_app.local.algorithm import Algorithm
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.server.base import PlannedFedAvg
from strategies.fedfrozen import FedFrozen
from tests.app.page_package import BLOCKS, FILES, SGD, VARIATES
from tests.comparing import is_key_bias
from tests.conftest import SMALL, Run, same_bits
from tests.resuming import killed_before_checkpoint

COMMANDS = [line for _, text in BLOCKS for line in text.splitlines() if line.startswith("fedfrozen ")]
SEAMS = (Path(__file__).parents[2] / "docs" / "seams.md").read_text("utf-8")
METHODS = ("headfirst", "variates", "heavyball", "signs", "ownhead")


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_small(name):
    own = [text for path, text in FILES.items() if Path(path).stem == name]
    assert len(own) == 2 and sum(len(text.splitlines()) for text in own) < 60


def test_every_seam_of_the_table_is_there():
    cells = re.findall(r"^\| [\w' ]+ \| ([^|]+)\|", SEAMS, re.MULTILINE)
    names = {name for cell in cells for name in re.findall(r"`(\w+)(?:\([^)]*\))?`", cell)}
    names -= {"where", "server_optimizer"}
    of_algorithms = {"from_server", "to_server", "client_state", "trainable_state", "scalar_state"}
    of_algorithms |= {
        "step_state",
        "private_step",
        "first_batch_loss",
        "adapt",
        "start_loss",
        "start_gradient",
    }
    assert all(hasattr(Algorithm, name) for name in of_algorithms)
    names -= of_algorithms
    assert len(names) > 15 and all(hasattr(PlannedFedAvg, name) for name in names), names


@pytest.mark.parametrize("line", COMMANDS)
@pytest.mark.slow
def test_the_commands_run(installed, line, tmp_path):
    words = shlex.split(line)[1:]
    small = [word for word in SMALL if "num_rounds" not in word]
    assert command([*words, *small, f"output_dir={tmp_path}/run", "track.tensorboard=false"]) == 0
    assert Run(tmp_path / "run").rows[-1]["clients_failed"] == 0


def test_the_plan_trains_the_head_first(installed, train):
    run = train("strategy=headfirst", "num_rounds=2", "strategy.head_rounds=1")
    assert [row["stage"] for row in run.rows] == ["initial", "head", "all"]
    assert set(run.rows[1]["bytes_up_by_role"]) == {"head"} < set(run.rows[2]["bytes_up_by_role"])
    assert command(["strategy=headfirst", "strategy.head_rounds=-1"]) == 2


def test_a_head_of_one_s_own_never_travels(installed, train):
    run = train("strategy=ownhead", "num_rounds=2")
    row = run.rows[-1]
    assert "head" not in row["bytes_up_by_role"] and "head" not in row["bytes_down_by_role"]
    first, last = run.model_after(1), run.model
    moved = {name for name in last if not torch.equal(first[name], last[name])}
    assert moved == {name for name in last if not name.startswith("classifier")}
    assert row["test_accuracy"] > 0 and "personal_accuracy" in row  # judged one by one, without a flag
    heads = checkpoint.newest(run.folder).clients
    assert all(set(own) == {"classifier.weight", "classifier.bias"} for own in heads.values())


@pytest.mark.slow
def test_momentum_of_zero_is_fedavg_and_any_strategy_has_it(installed, train):
    plain = train("strategy=fedavg", folder="plain")
    same = train("strategy=fedavg", "server_optimizer=heavyball", "server_optimizer.beta=0", folder="same")
    assert same_bits(plain.model, same.model)
    words = ["strategy=fedfrozen", "strategy.warmup_rounds=1", "server_optimizer=heavyball"]
    frozen = train(*words, folder="frozen")
    kept = checkpoint.newest(frozen.folder).strategy
    assert kept and not any("q_proj" in name or "k_proj" in name for name in kept)


# Control variates: the method with state -----------------------------------------------------------------


def test_two_clients_by_hand(installed, train):
    """Logistic regression, one batch for each client, so that a step is its whole gradient; three rounds of
    two steps, in the second of which one client is away."""
    small = [word for word in SMALL if not word.startswith("model.config")]
    words = [*small, "model=linear", "num_clients=2", "partition.min_size=20", "client.batch_size=512"]
    words += ["client.local_epochs=2", "dataset.client_validation=0", "participation=0.5", "seed=3"]
    run = train(*words, *VARIATES, "num_rounds=3", "checkpoint.keep=9", small=False)
    config = read(resolved(compose_config([*words, *VARIATES])))
    corpus = load_corpus(config)
    worker = Worker(config, corpus, shares=share_out(corpus, config, 2))

    def gradient(weights, client):
        inputs, labels = worker.take(worker.rows(client).train)
        own = {name: value.clone().requires_grad_(True) for name, value in weights.items()}
        pixels = worker.task.prepare(inputs)["pixel_values"].flatten(1)
        loss = functional.cross_entropy(functional.linear(pixels, *own.values()), labels)
        return dict(zip(own, torch.autograd.grad(loss, list(own.values())), strict=True))

    rate, steps, clients = 0.05, 2, ("0", "1")
    model = {name: value.clone() for name, value in worker.initial().items()}
    assert [name.rpartition(".")[2] for name in model] == ["weight", "bias"]
    c = {name: torch.zeros_like(value) for name, value in model.items()}
    own = {client: dict(c) for client in clients}
    cohorts = [row["clients"] for row in run.rows[1:]]
    assert all(len(cohort) == 1 for cohort in cohorts) and len({tuple(cohort) for cohort in cohorts}) == 2
    for cohort in cohorts:
        (client,) = cohort
        w = dict(model)
        for _ in range(steps):
            step = gradient(w, client)
            w = {n: w[n] - rate * (step[n] + c[n] - own[client][n]) for n in w}
        new = {n: own[client][n] - c[n] + (model[n] - w[n]) / (steps * rate) for n in w}
        c = {n: c[n] + (new[n] - own[client][n]) / len(clients) for n in w}  # (1/N) Σ over one of N = 2
        own[client], model = new, w
    end = checkpoint.newest(run.folder)
    for name, value in model.items():
        torch.testing.assert_close(run.model[name], value, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(end.strategy[f"carried/c/{name}"], c[name], rtol=1e-9, atol=1e-12)
        for client in clients:
            kept = end.clients[client][f"c/{name}"]
            torch.testing.assert_close(kept, own[client][name], rtol=1e-9, atol=1e-12)


def test_the_server_weighs_every_client_the_same_in_c(installed, train):
    """Of two clients with unlike numbers of rows, c is the plain mean of their cᵢ."""
    run = train(*VARIATES, "num_clients=2", "partition.alpha=0.1", "num_rounds=1")
    end = checkpoint.newest(run.folder)
    for name in run.model:
        mean = (end.clients["0"][f"c/{name}"] + end.clients["1"][f"c/{name}"]) / 2
        torch.testing.assert_close(end.strategy[f"carried/c/{name}"], mean, rtol=1e-9, atol=1e-12)


def test_its_first_round_is_fedavg_s(installed, train):
    """c and every cᵢ are zero."""
    one = train("strategy=fedavg", *SGD, "model.dtype=float64", "num_rounds=1", folder="one")
    other = train(*VARIATES, "num_rounds=1", folder="other")
    for name, value in one.model.items():
        torch.testing.assert_close(other.model[name], value, rtol=1e-12, atol=1e-15)


@pytest.mark.slow
def test_both_runners_agree_and_bytes_are_counted(installed, train):
    runs = [
        train(*VARIATES, "num_rounds=3", "participation=0.7", f"runtime.runner={runner}", folder=runner)
        for runner in ("sequential", "cohort")
    ]
    ends = [checkpoint.newest(run.folder) for run in runs]
    arrays = [end.model | end.strategy | flattened(end.clients) for end in ends]
    assert arrays[0].keys() == arrays[1].keys()
    for name, value in arrays[0].items():
        if not is_key_bias(name):
            assert float((arrays[1][name] - value).norm()) <= 1e-9 * max(1.0, float(value.norm())), name
    whole = sum(value.nbytes for value in runs[0].model.values())
    for run in runs:
        row = run.rows[-1]
        assert sum(row["bytes_up_by_role"].values()) == 2 * whole * len(row["clients"])  # w and dc
        assert row["bytes_up"] == runs[0].rows[-1]["bytes_up"]


@pytest.mark.parametrize("runner", ["sequential", "cohort"])
@pytest.mark.slow
def test_killed_and_resumed_to_the_bit(installed, train, monkeypatch, runner):
    words = (*VARIATES, "num_rounds=4", "participation=0.7", f"runtime.runner={runner}")
    whole = train(*words, folder="whole")
    with killed_before_checkpoint(monkeypatch, 3):
        train(*words, folder="broken")
    again = train(*words, folder="broken", resume=True)
    one, other = checkpoint.newest(whole.folder), checkpoint.newest(again.folder)
    assert same_bits(one.model, other.model) and same_bits(one.strategy, other.strategy)
    assert all(same_bits(one.clients[who], other.clients[who]) for who in one.clients)


def test_frozen_names_are_in_none_of_its_arrays(installed, train, monkeypatch):
    variates = registry.find("strategies", "variates")

    class Both(variates, FedFrozen):
        Settings = FedFrozen.Settings

    monkeypatch.setitem(registry.REGISTERED, ("strategies", "fedfrozen"), Both)
    words = ["strategy=fedfrozen", "strategy.warmup_rounds=1", *SGD, "num_rounds=3", "checkpoint.keep=9"]
    run = train(*words)
    warm, frozen = (checkpoint.read(run.folder / "checkpoints" / number) for number in "13")

    def kernel(names):
        return [name for name in names if "q_proj" in name or "k_proj" in name]

    assert kernel(warm.strategy) and all(kernel(own) for own in warm.clients.values())
    assert frozen.strategy and not kernel(frozen.strategy)
    assert all(own and not kernel(own) for own in frozen.clients.values())
    assert not {"query", "key"} & set(run.rows[-1]["bytes_up_by_role"])


def test_privacy_does_not_cover_what_nobody_clips(installed, train, capsys):
    with pytest.raises(Exception, match="keeps or sends arrays of its own, which are not clipped"):
        train("strategy=variates", "privacy=dp_sgd", "privacy.seeded_noise=true", "num_rounds=1")


def test_every_client_can_be_judged_after_one_more_round(installed, train):
    """Which needs what comes with an order; nothing of it is kept."""
    run = train(*VARIATES, "num_rounds=1", "personal=true")
    clients = json.loads((run.folder / "personal.json").read_text())["clients"]
    judged = [figures for figures in clients if figures["test_rows"]]
    assert judged and all("after" in figures for figures in judged)
    assert "not_judged" not in run.summary["personal"]


@pytest.mark.slow
def test_a_checkpoint_knows_that_clients_keep_something(installed, train):
    """Flower forgets it when a simulation ends: going on from there would begin at zero without a word."""
    kept = checkpoint.newest(train(*VARIATES, "num_rounds=1", folder="one").folder)
    assert (
        kept.hooks["private"]
        and not checkpoint.newest(train("num_rounds=1", folder="two").folder).hooks["private"]
    )
    with pytest.raises(UserError, match="Flower forgets"):
        checkpoint.check_private(replace(kept, clients={}), in_process=False)
