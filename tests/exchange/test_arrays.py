"""Tensors on the wire and back, to the bit, whatever their type and shape."""

import pytest
import torch
from flwr.app import Array
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfrozen_app.exchange.arrays import LocalArray, digest, to_record, to_tensor

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


@settings(max_examples=60, deadline=None)
@given(SHAPES, DTYPES, st.integers(0, 2**31))
def test_there_and_back(shape, dtype, seed):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    array = to_record({"x": tensor}, local=False)["x"]
    back = to_tensor(array)
    assert back.dtype == dtype and back.shape == tensor.shape and torch.equal(back, tensor)
    assert len(array.data) == tensor.numel() * tensor.element_size()  # no header: every byte is counted
    assert digest(back) == digest(tensor)


def test_digest_sees_type_shape_and_every_bit():
    zeros = torch.zeros(4)
    others = [torch.zeros(2, 2), torch.zeros(4, dtype=torch.float64), torch.tensor([0, 0, 0, -0.0])]
    assert len({digest(tensor) for tensor in [zeros, *others]}) == 4
    assert digest(torch.arange(6.0).reshape(2, 3).t()) == digest(torch.arange(6.0).reshape(2, 3).t().clone())


def test_local_arrays_are_the_tensor_itself():
    tensor = torch.randn(3)
    record = to_record({"x": tensor}, local=True)
    assert isinstance(record["x"], LocalArray) and to_tensor(record["x"]) is tensor
    assert record["x"].data == to_record({"x": tensor}, local=False)["x"].data


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (Array("float32", (2,), "raw", b"1234"), "4 bytes for the shape"),
        (Array("float32", (2,), "pickle", b"12345678"), "unknown type"),
        (Array("object", (1,), "raw", b"12345678"), "unknown type"),
    ],
)
def test_arrays_that_are_not_what_they_say(array, reason):
    with pytest.raises(ValueError, match=reason):
        to_tensor(array)
