"""The server optimisers: by hand, against torch's Adam and Flower's own strategies, and in real runs.

By hand (see test_step.py): two clients with 1 and 3 examples add 1 and 3, so that Δ̄ = 2.5 in every round.
"""

import math

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvgM, FedYogi
from flwr.supercore.task_identity import TaskIdentity

from fedfrozen_app.config import AggregationConfig
from fedfrozen_app.core import registry
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.files import checkpoint
from fedfrozen_app.server.base import Federation, PlannedFedAvg
from fedfrozen_app.server.connection import connect
from fedfrozen_app.server.robust import make_aggregator
from tests.conftest import same_bits, slowly
from tests.resuming import killed_before_checkpoint
from tests.server.step_runs import run, values

NAMES = ("avgm", "adam", "yogi", "adagrad")


def made(name, **settings):
    found = registry.find("server_optimizers", name)
    return found(found.Settings(**settings).checked(3))


# Two rounds by hand ---------------------------------------------------------------------------------------


def after(optimizer, rounds=2):
    strategy, _ = run(PlannedFedAvg, rounds, optimizer=optimizer)
    assert values(strategy.model)["query"] == values(strategy.model)["head"]
    return values(strategy.model)["head"]


def test_avgm_by_hand():
    # m₁ = 2.5, w₁ = 0.5·2.5 = 1.25; m₂ = 0.8·2.5 + 2.5 = 4.5, w₂ = 1.25 + 0.5·4.5 = 3.5
    assert after(made("avgm", lr=0.5, beta=0.8)) == pytest.approx(3.5, abs=1e-12)


def test_adam_by_hand():
    # m₁ = 0.1·2.5 = 0.25, v₁ = 0.01·6.25 = 0.0625: w₁ = 0.1·0.25/(0.25 + 0.001)
    # m₂ = 0.9·0.25 + 0.25 = 0.475, v₂ = 0.99·0.0625 + 0.0625 = 0.124375
    by_hand = 0.1 * 0.25 / 0.251 + 0.1 * 0.475 / (math.sqrt(0.124375) + 0.001)
    assert after(made("adam", lr=0.1)) == pytest.approx(by_hand, abs=1e-12)


def test_adam_with_correction_by_hand():
    # m̂ = 0.25/0.1 = 2.5 and v̂ = 0.0625/0.01 = 6.25; then 0.475/0.19 = 2.5 and 0.124375/0.0199 = 6.25
    by_hand = 2 * 0.1 * 2.5 / (2.5 + 0.001)
    assert after(made("adam", lr=0.1, correction="adam")) == pytest.approx(by_hand, abs=1e-12)


def test_yogi_by_hand():
    # v₁ = 0 − 0.01·6.25·sign(0 − 6.25) = 0.0625; v₂ = 0.0625 + 0.0625 = 0.125
    by_hand = 0.1 * 0.25 / 0.251 + 0.1 * 0.475 / (math.sqrt(0.125) + 0.001)
    assert after(made("yogi", lr=0.1)) == pytest.approx(by_hand, abs=1e-12)
    # From v = 9 it falls: 9 − 0.01·6.25 = 8.9375, where Adam's would be 0.99·9 + 0.0625.
    assert after(made("yogi", lr=0.1, v_start=9.0), 1) == pytest.approx(
        0.1 * 0.25 / (math.sqrt(8.9375) + 0.001), abs=1e-12
    )


def test_adagrad_by_hand():
    # v₁ = 6.25, v₂ = 12.5, and m = Δ̄
    by_hand = 0.1 * 2.5 / (2.5 + 0.001) + 0.1 * 2.5 / (math.sqrt(12.5) + 0.001)
    assert after(made("adagrad", lr=0.1)) == pytest.approx(by_hand, abs=1e-12)


# Against others' ------------------------------------------------------------------------------------------


def updates(rounds=6, width=5):
    """Uneven ones, of both signs, some zero."""
    drawn = torch.randn(rounds, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    drawn[:, 0] = 0.0
    return drawn * torch.tensor([1.0, 1e-6, 1e-2, 1.0, 1e2], dtype=torch.float64)


def test_adam_is_torch_s_own_on_the_pseudo_gradient():
    ours = made("adam", lr=0.03, beta1=0.8, beta2=0.95, tau=1e-4, correction="adam")
    w = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    theirs = torch.optim.Adam([w], lr=0.03, betas=(0.8, 0.95), eps=1e-4)
    model = {"w": torch.zeros(5, dtype=torch.float64)}
    for delta in updates():
        model = ours.step(model, {"w": delta.clone()})
        w.grad = -delta
        theirs.step()
        torch.testing.assert_close(model["w"], w.detach(), rtol=1e-13, atol=1e-15)


def flower_round(strategy, number, model, delta):
    """One aggregation of Flower's own strategy, of two clients whose mean is model + delta."""
    arrays = ArrayRecord({"w": torch.from_numpy(model)})
    if strategy.current_arrays is None:
        strategy.current_arrays = arrays
    if not isinstance(strategy, FedAvgM):
        strategy.current_arrays = {"w": model}
    asked = Message(RecordDict({"config": ConfigRecord()}), dst_node_id=1, message_type="train")
    replies = []
    for share, examples in ((-2.0, 1), (2.0, 3)):  # (1·(−2) + 3·2)/4 = 1
        sent = ArrayRecord({"w": torch.from_numpy(model + share * delta)})
        metrics = MetricRecord({"num-examples": examples})
        replies.append(Message(RecordDict({"arrays": sent, "metrics": metrics}), reply_to=asked))
    found, _ = strategy.aggregate_train(number, replies)
    return found["w"].numpy()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (
            made("avgm", lr=0.7, beta=0.8),
            FedAvgM(server_learning_rate=0.7, server_momentum=0.8),
        ),
        (
            made("adam", lr=0.03, beta1=0.8, beta2=0.95, tau=1e-2, correction="flower"),
            FedAdam(eta=0.03, beta_1=0.8, beta_2=0.95, tau=1e-2),
        ),
        (
            made("yogi", lr=0.03, beta1=0.8, beta2=0.95, tau=1e-2),
            FedYogi(eta=0.03, beta_1=0.8, beta_2=0.95, tau=1e-2),
        ),
        (made("adagrad", lr=0.03, tau=1e-2), FedAdagrad(eta=0.03, tau=1e-2)),
    ],
    ids=NAMES,
)
def test_the_same_rounds_as_flower_s(ours, theirs):
    # Flower's messages say who sends them.
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 0, 0, 0
    model = {"w": torch.ones(5, dtype=torch.float64)}
    other = np.ones(5)
    for number, delta in enumerate(updates(), start=1):
        model = ours.step(model, {"w": delta.clone()})
        other = flower_round(theirs, number, other, delta.numpy())
        np.testing.assert_allclose(model["w"].numpy(), other, rtol=1e-9, atol=1e-9)


# Names that freeze, and come back ------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_freezes_leaves_and_one_that_comes_back_starts_anew(name):
    class Pauses(registry.find("strategies", "fedavg")):
        def plan(self, server_round):
            plan = super().plan(server_round)
            return plan.freeze(["query"]) if server_round == 2 else plan

    found = {}

    def look(strategy, row):
        found[row["round"]] = (sorted(strategy.optimizer.state()), values(strategy.model))

    run(Pauses, 3, optimizer=made(name), each=look)
    assert not any("query" in kept for kept in found[2][0]) and any("head" in k for k in found[2][0])
    assert found[2][1]["query"] == found[1][1]["query"]  # frozen: no memory of it moves it
    first = found[1][1]["query"]
    again = found[3][1]["query"] - found[2][1]["query"]
    assert again == pytest.approx(first, abs=1e-12)  # as in its first round
    assert found[3][1]["head"] - found[2][1]["head"] != pytest.approx(first, abs=1e-3)


# In real runs ----------------------------------------------------------------------------------------------

RUN = ("num_rounds=4", "num_clients=2", "dataset.limit=80", "strategy.warmup_rounds=2", "eval_every=4")


@pytest.mark.slow
def test_avgm_without_memory_is_the_mean_to_the_bit(train):
    plain = train(*RUN, folder="plain")
    words = ("server_optimizer=avgm", "server_optimizer.beta=0")
    assert same_bits(train(*RUN, *words, folder="avgm").model, plain.model)
    assert not same_bits(train(*RUN, "server_optimizer=avgm", folder="more").model, plain.model)


def test_avgm_without_memory_keeps_the_bits_of_rules_that_combine_values():
    base, value = torch.tensor([-1.9, 1.0, 3e5]), torch.tensor([1.7, 1e-12, -7e-8])
    aggregator = make_aggregator(AggregationConfig("median"), {"w": base}, lambda name: None, None)
    for _ in range(3):
        aggregator.add({"w": value.clone()}, 1.0)
    strategy = PlannedFedAvg(Federation(connect(None, {}), optimizer=made("avgm", beta=0.0)))
    strategy.model = {"w": base}
    assert torch.equal(strategy.step(aggregator.finish())["w"], value)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_killed_and_resumed_to_the_bit(train, monkeypatch, name):
    more = ("server_optimizer.correction=adam",) if name in ("adam", "yogi") else ()
    words = (*RUN, f"server_optimizer={name}", *more)
    whole = train(*words, folder="whole")
    with killed_before_checkpoint(monkeypatch, 3):
        train(*words, folder="killed")
    kept = checkpoint.newest(whole.folder.parent / "killed").strategy
    assert kept and all(key.startswith("server_optimizer/") for key in kept)
    assert same_bits(whole.model, train(*words, folder="killed", resume=True).model)


@pytest.mark.parametrize("strategy", ["fedfrozen", *slowly("safl", "fedavg", "fedprox", "local")])
def test_it_composes_with_every_strategy(train, strategy):
    words = ["num_rounds=2", "server_optimizer=adam", f"strategy={strategy}"]
    if strategy == "safl":
        words += ["model.config.num_hidden_layers=2"]
    rows = train(*words).rows
    assert len(rows) == 3 and not any(row.get("clients_failed") for row in rows)
    assert math.isfinite(rows[-1]["test_loss"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["server_optimizer=avgm", "server_optimizer.beta=1"], "server_optimizer.beta=1 must be at least 0"),
        (["server_optimizer=adam", "server_optimizer.beta2=1"], "server_optimizer.beta2=1 must be"),
        (["server_optimizer=adam", "server_optimizer.tau=0"], "server_optimizer.tau=0"),
        (["server_optimizer=yogi", "server_optimizer.lr=-1"], "server_optimizer.lr=-1"),
        (["server_optimizer=adam", "server_optimizer.correction=yes"], "server_optimizer.correction=yes"),
        (["server_optimizer=adagrad", "server_optimizer.beta2=0.9"], "server_optimizer.beta2"),
    ],
)
def test_a_bad_setting_is_a_sentence(train, words, says):
    with pytest.raises(UserError) as refused:
        train(*words)
    assert says in str(refused.value)
