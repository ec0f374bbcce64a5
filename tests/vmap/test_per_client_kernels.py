"""Layers with weights of every client's own. The kernels themselves are a GPU's: test_gpu.py."""

import pytest
import torch
from torch import nn
from torch.func import vmap

from fedfrozen_app.vmap import per_client_kernels
from fedfrozen_app.vmap.convolution import as_products
from fedfrozen_app.vmap.per_client_kernels import PerClientKernels


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.norm = nn.Linear(8, 64), nn.LayerNorm(64)
        self.plain, self.narrow = nn.Linear(64, 64, bias=False), nn.Linear(64, 3)
        self.both = nn.LayerNorm((8, 8))
        self.seen, self.patches = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 8, 4, stride=4)


def shifted(rows, bias):
    """What a kernel is given, once all clients are together: rows of each, and its own bias."""
    assert not torch._C._functorch.is_batchedtensor(rows) and bias.shape == (len(rows), rows.shape[-1])
    return rows + bias.view(len(rows), *(1 for _ in rows.shape[1:-1]), -1)


@pytest.mark.parametrize("lead", [(4,), (2, 3)], ids=["clients", "clients of runs"])
@pytest.mark.parametrize("own", [True, False])
def test_a_kernel_sees_the_rows_of_all_clients_at_once(lead, own):
    rows = torch.randn(*lead, 5, 7, 6)
    bias = torch.randn(*lead, 6) if own else torch.randn(6)
    bias.requires_grad_()

    def add(rows, bias):
        return per_client_kernels._stacked(shifted, rows, bias)

    stacked = add
    for _ in lead:
        stacked = vmap(stacked, in_dims=(0, 0 if own else None))
    found = stacked(rows, bias)
    expected = rows + (bias.view(*lead, 1, 1, 6) if own else bias)
    assert torch.equal(found, expected)
    (gradient,) = torch.autograd.grad(found.square().sum(), bias)
    (twin,) = torch.autograd.grad(expected.square().sum(), bias)
    assert torch.allclose(gradient, twin)


def test_what_trains_and_has_a_kernel_is_computed_another_way(monkeypatch):
    model = Model()
    monkeypatch.setattr(per_client_kernels, "has_gpu_kernels", lambda device: True)
    monkeypatch.setattr(per_client_kernels, "_compiling", lambda *given: given)
    monkeypatch.setattr(per_client_kernels, "_is_compiled", lambda job: True)
    ours = PerClientKernels(model, torch.device("cpu"), torch.float32)
    _, kinds, _ = ours.begin()
    assert kinds == {(nn.Linear, (64,)), (nn.LayerNorm, (64,)), (nn.Conv2d, (1, 1, 27, 4, 0, 0))}
    trained = [name for name, _ in model.named_parameters() if not name.startswith("wide.")]
    with as_products(model, trained), ours.used(trained):
        lent = {
            name: module.forward.func.__module__ for name, module in model.named_modules() if is_lent(module)
        }
    ours_are = {name for name, where in lent.items() if where == per_client_kernels.__name__}
    assert ours_are == {"norm", "seen"} and set(lent) - ours_are == {"patches"}
    assert not any(is_lent(module) for module in model.modules())


def is_lent(module):
    return "forward" in vars(module)


def test_without_a_gpu_nothing_changes():
    ours = PerClientKernels(Model(), torch.device("cpu"), torch.float32)
    assert ours.begin() is None
    with ours.used(["norm.weight", "norm.bias"]):
        assert "forward" not in vars(ours._model.norm)


def test_what_is_the_same_for_all_clients_goes_through_a_kernel_too():
    """Such as what the round's own model, which MOON reads beside each client's, says of no row at all."""
    rows, bias = torch.randn(5, 6), torch.randn(6)

    def add(own):
        return per_client_kernels._stacked(shifted, rows, bias) + own

    own = torch.randn(3, 6)
    assert torch.equal(vmap(add)(own), rows + bias + own.unsqueeze(1))
