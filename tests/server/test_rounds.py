"""Two clients, one round, numbers a reader can redo, through the real grid and the real exchange.

Client i has i + 1 examples and adds (i + 1) to every value it trains.
"""

import pytest
import torch

from fedfrozen_app.core import registry
from fedfrozen_app.core.digests import digests
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.exchange.role import Role
from tests.server.adding_clients import MEAN, ROLES, run, start_model


def test_fedavg_by_hand():
    strategy, rows, _ = run("fedavg")
    assert all(torch.allclose(value, torch.full_like(value, MEAN)) for value in strategy.model.values())
    row = rows[1]
    # In each scalar the updates are 1 and 2 with weights 1/3 and 2/3: spread 3 − (5/3)² = 2/9.
    kernel = 4 + 2 + 4  # query weight and bias, key weight; the key bias is left out
    assert row["drift"]["kernel"]["rms"] == pytest.approx((kernel * 2 / 9) ** 0.5, rel=1e-6)
    assert row["drift"]["kernel"]["mean_update"] == pytest.approx((kernel * 25 / 9) ** 0.5, rel=1e-6)
    assert row["clients_ok"] == 2 and row["train_loss"] == 1.0


def test_orders_name_what_an_observer_left_of_the_model(monkeypatch):
    """A user's own method may change what it sees: digests are of that, or clients would refuse it."""

    def halve(self, row, merged):
        for value in merged.values():
            value.mul_(0.5)
        return {}

    monkeypatch.setattr(registry.find("strategies", "fedavg"), "observe", halve)
    strategy, _, seen = run("fedavg", num_rounds=2)
    assert all(
        torch.allclose(value, torch.full_like(value, 0.75 * MEAN)) for value in strategy.model.values()
    )
    assert strategy.digests == digests(strategy.model)
    after_one = {name: torch.full_like(value, 0.5 * MEAN) for name, value in start_model().items()}
    assert seen[-1][1].base == digests(after_one)


def test_fedprox_sends_its_strength():
    _, _, seen = run("fedprox", mu=0.5)
    request = seen[0][1]
    assert (request.algorithm, request.settings) == ("fedprox", {"mu": 0.5})


def test_fedfrozen_by_hand():
    strategy, rows, seen = run("fedfrozen", num_rounds=3, warmup_rounds=1)
    for name, value in strategy.model.items():
        rounds = 1 if ROLES[name].kind in ("query", "key") else 3
        assert torch.allclose(value, torch.full_like(value, rounds * MEAN)), name
    warm, first, second = rows[1:]
    assert [row["stage"] for row in rows] == ["initial", "warmup", "frozen", "frozen"]
    kernel_bytes = 2 * (4 + 4 + 2 + 2) * 4  # two clients, query and key, float32
    for row in (first, second):
        assert "query" not in row["bytes_up_by_role"] and "key" not in row["bytes_up_by_role"]
        assert "kernel" not in row["drift"] and "rest" in row["drift"]
        assert sum(warm["bytes_up_by_role"].values()) - sum(row["bytes_up_by_role"].values()) == kernel_bytes
    # The first frozen round still brings the last averaged kernel down, the second no longer.
    assert sum(first["bytes_down_by_role"].values()) == sum(warm["bytes_down_by_role"].values())
    saved = sum(first["bytes_down_by_role"].values()) - sum(second["bytes_down_by_role"].values())
    assert saved == kernel_bytes
    assert seen[-1][2] == sorted(name for name in ROLES if ROLES[name].kind not in ("query", "key"))


@pytest.mark.parametrize(
    ("scope", "frozen"),
    [
        ("qk", {"query", "key"}),
        ("qk+ln1", {"query", "key", "ln1"}),
        ("train_value_only", {"embed", "query", "key", "out", "ln1", "ln2", "mlp"}),
        ("v", {"value"}),
    ],
)
def test_scopes(scope, frozen):
    strategy, _, _ = run("fedfrozen", warmup_rounds=0, freeze_scope=scope)
    unchanged = {name for name, value in strategy.model.items() if not value.any()}
    assert {name.removeprefix("block.").partition(".")[0] for name in unchanged} == frozen


def test_random_scope_freezes_as_much_as_the_kernel():
    strategy, _, _ = run("fedfrozen", warmup_rounds=0, freeze_scope="random")
    unchanged = [name for name, value in strategy.model.items() if not value.any()]
    assert len(unchanged) == 4  # two matrices, each with its bias
    assert {ROLES[name].kind for name in unchanged} <= {"query", "key", "value", "output"}
    assert sum(strategy.model[name].numel() for name in unchanged) == 4 + 2 + 4 + 2


def test_random_scope_keeps_sizes_with_grouped_keys():
    model = start_model()
    for part in ("key", "value"):  # grouped attention: keys and values are smaller than queries
        model[f"block.{part}.weight"] = torch.zeros(1, 2)
    strategy, _, _ = run("fedfrozen", model=model, warmup_rounds=0, freeze_scope="random")
    weights = [n for n, v in strategy.model.items() if "weight" in n and not v.any()]
    assert sorted(strategy.model[name].numel() for name in weights) == [2, 4]


def test_no_kernel_is_refused(monkeypatch):
    monkeypatch.setattr("tests.server.adding_clients.ROLES", {"head": Role("head")})
    with pytest.raises(UserError, match="no attention kernel"):
        run("fedfrozen", model={"head": torch.zeros(1)}, warmup_rounds=0)


def test_local_shares_nothing():
    strategy, rows, seen = run("local")
    assert not any(value.any() for value in strategy.model.values())
    assert rows[1]["bytes_up_by_role"] == {} and rows[1]["bytes_down_by_role"] == {}
    assert all(request.plan.private == tuple(ROLES) for _, request, _ in seen)
