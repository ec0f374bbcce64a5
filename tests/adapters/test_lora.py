"""Low-rank adapters beside the projections of every architecture, and what rounds add to frozen weights."""

import pytest
import torch

from fedfrozen_app.adapters import lora
from fedfrozen_app.adapters.adapted import base_digest, layers_in, merged_state, words
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.exchange.role import KERNEL
from fedfrozen_app.models.build import parameters_of
from fedfrozen_app.models.roles import roles_of
from fedfrozen_app.models.split import join_fused
from tests.models.conftest import SETTINGS, _example

RANK, SCALE = 3, 0.7


def adapt(model, targets="all", layers=None, rank=RANK, dropout=0.0):
    given = {"rank": rank, "scale": SCALE, "dropout": dropout, "seed": 1}
    lora.inject(model, roles_of(model), words(targets), layers, **given)
    return model


def stir(model):
    """Adapters as training might have left them."""
    generator = torch.Generator().manual_seed(3)
    for name, value in model.named_parameters():
        if lora.is_adapter(name):
            value.data = torch.randn(value.shape, generator=generator, dtype=value.dtype) / 4


@pytest.mark.parametrize("family", SETTINGS)
def test_adapters_change_nothing_at_first_and_then_what_the_merged_weights_do(tiny, logits, family):
    """Also where a weight is square and kept the other way round, as GPT-2's are."""
    plain, model = tiny(family, dtype="float64"), tiny(family, dtype="float64")
    before = parameters_of(plain)
    adapt(model)
    torch.testing.assert_close(logits(family, model), logits(family, plain), rtol=0, atol=0)
    kept = {name: value for name, value in parameters_of(model).items() if not lora.is_adapter(name)}
    assert list(kept) == list(before) and base_digest(kept) == base_digest(before)
    stir(model)
    moved = logits(family, model)
    assert (moved - logits(family, plain)).abs().max() > 1e-6
    plain.load_state_dict(merged_state(model))
    torch.testing.assert_close(logits(family, plain), moved, rtol=0, atol=1e-12)
    assert join_fused(merged_state(model))  # what an export writes


@pytest.mark.parametrize("family", SETTINGS)
def test_an_adapter_has_the_role_of_what_it_adapts(tiny, family):
    model = adapt(tiny(family), "query value")
    roles = roles_of(model)
    own = {name: role for name, role in roles.items() if role.adapter}
    assert {role.kind for role in own.values()} == {"query", "value"}
    assert {role.layer for role in own.values()} == {0, 1} and {role.word for role in own.values()} == {
        "adapter"
    }
    assert len(own) == 2 * 2 * 2  # two factors, two roles, two layers
    for name, role in own.items():
        weight = roles[name.removesuffix(f".{lora.A}").removesuffix(f".{lora.B}") + ".weight"]
        assert (weight.kind, weight.layer, weight.adapter) == (role.kind, role.layer, False)


def test_targets_are_roles_and_layers(tiny):
    def paths(targets, layers=None):
        model = adapt(tiny("bert"), targets, layers)
        roles = roles_of(model)
        return {(roles[f"{path}.{lora.A}"].kind, roles[f"{path}.{lora.A}"].layer) for path in adapted(model)}

    def adapted(model):
        return lora.adapted(dict(model.named_parameters()))

    assert paths("value.0") == {("value", 0)}
    assert paths(["kernel"], layers_in("1")) == {(kind, 1) for kind in KERNEL}
    assert paths("query", layers_in("0-1")) == {("query", 0), ("query", 1)}
    assert len(adapted(adapt(tiny("bert")))) == 2 * 6  # all: four of attention, two of the mlp, in two layers


def test_the_same_seed_draws_the_same_and_each_projection_its_own(tiny):
    one, other = (parameters_of(adapt(tiny("vit"), "query")) for _ in range(2))
    names = [name for name in one if name.endswith(lora.A)]
    assert all(torch.equal(one[name], other[name]) for name in names)
    assert not torch.equal(one[names[0]], one[names[1]])
    assert one[names[0]].abs().max() <= 8**-0.5 and one[names[0]].std() > 0.1
    assert all(not one[name].any() for name in one if name.endswith(lora.B))


def test_dropout_is_of_what_an_adapter_reads_and_only_in_training(tiny, logits):
    model, plain = adapt(tiny("vit"), dropout=0.5), adapt(tiny("vit"))
    for each in (model, plain):
        stir(each)
    torch.testing.assert_close(logits("vit", model), logits("vit", plain))
    model.train()
    assert not torch.allclose(logits("vit", model), logits("vit", plain))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rank": 9}, "adapter.rank=9 is more than vit"),
        ({"targets": "querry"}, "adapter.targets names 'querry'"),
        ({"targets": "head"}, "has no projection to adapt"),
        ({"targets": "value.7"}, "layers go from 0 to 1"),
        ({"targets": []}, "names no projections"),
        ({"layers": range(5, 7)}, "has no projections for adapters"),
    ],
)
def test_what_cannot_be_adapted_is_said_in_a_sentence(tiny, given, said):
    with pytest.raises(UserError, match=said.replace("(", r"\(")):
        adapt(tiny("vit"), **given)


@pytest.mark.parametrize("text", ["3-1", "a", "1,2", "-1"])
def test_layers_are_a_range(text):
    with pytest.raises(UserError, match="no range of layers"):
        layers_in(text)


def test_a_smaller_rank_stays_zero_where_it_is_filled_up(tiny):
    """Neither factor has a gradient where the other is zero, and weight decay leaves a zero alone."""
    model = adapt(tiny("vit", dtype="float64"), "query value")
    stir(model)
    values = dict(model.named_parameters())
    own = [name for name in values if lora.is_adapter(name)]
    for name in own:
        small = lora.narrowed(name, values[name].detach(), 1)
        values[name].data = lora.widened(name, small, values[name].shape)
    optimizer = torch.optim.AdamW([values[name] for name in own], lr=0.1, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(**_example("vit", torch.float64)).logits.square().sum().backward()
        optimizer.step()
    for name in own:
        small = lora.narrowed(name, values[name].detach(), 1)
        assert small.abs().sum() > 0
        torch.testing.assert_close(
            lora.widened(name, small, values[name].shape), values[name].detach(), rtol=0, atol=0
        )


def test_an_array_that_is_no_smaller_rank_is_refused():
    for name, shape in (("q.lora_A.weight", (3, 5)), ("q.lora_A.weight", (2, 4)), ("q.weight", (1, 5))):
        with pytest.raises(ValueError, match="has the shape"):
            lora.widened(name, torch.zeros(shape), (2, 5))


def test_folds_add_up_in_the_order_of_rounds_as_factors_or_whole():
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    outer, inner, more = draw(9, 2), draw(2, 7), draw(9, 7)
    small = lora.merged_delta_of(10, "x.q", outer, inner)
    assert set(small) == {"fold.10/x.q.lora_A.weight", "fold.10/x.q.lora_B.weight"}
    large = lora.merged_delta_of(9, "x.q", draw(9, 8), draw(8, 7))
    assert set(large) == {"fold.9/x.q.weight"}
    both = lora.merged_deltas_by_path({**small, "fold.9/x.q.weight": more, "x.q.lora_A.weight": inner})
    assert list(both) == ["x.q"] and next(iter(both["x.q"])) == "fold.9/x.q.weight"
    torch.testing.assert_close(lora.sum_of(both["x.q"]), more + outer @ inner, rtol=0, atol=1e-12)
