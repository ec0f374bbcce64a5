"""The server's step: how a mean update becomes the next model, and what a checkpoint keeps of it.

By hand: client 0 has 1 example and adds 1 to what it trains, client 1 has 3 and adds 3. Their mean update is
(1·1 + 3·3) / 4 = 2.5.
"""

import pytest
import torch

from fedfrozen_app.config import AggregationConfig
from fedfrozen_app.core import registry
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.files import checkpoint
from fedfrozen_app.local.algorithm import Algorithm
from fedfrozen_app.server import reply_check
from fedfrozen_app.server.base import Federation, PlannedFedAvg
from fedfrozen_app.server.connection import connect
from fedfrozen_app.server.optimizer import NoOptimizer
from fedfrozen_app.server.robust import make_aggregator
from tests.conftest import same_bits
from tests.resuming import killed_before_checkpoint
from tests.server.momentum import Momentum, Settings, momentum  # noqa: F401
from tests.server.step_runs import adding_app, run, start_model, values

# The plain step -------------------------------------------------------------------------------------------


def test_plain_is_the_mean_in_the_update_s_own_memory():
    strategy, _ = run(PlannedFedAvg, 2)
    assert values(strategy.model) == {"query": 5.0, "head": 5.0}
    model, update = start_model(), {"head": torch.ones(2, dtype=torch.float64)}
    place = update["head"].data_ptr()
    assert NoOptimizer().step(model, update)["head"].data_ptr() == place
    assert not model["head"].any() and NoOptimizer().step(model, {}) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", ["median", "trimmed_mean"])
def test_rules_that_combine_values_give_those_to_the_bit(dtype, rule):
    """w + (value − w) would not: in these types the difference has too many digits."""
    base, value = torch.tensor([-1.9, 1.0, 3e5], dtype=dtype), torch.tensor([1.7, 1e-12, -7e-8], dtype=dtype)
    model = {"w": base}
    aggregator = make_aggregator(AggregationConfig(rule), model, lambda name: None, None)
    for _ in range(3):
        aggregator.add({"w": value.clone()}, 1.0)
    update = aggregator.finish()
    assert not torch.equal(base + update.model["w"], value)
    strategy = PlannedFedAvg(Federation(connect(None, {})))
    strategy.model = model
    assert torch.equal(strategy.step(update)["w"], value)


# A server optimiser ---------------------------------------------------------------------------------------


def test_momentum_by_hand():
    strategy, _ = run(PlannedFedAvg, 2, optimizer=Momentum(Settings(beta=0.5)))
    # v₁ = 2.5, w₁ = 2.5; v₂ = 0.5·2.5 + 2.5 = 3.75, w₂ = 6.25
    assert values(strategy.model) == {"query": 6.25, "head": 6.25}
    assert values(strategy.optimizer.moments["velocity"]) == {"query": 3.75, "head": 3.75}


def test_a_name_that_freezes_leaves_the_optimiser():
    names = {}
    strategy, _ = run(
        registry.find("strategies", "fedfrozen"),
        2,
        optimizer=Momentum(Settings(beta=0.5)),
        each=lambda s, row: names.update({row["round"]: sorted(s.optimizer.state())}),
        warmup_rounds=1,
    )
    assert names == {0: [], 1: ["velocity/head", "velocity/query"], 2: ["velocity/head"]}
    assert values(strategy.model) == {"query": 2.5, "head": 6.25}  # frozen: its velocity moves it no more


def test_a_round_without_replies_moves_nothing_and_forgets_nothing(monkeypatch):
    real = reply_check.problem_of
    monkeypatch.setattr(
        reply_check,
        "problem_of",
        lambda reply, request, *more: "was lost" if request.round == 2 else real(reply, request, *more),
    )
    strategy, _ = run(PlannedFedAvg, 3, optimizer=Momentum(Settings(beta=0.5)))
    assert values(strategy.model) == {"query": 6.25, "head": 6.25}


RUN = ("num_rounds=4", "num_clients=2", "dataset.limit=80", "strategy.warmup_rounds=2", "eval_every=4")


@pytest.mark.slow
def test_momentum_killed_and_resumed_to_the_bit(train, monkeypatch, momentum):  # noqa: F811
    words = (*RUN, momentum, "+server_optimizer.beta=0.5")
    whole = train(*words, folder="whole")
    assert whole.summary["config"]["server_optimizer"] == {"name": "momentum", "beta": 0.5}
    with killed_before_checkpoint(monkeypatch, 3):
        train(*words, folder="killed")
    kept = checkpoint.newest(whole.folder.parent / "killed").strategy
    assert kept and all(name.startswith("server_optimizer/velocity/") for name in kept)
    assert same_bits(whole.model, train(*words, folder="killed", resume=True).model)
    plain = train(*RUN, folder="plain")
    assert not same_bits(whole.model, plain.model)
    none = train(*RUN, momentum, "+server_optimizer.beta=0", folder="zero")
    assert same_bits(none.model, plain.model)  # β = 0 adds the mean update as it is


@pytest.mark.slow
def test_another_optimiser_starts_with_nothing_of_the_first(train, momentum):  # noqa: F811
    first = train(*RUN, momentum, folder="first")
    start = f"from={first.folder / 'checkpoints' / '4'}"
    rounds = ("num_rounds=5", "client.lr_schedule=constant", "strategy.warmup_rounds=2")
    train(*RUN, *rounds, start, folder="plain")
    assert not checkpoint.newest(first.folder.parent / "plain").strategy


@pytest.mark.slow
def test_bad_settings_are_a_sentence(train, momentum):  # noqa: F811
    with pytest.raises(UserError, match="Unknown server optimiser 'momentun': did you mean momentum"):
        train("server_optimizer.name=momentun")
    with pytest.raises(UserError, match=r"server_optimizer.beta=1 must be at least 0"):
        train(momentum, "+server_optimizer.beta=1")
    with pytest.raises(UserError, match=r"server_optimizer.beta=nan is out of range"):
        train(momentum, "+server_optimizer.beta=nan")
    with pytest.raises(UserError, match=r"server_optimizer.bita.*did you mean server_optimizer.beta"):
        train(momentum, "+server_optimizer.bita=1")


# What belongs to whom -------------------------------------------------------------------------------------


def test_a_checkpoint_s_arrays_go_back_to_their_owners():
    one = {"a.weight": torch.ones(1)}
    kept = checkpoint.with_owners(strategy=one, server_optimizer={"velocity/a.weight": torch.zeros(1)})
    assert sorted(kept) == ["server_optimizer/velocity/a.weight", "strategy/a.weight"]
    found = checkpoint.by_owner(kept)
    assert found["strategy"] == one and list(found["server_optimizer"]) == ["velocity/a.weight"]
    assert found["carried"] == {}
    # Checkpoints of before named no owner: all was the strategy's.
    assert checkpoint.by_owner(one)["strategy"] == one


AUTO = ("strategy.warmup_rounds=auto", "strategy.warmup_threshold=0", "num_rounds=3")


@pytest.mark.slow
def test_a_checkpoint_without_owners_goes_on_to_the_same_bits(train, monkeypatch):
    whole = train(*AUTO, folder="whole")
    old = train(*AUTO, folder="old")
    checkpoint.forget_after(old.folder / "checkpoints", 2)
    kept = checkpoint.newest(old.folder)
    assert kept.strategy and all(name.startswith("strategy/") for name in kept.strategy)
    kept.strategy = {name.removeprefix("strategy/"): value for name, value in kept.strategy.items()}
    del kept.config["server_optimizer"]
    checkpoint.write(kept, old.folder / "checkpoints", keep=2)
    again = train(*AUTO, folder="old", resume=True)
    assert same_bits(whole.model, again.model)
    assert [row.get("warmup") for row in again.rows] == [row.get("warmup") for row in whole.rows]


# Arrays that travel with every order ----------------------------------------------------------------------


class Control(Algorithm):
    """What the server asks of an algorithm such as SCAFFOLD's."""

    from_server, to_server = ("c",), ("dc",)


class Controlled(registry.find("strategies", "fedfrozen")):
    """c ← c + |S|/N · mean of dc over the replies."""

    algorithm = "control"
    equal = ("dc",)

    def step(self, update):
        share = update.replies / update.population
        for name, mean in update.extra.get("dc", {}).items():
            self.server_state["c"][name] = self.server_state["c"][name] + share * mean
        return super().step(update)


@pytest.fixture
def control(monkeypatch):
    monkeypatch.setitem(registry.BUILT_IN["algorithms"], "control", "tests.server.test_step:Control")
    registry.places.cache_clear()
    yield adding_app(lambda name, number: {f"dc/{name}": torch.full((2,), 2.0 * number, dtype=torch.float64)})
    registry.places.cache_clear()


def test_carried_arrays_by_hand(control):
    found = {}
    strategy, seen = run(
        Controlled,
        3,
        app=control,
        each=lambda s, row: found.update({row["round"]: {k: values(v) for k, v in s.server_state.items()}}),
        warmup_rounds=2,
    )
    # Client 0 sends dc = 2, client 1 dc = 6, and both count alike: c grows by 2/2 · 4 a round.
    assert found[0] == {}
    assert found[1] == {"c": {"query": 4.0, "head": 4.0}}
    assert found[2] == {"c": {"query": 8.0, "head": 8.0}}
    assert found[3] == {"c": {"head": 12.0}}  # frozen by then: it has none
    assert values(strategy.model) == {"query": 5.0, "head": 7.5}  # as without them
    told = {(request.round, name): base[name][0].item() for request, base, _ in seen for name in base}
    assert [told.get((n, "c/head")) for n in (1, 2, 3)] == [0.0, 4.0, 8.0]
    assert [told.get((n, "c/query")) for n in (1, 2, 3)] == [0.0, 4.0, None]
    assert {"c/head", "c/query"} <= {*seen[0][2]} and all(request.plan.shared for request, *_ in seen)
    # In the last round the frozen kernel still goes down once; its c does not.
    assert seen[-1][2] == ["c/head", "head", "query"]


def test_a_client_that_holds_them_is_not_sent_them_again(control):
    class Still(Controlled):
        def step(self, update):
            return PlannedFedAvg.step(self, update)

    _, seen = run(Still, 2, app=control, warmup_rounds=2)
    assert seen[-1][2] == ["head", "query"]  # c is zero as before


def test_carried_arrays_are_checkpointed_under_their_name(control):
    from types import SimpleNamespace

    from fedfrozen_app.config import CodecConfig, SecureAggregationConfig
    from fedfrozen_app.server.state import arrays_to_keep, restore

    strategy, _ = run(Controlled, 1, app=control, warmup_rounds=1)
    arrays = arrays_to_keep(strategy)
    assert sorted(arrays) == ["carried/c/head", "carried/c/query"]
    named = {"strategy": {"name": "controlled"}, "server_optimizer": {"name": "none"}}
    config = SimpleNamespace(**named, codec=CodecConfig(), secure_aggregation=SecureAggregationConfig())
    start = checkpoint.Checkpoint(1, {"strategy": {"name": "controlled"}}, [], {}, {}, strategy=arrays)
    again = Controlled(strategy.federation, strategy.settings)
    again.model = strategy.model
    restore(again, start, config)
    assert again.server_state == strategy.server_state
    start.config["strategy"]["name"] = "another"
    fresh = Controlled(strategy.federation, strategy.settings)
    fresh.model = strategy.model
    restore(fresh, start, config)
    assert fresh.server_state == {}
