"""A convolution as a product is the convolution, alone and for many clients at once."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

from fedfrozen_app.vmap.convolution import _product, as_products


@pytest.mark.parametrize(
    "words",
    [
        {"kernel_size": 3},
        {"kernel_size": (3, 5), "stride": (2, 1), "padding": (1, 2)},
        {"kernel_size": 4, "stride": 4},  # a Transformer's patches
        {"kernel_size": 4, "stride": 4, "bias": False},
    ],
)
@pytest.mark.parametrize("views", [False, True])
def test_products_equal_convolutions_and_their_gradients(words, views):
    model = nn.Sequential(nn.Conv2d(3, 5, **words)).double()
    pictures = torch.randn(2, 3, 13, 16, dtype=torch.float64, requires_grad=True)
    plain = model(pictures)
    gradients = torch.autograd.grad(plain.square().sum(), [pictures, *model.parameters()])
    with as_products(model, {"0.weight"}, views=views):
        product = model(pictures)
    assert "forward" not in vars(model[0])
    torch.testing.assert_close(product, plain)
    for gradient, other in zip(
        gradients, torch.autograd.grad(product.square().sum(), [pictures, *model.parameters()]), strict=True
    ):
        torch.testing.assert_close(other, gradient)


@pytest.mark.parametrize("views", [False, True])
def test_every_client_has_its_own_weights(views):
    model = nn.Sequential(nn.Conv2d(3, 5, 3)).double()
    weights = {name: torch.randn(4, *value.shape).double() for name, value in model.named_parameters()}
    pictures = torch.randn(4, 2, 3, 8, 8, dtype=torch.float64)

    def one(own, given):
        return functional_call(model, own, (given,))

    plain = vmap(one)(weights, pictures)
    with as_products(model, {"0.weight", "0.bias"}, views=views):
        torch.testing.assert_close(vmap(one)(weights, pictures), plain)


@pytest.mark.parametrize(
    "conv", [nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 4, 9), nn.Conv2d(4, 4, 3, dilation=2)]
)
def test_what_would_cost_more_or_is_not_served_stays(conv):
    model = nn.Sequential(conv)
    with as_products(model, {"0.weight"}):
        assert not is_product(conv)
    with as_products(nn.Sequential(plain := nn.Conv2d(3, 3, 3)), ()):
        assert not is_product(plain)  # all clients share it: no groups come of it


def is_product(conv: nn.Module) -> bool:
    way = vars(conv)["forward"].func
    return isinstance(way, partial) and way.func is _product


@pytest.mark.parametrize("trained", [(), {"0.weight", "0.bias"}])
def test_rounded_weights_are_those_of_autocast_for_many_clients_too(trained):
    """Frozen ones as well as trained ones, which torch alone refuses: its autocast skips a mapped call."""
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU())
    pictures = torch.randn(4, 2, 3, 8, 8)
    rounded = {name: value.detach().bfloat16() for name, value in model.named_parameters()}

    def one(given):
        return functional_call(model, rounded, (given,))

    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        plain = torch.stack([model(given) for given in pictures])
        with as_products(model, trained):
            mapped = vmap(one)(pictures)
    assert mapped.dtype == torch.bfloat16
    torch.testing.assert_close(mapped, plain, rtol=0.02, atol=0.02)
