"""The split GPT-2 is the fused one, with three tensors where there was one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import GPT2Config, GPT2ForSequenceClassification
from transformers.pytorch_utils import Conv1D

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.exchange.role import KERNEL
from fedfrozen_app.models.roles import roles_of
from fedfrozen_app.models.split import SplitProjection, join_fused, split_fused

D = 8
IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])


def fused_gpt2() -> GPT2ForSequenceClassification:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=20,
        n_positions=6,
        n_embd=D,
        n_layer=2,
        n_head=2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2ForSequenceClassification(config).double().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # zero at first, and a lost zero would not show
            nn.init.normal_(parameter)
    return model


def run(model: nn.Module) -> torch.Tensor:
    return model(input_ids=IDS, attention_mask=MASK).logits


def test_split_computes_what_the_fused_model_did():
    model = fused_gpt2()
    before = run(model)
    split_fused(model)
    assert (run(model) - before).abs().max() < 1e-12


def test_split_gradients_are_thirds_of_the_fused_gradient():
    model = fused_gpt2()
    run(model).square().sum().backward()
    fused = model.transformer.h[1].attn.c_attn.weight.grad  # (d, 3d)
    other = fused_gpt2()
    split_fused(other)
    run(other).square().sum().backward()
    projection = other.transformer.h[1].attn.c_attn
    parts = [projection.query.weight.grad, projection.key.weight.grad, projection.value.weight.grad]
    torch.testing.assert_close(torch.cat(parts, dim=1), fused, rtol=0, atol=1e-12)
    assert all(part.abs().max() > 0 for part in parts)


def test_a_frozen_kernel_leaves_the_value_its_gradient():
    model = fused_gpt2()
    split_fused(model)
    found = roles_of(model)
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        parameter.requires_grad_(found[name].kind not in KERNEL)
    run(model).square().sum().backward()
    for name, parameter in parameters.items():
        if found[name].kind in KERNEL:
            assert parameter.grad is None
        elif found[name].kind == "value":
            assert parameter.grad.abs().max() > 0


def test_join_gives_back_the_original_state_to_the_bit():
    model = fused_gpt2()
    original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    split_fused(model)
    assert "transformer.h.0.attn.c_attn.query.weight" in model.state_dict()
    joined = join_fused(model.state_dict())
    assert list(joined) == list(original)
    assert all(torch.equal(joined[name], tensor) for name, tensor in original.items())


def test_parts_are_in_the_order_of_gpt2():
    model = fused_gpt2()
    weight = model.transformer.h[0].attn.c_attn.weight.detach().clone()
    split_fused(model)
    projection = model.transformer.h[0].attn.c_attn
    assert torch.equal(projection.query.weight, weight[:, :D])
    assert torch.equal(projection.key.weight, weight[:, D : 2 * D])
    assert torch.equal(projection.value.weight, weight[:, 2 * D :])


def test_splitting_twice_changes_nothing_and_draws_nothing():
    model = fused_gpt2()
    state = torch.get_rng_state()
    split_fused(model)
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    split_fused(model)
    assert list(model.state_dict()) == list(first)
    assert torch.equal(torch.get_rng_state(), state)


def test_parts_do_not_keep_the_fused_tensor_alive():
    model = fused_gpt2()
    split_fused(model)
    weight = model.transformer.h[0].attn.c_attn.key.weight
    assert weight.untyped_storage().nbytes() == D * D * 8


def test_other_models_are_left_alone(tiny):
    model = tiny("bert")
    names = list(model.state_dict())
    split_fused(model)
    assert list(model.state_dict()) == names
    assert list(join_fused(model.state_dict())) == names


def test_join_refuses_a_state_with_a_part_missing():
    model = fused_gpt2()
    split_fused(model)
    state = model.state_dict()
    del state["transformer.h.1.attn.c_attn.key.bias"]
    with pytest.raises(UserError, match=r"lacks transformer.h.1.attn.c_attn.key.bias"):
        join_fused(state)


@given(width=st.integers(1, 6), out=st.integers(1, 6), linear=st.booleans(), bias=st.booleans())
def test_split_projection_equals_its_fused_layer(width, out, linear, bias):
    """For both weight layouts: Conv1D, (in, out), and Linear, (out, in)."""
    layer = nn.Linear(width, 3 * out, bias=bias).double() if linear else Conv1D(3 * out, width).double()
    x = torch.randn(2, 3, width, dtype=torch.float64)
    split = SplitProjection(layer, axis=0 if linear else 1)
    torch.testing.assert_close(split(x), layer(x), rtol=0, atol=1e-12)
    assert [name for name, _ in split.named_children()] == ["query", "key", "value"]
