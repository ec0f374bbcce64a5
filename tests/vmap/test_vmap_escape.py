"""Whole tensors of all clients, from within a vmap over them."""

import pytest
import torch
from torch.func import grad, vmap

from fedfrozen_app.vmap.vmap_escape import NestedGradientError, is_mapped, outside_vmap, stacked

CLIENTS, RUNS = 3, 2


def kernel(lead, rows, bias):
    """What a kernel is given: plain tensors with all axes first, and no vmap around."""
    assert not is_mapped() and rows.shape[:lead] == bias.shape[:lead]
    return rows + bias.unsqueeze(lead)


@pytest.mark.parametrize("axes", [(0, 0), (1, 0), (0, None), (None, 0)], ids=str)
def test_the_axis_of_clients_may_be_any_and_need_not_be_there(axes):
    rows, bias = torch.randn(CLIENTS, CLIENTS, 4), torch.randn(CLIENTS, 4, requires_grad=True)
    given = [rows[0] if axes[0] is None else rows, bias[0] if axes[1] is None else bias]
    expected = vmap(lambda a, b: a + b, in_dims=axes)(*given)
    found = vmap(lambda a, b: stacked(kernel, a, b), in_dims=axes)(*given)
    assert torch.equal(found, expected)
    (gradient,), (twin,) = (torch.autograd.grad(each.square().sum(), bias) for each in (found, expected))
    assert torch.allclose(gradient, twin)


@pytest.mark.parametrize("inner", [(0, 0), (0, None), (None, None)], ids=str)
@pytest.mark.parametrize("outer", [(0, 0), (0, None), (None, 0)], ids=str)
def test_of_two_vmaps_each_may_map_over_either(inner, outer):
    shapes = [(4, 5), (5,)]
    given = []
    for shape, within, around in zip(shapes, inner, outer, strict=True):
        lead = [n for n, axis in ((RUNS, around), (CLIENTS, within)) if axis is not None]
        given.append(torch.randn(*lead, *shape))

    def mapped(run):
        over_clients = vmap(run, in_dims=inner) if inner != (None, None) else within_another(run)
        return vmap(over_clients, in_dims=outer)(*given)

    assert torch.equal(mapped(lambda a, b: stacked(kernel, a, b)), mapped(lambda a, b: a + b))


def within_another(run):
    """Within a vmap that maps over nothing that `run` is given."""
    return lambda rows, bias: vmap(lambda other: run(rows, bias) + other)(torch.zeros(CLIENTS))


def test_outside_of_any_vmap_there_is_one_client():
    rows, bias = torch.randn(4, 5), torch.randn(5)
    assert torch.equal(stacked(kernel, rows, bias), rows + bias)


def test_the_vmap_is_back_however_that_ends():
    def fail(lead, rows):
        raise ValueError("no")

    def one(rows):
        with pytest.raises(ValueError, match="no"):
            stacked(fail, rows)
        assert is_mapped()
        return rows.sum()

    rows = torch.randn(CLIENTS, 4)
    assert torch.equal(vmap(one)(rows), rows.sum(dim=1))
    assert not is_mapped()


def test_a_rule_may_return_several_and_is_told_of_axes():
    def rule(whole, axes):
        assert axes == (1, None)
        return whole[0].movedim(1, 0), whole[0].movedim(1, 0) * whole[1]

    left, right = torch.randn(4, CLIENTS), torch.randn(4)
    same, times = vmap(lambda a, b: outside_vmap(rule, a, b), in_dims=(1, None))(left, right)
    assert torch.equal(same, left.T) and torch.equal(times, left.T * right)


def test_a_gradient_within_a_vmap_is_refused_and_not_lost():
    rows = torch.randn(CLIENTS, 4)
    with pytest.raises(NestedGradientError, match="inside this vmap"):
        vmap(grad(lambda own: stacked(lambda lead, whole: whole.sum(dim=lead), own)))(rows)
    assert not is_mapped()
