"""Tensors on the wire and back, to the bit, whatever their type and shape."""

import pytest
import torch
from flwr.app import Array, ArrayRecord
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from fedfrozen_app.core.digests import digest
from fedfrozen_app.exchange.arrays import PACKED, LocalArray, to_record, to_tensor, to_tensors

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


@settings(max_examples=60, deadline=None)
@given(SHAPES, DTYPES, st.integers(0, 2**31))
def test_there_and_back(shape, dtype, seed):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    record = to_record({"x": tensor, "mask": torch.ones(3, dtype=torch.uint8)}, local=False)
    assert len(record) == 1  # a request of Flower's for each would take longer than all their bytes
    back = to_tensors(record)["x"]
    assert back.dtype == dtype and back.shape == tensor.shape and torch.equal(back, tensor)
    assert digest(back) == digest(tensor)
    back.zero_()  # the server turns a reply into an update in place


def test_names_keep_their_order():
    tensors = {f"{name}.{number}": torch.ones(1) for number in range(12) for name in ("b", "a b", "")}
    assert list(to_tensors(to_record(tensors, local=False))) == list(tensors)


def test_nothing_is_packed_where_there_is_nothing():
    assert len(to_record({}, local=False)) == 0 and to_tensors(to_record({}, local=False)) == {}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "cannot be read"),
        (save({"x": torch.zeros(3)})[:-1], "cannot be read"),
        (b"\xff" * 20, "cannot be read"),
        (
            save({"0 x": torch.zeros(3, dtype=torch.int64)}),
            "x, which has the unknown type torch.int64",
        ),
    ],
)
def test_a_pack_that_is_none(data, reason):
    record = ArrayRecord()
    record[PACKED] = Array("uint8", (len(data),), PACKED, data)
    with pytest.raises(ValueError, match=reason):
        to_tensors(record)


def test_digest_sees_type_shape_and_every_bit():
    zeros = torch.zeros(4)
    others = [torch.zeros(2, 2), torch.zeros(4, dtype=torch.float64), torch.tensor([0, 0, 0, -0.0])]
    assert len({digest(tensor) for tensor in [zeros, *others]}) == 4
    assert digest(torch.arange(6.0).reshape(2, 3).t()) == digest(torch.arange(6.0).reshape(2, 3).t().clone())


def test_local_arrays_are_the_tensor_itself():
    tensor = torch.randn(3)
    record = to_record({"x": tensor}, local=True)
    assert isinstance(record["x"], LocalArray) and to_tensor(record["x"]) is tensor
    assert record["x"].data == tensor.numpy().tobytes()


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
