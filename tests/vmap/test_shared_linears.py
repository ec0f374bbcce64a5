"""Frozen linear layers under vmap: the numbers of torch's own, in one operation each."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from fedfrozen_app.vmap.shared_linears import shared_linears


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.fixture
def model():
    torch.manual_seed(0)
    parts = [nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 2)]
    return nn.Sequential(*parts).double()


TRAINED = ["0.weight", "0.bias"]


def gradients(model, rows):
    """For two clients with weights of their own, (clients, examples, *shape); by name."""
    held = {name: value.detach() for name, value in model.named_parameters()}
    own = {name: torch.stack([held[name], held[name] + 0.1]) for name in TRAINED}

    def loss(trained, row):
        rest = {name: value for name, value in held.items() if name not in trained}
        return functional_call(model, {**rest, **trained}, row).square().sum()

    each = vmap(grad_and_value(loss), in_dims=(None, 0))
    return vmap(each)(own, rows)


def test_it_is_torchs_own_layer_in_one_operation(model):
    rows = torch.randn(2, 6, 7, 3, dtype=torch.float64)
    expected, values = gradients(model, rows)
    with shared_linears(model, TRAINED), Seen() as seen:
        found, again = gradients(model, rows)
    torch.testing.assert_close(again, values, rtol=1e-12, atol=0)
    for name in TRAINED:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-12, atol=1e-15)
    assert seen.names.count("addmm") == 1  # of the last; the first has weights for each client
    assert all("forward" not in vars(module) for module in model)


def test_it_follows_autocast(model):
    rows = torch.randn(2, 6, 7, 3)
    with shared_linears(model.float(), TRAINED), torch.autocast("cpu", torch.bfloat16):
        found, _ = gradients(model, rows)
    with torch.autocast("cpu", torch.bfloat16):
        expected, _ = gradients(model, rows)
    for name in TRAINED:
        torch.testing.assert_close(found[name], expected[name], rtol=0.05, atol=0.05)


def test_weights_that_are_mapped_over_are_not_shared(model):
    """An algorithm may mix what it does not train: then each row has its own."""
    rows, stacked = torch.randn(2, 7, 4, dtype=torch.float64), torch.randn(2, 2, 4, dtype=torch.float64)
    layer = model[4]

    def one(weight, row):
        return functional_call(layer, {"weight": weight}, row)

    with shared_linears(model, TRAINED):
        found = vmap(one)(stacked, rows)
    torch.testing.assert_close(found, rows @ stacked.mT + layer.bias, rtol=1e-12, atol=1e-15)
