"""Methods whose clients have models of their own beside the shared one, or make one at the end.

By hand, the shared model against FedAvg's bits, both runners, resumed, judged, and after a loss of state.
"""

import json
import logging
import shlex

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from safetensors.torch import load_file

from fedfrozen_app.core.app_folder import app_folder
from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.files import checkpoint
from fedfrozen_app.local.client_state import keep_private, start_of
from tests.comparing import assert_alike, is_key_bias
from tests.conftest import SMALL, Run, same_bits
from tests.resuming import resumed_and_whole
from tests.server.federation import deployed
from tests.server.wire import write_sites
from tests.strategies.by_hand import (  # noqa: F401
    BODY,
    EPOCHS,
    HEAD,
    LR,
    accuracy,
    assert_same,
    descend,
    gradient,
    hand,
    kept_by,
    mean,
)

METHODS = ["ditto", "apfl"]


def judged_in(run):
    return {row["client"]: row for row in json.loads((run.folder / "personal.json").read_text())["clients"]}


def fedavg_by_hand(known):
    """The shared model before each round, and after the last."""
    models = [known.start]
    for cohort in known.cohorts:
        trained = [descend(models[-1], *known.rows[client]) for client in cohort]
        models.append(mean(trained, [known.count(client) for client in cohort]))
    return models


# Ditto -----------------------------------------------------------------------------------------------------


def ditto_round(v, w, x, y, lam):
    """v ← v − η(∇f(v) + λ(v − w_t)): also the line of litian96/ditto's trainer."""
    for _ in range(EPOCHS):
        g = gradient(v, x, y)
        v = {name: value - LR * (g[name] + lam * (value - w[name])) for name, value in v.items()}
    return v


@pytest.mark.parametrize("runner", ["sequential", "cohort"])
def test_ditto_by_hand(hand, runner):  # noqa: F811
    known = hand("strategy=ditto", "strategy.lam=0.7")
    found = known.run(runner)
    models = fedavg_by_hand(known)
    own = {}
    for w, cohort in zip(models, known.cohorts, strict=False):
        for client in cohort:  # who takes part for the first time begins at the round's model
            own[client] = ditto_round(own.get(client, w), w, *known.rows[client], 0.7)
    assert_same(found.model, models[-1])
    judged = judged_in(found)
    for client, v in own.items():
        assert_same(kept_by(found, client, "v"), v)
        rows, w = known.test[client], models[-1]
        after = ditto_round(v, w, *known.rows[client], 0.7)
        expected = accuracy(w, *rows), accuracy(v, *rows), accuracy(after, *rows)
        assert tuple(judged[client][key] for key in ("global", "personal", "after")) == expected
    last = known.cohorts[-1]
    by_client = found.rows[-1]["by_client"]["personal_accuracy"]
    assert by_client == {client: accuracy(own[client], *known.test[client]) for client in last}
    assert "test_accuracy" in found.rows[-1] and "test_accuracy" not in found.rows[-1]["by_client"]


# APFL ------------------------------------------------------------------------------------------------------


def mixture(v, w, alpha):
    return {name: alpha * v[name] + (1 - alpha) * w[name] for name in v}


def apfl_round(v, alpha, w, x, y):
    """α once, on the first batch; then w and v side by side, v by the slope of the mixture's loss."""
    g = gradient(mixture(v, w, alpha), x, y)
    rate_of_change = sum(((v[name] - w[name]) * g[name]).sum() for name in v)
    alpha = float(np.clip(alpha - LR * rate_of_change, 0, 1))
    for _ in range(EPOCHS):
        for_w, for_v = gradient(w, x, y), gradient(mixture(v, w, alpha), x, y)
        v = {name: value - LR * alpha * for_v[name] for name, value in v.items()}
        w = {name: value - LR * for_w[name] for name, value in w.items()}
    return v, alpha, w


@pytest.mark.parametrize("runner", ["sequential", "cohort"])
def test_apfl_by_hand(hand, runner):  # noqa: F811
    known = hand("strategy=apfl", "strategy.alpha=0.4", "num_rounds=4")
    found = known.run(runner)
    models = fedavg_by_hand(known)
    own = {}
    for w, cohort in zip(models, known.cohorts, strict=False):
        for client in cohort:
            v, alpha = own.get(client, (w, 0.4))
            own[client] = apfl_round(v, alpha, w, *known.rows[client])[:2]
    assert_same(found.model, models[-1])
    assert len({alpha for _, alpha in own.values()}) > 1  # they have learned different shares
    judged = judged_in(found)
    for client, (v, alpha) in own.items():
        assert_same(kept_by(found, client, "v"), v)
        kept = kept_by(found, client, "alpha").values()
        assert all(value.shape == () for value in kept)
        np.testing.assert_allclose([float(value) for value in kept], alpha, rtol=0, atol=1e-9)
        rows, w = known.test[client], models[-1]
        later, share, there = apfl_round(v, alpha, w, *known.rows[client])
        mixtures = mixture(v, w, alpha), mixture(later, there, share)
        expected = accuracy(w, *rows), *(accuracy(mixed, *rows) for mixed in mixtures)
        assert tuple(judged[client][key] for key in ("global", "personal", "after")) == expected
    weights = [known.count(client) for client in known.cohorts[-1]]
    shares = [own[client][1] for client in known.cohorts[-1]]
    assert found.rows[-1]["alpha"] == pytest.approx(np.average(shares, weights=weights), abs=1e-9)


@pytest.mark.slow
def test_apfl_s_share_stays_within_its_bounds(train):
    """At this rate the second step of α would leave [0, 1]; those of w and v are clipped short."""
    found = train("strategy=apfl", "client=sgd", "client.lr=1e4", "client.clip=1e-5", "num_rounds=3")
    kept = checkpoint.newest(found.folder).clients
    shares = {float(v) for arrays in kept.values() for name, v in arrays.items() if name.startswith("alpha/")}
    assert shares and shares <= {0.0, 1.0}


@pytest.mark.slow
def test_a_share_of_zero_that_is_not_learned_makes_the_global_model_everybody_s(train):
    found = train("strategy=apfl", "strategy.alpha=0", "strategy.learn_alpha=false")
    clients = judged_in(found).values()
    assert clients and all(row["personal"] == row["global"] for row in clients)


# Both ------------------------------------------------------------------------------------------------------

CLIPPED = ["client.clip=0.05", "client.weight_decay=0.1"]


@pytest.mark.parametrize(
    "words", [["strategy=ditto"], ["strategy=apfl"], ["strategy=apfl", "strategy.alpha=0"]]
)
@pytest.mark.parametrize("client", [[], CLIPPED, ["client=sgd", "client.clip=0.05"]])
@pytest.mark.slow
def test_the_shared_model_is_fedavg_s_to_the_bit(train, words, client):
    plain = train("strategy=fedavg", "participation=0.7", *client, folder="plain")
    found = train(*words, "participation=0.7", *client, folder="found")
    assert same_bits(found.model, plain.model)
    assert found.rows[-1]["bytes_up_by_role"] == plain.rows[-1]["bytes_up_by_role"]
    assert [row.get("test_loss") for row in found.rows] == [row.get("test_loss") for row in plain.rows]


FLOAT64 = ["model.dtype=float64", "client=sgd", "client.momentum=0", "client.lr=0.05"]
FLOAT64 += ["participation=0.7", "model.config.num_hidden_layers=1", "client.class_weights=true"]


@pytest.mark.parametrize("clip", [["client.clip=0.1"], []])
@pytest.mark.parametrize("strategy", ["ditto", "apfl"])
@pytest.mark.slow
def test_both_runners_agree(train, strategy, clip):
    words = (f"strategy={strategy}", *FLOAT64, *clip)
    runs = [train(*words, f"runtime.runner={r}", folder=r) for r in ("sequential", "cohort")]
    states = assert_alike(*runs)
    assert any(name.startswith("v/") for client in states if client for name in states[client])
    for model in ("global", "personal", "after"):
        figures = [run.summary["personal"][model] for run in runs]
        assert figures[0] == pytest.approx(figures[1])
    told = [[row.get("personal_accuracy") for row in run.rows] for run in runs]
    assert told[0] == pytest.approx(told[1]) and told[0][-1] is not None


@pytest.mark.parametrize("strategy", [*METHODS, "fedbabu"])
@pytest.mark.slow
def test_resumed_equals_unbroken(train, monkeypatch, strategy):
    words = (f"strategy={strategy}", "participation=0.7")
    resumed, whole = resumed_and_whole(train, monkeypatch, *words)
    assert resumed.summary["personal"] == whole.summary["personal"]


@pytest.mark.parametrize(("strategy", "settings"), [("ditto", {"lam": 0.1}), ("apfl", {"alpha": 0.3})])
def test_a_site_that_lost_what_it_kept_is_told_and_begins_at_the_round_s_model(
    hand,  # noqa: F811
    tmp_path,
    caplog,
    strategy,
    settings,
):
    known = hand(f"strategy={strategy}")
    worker, names = known.worker, tuple(known.start)
    request = TrainRequest(5, Plan.full(names), dict.fromkeys(names, ""), strategy, settings)
    base = {name: torch.from_numpy(value) + 1 for name, value in known.start.items()}  # the round's model
    context = Context(7, 1, {"site": "north", "cache-dir": str(tmp_path)}, RecordDict(), {})
    with caplog.at_level(logging.WARNING):
        start = start_of(context, worker, request, base)
    assert "has kept nothing of its own from earlier rounds" in caplog.text
    assert same_bits(dict(start.client_state["v"]), base)
    if strategy == "apfl":
        assert {float(value) for value in start.client_state["alpha"].values()} == {0.3}
    # What is on its disk it goes on from, in another process too, and nothing is said.
    own = {
        f"{space}/{name}": value + 2
        for space in start.client_state
        for name, value in start.client_state[space].items()
    }
    keep_private(context, own, local=False)
    caplog.clear()
    fresh = Context(7, 1, dict(context.node_config), RecordDict(), {})
    again = start_of(fresh, worker, request, base)
    kept = again.client_state["v"]
    assert all(torch.equal(kept[name], base[name] + 2) for name in names) and not caplog.text


# FedBABU ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runner", ["sequential", "cohort"])
def test_fedbabu_by_hand(hand, runner):  # noqa: F811
    known = hand("strategy=fedbabu", "strategy.fine_tune_epochs=2")
    found, w = known.run(runner), known.start
    for cohort in known.cohorts:
        w = mean([descend(w, *known.rows[c], BODY) for c in cohort], [known.count(c) for c in cohort])
    assert_same(found.model, w)
    assert all(np.array_equal(found.model[name].numpy(), known.start[name]) for name in HEAD)  # to the bit
    for client, row in judged_in(found).items():
        tuned = descend(w, *known.rows[client], HEAD, steps=2)
        assert row["global"] == accuracy(w, *known.test[client])
        assert row["personal"] == accuracy(tuned, *known.test[client]) and "after" not in row
    assert found.rows[-1]["bytes_up_by_role"].keys() == {"embedding"}


def test_fedbabu_may_fine_tune_everything(hand):  # noqa: F811
    known = hand("strategy=fedbabu", "strategy.fine_tune_epochs=4", "strategy.fine_tune=[all]")
    found = known.run("sequential")
    w = {name: value.numpy() for name, value in found.model.items()}
    for client, row in judged_in(found).items():
        tuned = descend(w, *known.rows[client], steps=4)
        assert row["personal"] == accuracy(tuned, *known.test[client])


def test_the_head_s_initial_values_do_not_decay(train):
    found = train("strategy=fedbabu", "client.weight_decay=0.5", "checkpoint.keep=9")
    first = found.model_after(1)
    heads = [name for name in first if name.startswith("classifier")]
    assert heads and all(torch.equal(first[name], found.model[name]) for name in heads)
    assert "head" not in found.rows[-1]["bytes_up_by_role"]


# Over real SuperNodes --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ditto_over_real_supernodes_keeps_its_models_on_the_sites_disks(tmp_path):
    """Two sites with a folder of pictures each; FedAvg over the same sites has the same shared model."""
    write_sites(tmp_path / "data")
    words = [word for word in SMALL if not word.startswith(("num_clients", "dataset", "partition"))]
    words += ["dataset=images", f"dataset.path={tmp_path}/data", "num_rounds=2", "runtime.min_nodes=2"]
    sites = ("north", "south")
    nodes = [
        {"site": name, "data-path": f"{tmp_path}/data/{name}", "cache-dir": f"{tmp_path}/cache-{name}"}
        for name in sites
    ]
    with deployed(tmp_path / "federation", nodes) as federation:
        app = app_folder(tmp_path / "app")
        for strategy in ("ditto", "fedavg"):
            settings = {"overrides": shlex.join([*words, f"strategy={strategy}"])}
            federation.run(app, settings | {"output-dir": str(tmp_path / strategy)}, timeout=500)
    found, plain = Run(tmp_path / "ditto"), Run(tmp_path / "fedavg")
    for name, value in plain.model.items():
        torch.testing.assert_close(found.model[name], value, rtol=1e-6, atol=1e-7)
    assert [row["bytes_up_by_role"] for row in found.rows[1:]] == [
        row["bytes_up_by_role"] for row in plain.rows[1:]
    ]
    kept = {}
    for name in sites:
        (file,) = (tmp_path / f"cache-{name}" / "private").glob("run-*.safetensors")  # of the run with ditto
        kept[name] = load_file(file)
        assert kept[name].keys() == {f"v/{parameter}" for parameter in plain.model}
    moved = [n for n in plain.model if not is_key_bias(n)]
    assert not any(torch.equal(kept["north"][f"v/{n}"], kept["south"][f"v/{n}"]) for n in moved)
    judged = judged_in(found)
    assert set(judged) == set(sites)
    assert all({"global", "personal", "after"} <= row.keys() for row in judged.values())
    assert [row["clients_failed"] for row in found.rows[1:]] == [0, 0]
