"""How clients' adapters become one: by hand, and against the mean of the clients' merged models."""

import pytest
import torch

from fedfrozen_app.adapters import lora
from fedfrozen_app.adapters.merged_deltas import is_merged_delta
from fedfrozen_app.core import registry

PATH, OUT, IN, RANK, SCALE = "x.query", 11, 9, 4, 0.5
A, B = f"{PATH}.{lora.A}", f"{PATH}.{lora.B}"
SIZES = {"a": (30.0, 4), "b": (5.0, 1), "c": (12.0, 2)}  # examples, rank


def clients(sizes=SIZES):
    """By client its weight, rank and factors."""
    generator = torch.Generator().manual_seed(7)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return {name: (weight, rank, draw(OUT, rank), draw(rank, IN)) for name, (weight, rank) in sizes.items()}


def full(name, array):
    return lora.widened(name, array, (RANK, IN) if name == A else (OUT, RANK))


def means(found):
    total = sum(weight for weight, *_ in found.values())
    return {
        name: sum(one[0] / total * full(name, one[place]) for one in found.values())
        for name, place in ((B, 2), (A, 3))
    }


def mean_change(found):
    total = sum(weight for weight, *_ in found.values())
    return sum(weight / total * SCALE * outer @ inner for weight, _, outer, inner in found.values())


def merged(rule, found, number=1, model=None):
    """The model after a round, with what the rule changed, and how far its weight is from the base."""
    rule.begin()
    for name, (weight, _, outer, inner) in found.items():
        rule.take(name, {B: full(B, outer), A: full(A, inner)}, weight)
    model = {**(model or {}), **means(found)}
    for name, value in rule.close(number, model).items():
        model[name] = value
    model = {name: value for name, value in model.items() if value is not None}
    merged_deltas = lora.merged_deltas_by_path({n: v for n, v in model.items() if is_merged_delta(n)})
    change = SCALE * model[B] @ model[A]
    return model, change + (lora.sum_of(merged_deltas[PATH]) if merged_deltas else 0)


def rule_of(name):
    ranks = {client: rank for client, (_, rank) in SIZES.items() if rank < RANK}
    return registry.find("adapter_rules", name)(SCALE, 5, ranks)


@pytest.mark.parametrize("name", ["fedex", "stack"])
def test_the_merged_model_is_the_mean_of_the_clients_merged_models(name):
    found = clients()
    _, change = merged(rule_of(name), found)
    torch.testing.assert_close(change, mean_change(found), rtol=0, atol=1e-12)


def test_plain_averaging_is_not_the_mean_and_misses_it_by_the_factors_spread():
    found = clients()
    _, change = merged(rule_of("average"), found)
    mean, total = means(found), sum(weight for weight, *_ in found.values())
    spread = sum(
        weight / total * SCALE * (full(B, outer) - mean[B]) @ (full(A, inner) - mean[A])
        for weight, _, outer, inner in found.values()
    )
    torch.testing.assert_close(change, mean_change(found) - spread, rtol=0, atol=1e-12)
    assert spread.norm() / mean_change(found).norm() > 0.3


def test_ffa_by_hand():
    """Two clients of 1 and 3 examples, A = [1 2], B₁ = [4; 0], B₂ = [0; 8]: B̄ = [1; 6]."""
    rule = registry.find("adapter_rules", "ffa")(2.0, 0, {})
    assert rule.frozen([A, B, "head.weight"]) == [A] and not rule.one_by_one
    mean = 0.25 * torch.tensor([[4.0], [0.0]]) + 0.75 * torch.tensor([[0.0], [8.0]])
    assert rule.close(1, {A: torch.tensor([[1.0, 2.0]]), B: mean}) == {}
    change = 2.0 * mean @ torch.tensor([[1.0, 2.0]])
    assert change.tolist() == [[2.0, 4.0], [12.0, 24.0]]  # = 0.25 · 2B₁A + 0.75 · 2B₂A


def test_stacking_starts_anew_with_what_it_draws_for_the_round():
    rule = rule_of("stack")
    model, _ = merged(rule, clients(), number=1)
    assert not model[B].any() and model[A].abs().max() <= IN**-0.5
    later, _ = merged(rule, clients(), number=2)
    assert not torch.equal(model[A], later[A])


def test_only_those_who_sent_a_projection_count_in_it():
    rule, found = rule_of("fedex"), clients()
    rule.begin()
    rule.take("a", {"head.weight": torch.zeros(2)}, 99.0)
    _, change = merged(rule, {"b": found["b"], "c": found["c"]})
    torch.testing.assert_close(change, mean_change({n: found[n] for n in "bc"}), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["fedex", "stack"])
def test_folds_are_never_larger_than_the_weight_twice_and_stay_exact(name):
    """Factors pile up until the weight itself is smaller; then that takes their place."""
    rule, model, expected, dense = rule_of(name), {}, 0, 0
    sizes = {"a": (3.0, 1), "b": (1.0, 1)}
    rule.ranks = {"a": 1, "b": 1}
    for number in range(1, 9):
        before = {n: v for n, v in model.items() if is_merged_delta(n)}
        base = lora.sum_of(lora.merged_deltas_by_path(before)[PATH]) if before else 0
        found = {
            client: (weight, rank, outer * number, inner)
            for client, (weight, rank, outer, inner) in clients(sizes).items()
        }
        model, change = merged(rule, found, number, before)
        expected = base + mean_change(found)
        torch.testing.assert_close(change, expected, rtol=0, atol=1e-12)
        merged_deltas = {n: v for n, v in model.items() if is_merged_delta(n)}
        factors = sum(v.numel() for n, v in merged_deltas.items() if not n.endswith(f"/{PATH}.weight"))
        dense += any(n.endswith(f"/{PATH}.weight") for n in merged_deltas)
        assert factors <= OUT * IN and len(merged_deltas) - 2 * (factors > 0) <= 8
    assert dense
