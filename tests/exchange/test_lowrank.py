"""Factors of matrices: a round by hand, what is kept, sizes, and the same bits wherever they are decoded."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfrozen_app.core import registry
from fedfrozen_app.core.seeds import numpy_generator
from fedfrozen_app.exchange.codec import ClientSide
from fedfrozen_app.exchange.role import Role

ROLES = {"a": Role("query", 0), "b": Role("mlp", 1)}


def coder_of(rank):
    return registry.find("codecs", "lowrank")({"rank": rank})


def sent_and_kept(coder, update, side):
    base = {"a": torch.zeros_like(update)}
    sent = coder.encode({"a": update}, base, ROLES, side)
    assert sent["a"].shape == (coder.size_of(update),) and sent["a"].dtype == torch.uint8
    return coder.decode(sent, base, ROLES)["a"], side.residual["a"]


def test_a_round_by_hand():
    """Of diag(8, 4, 2, 1) with one column: p = D²·Dq/‖…‖ after two steps, and the update is p(Dp)ᵀ."""
    matrix = torch.diag(torch.tensor([8.0, 4, 2, 1], dtype=torch.float64))
    decoded, kept = sent_and_kept(coder_of(1), matrix, ClientSide(7))
    start = numpy_generator(7, "codec", "a").standard_normal((4, 1))[:, 0]
    after = np.array([8.0**3, 4**3, 2**3, 1]) * start  # D q, then D·Dᵀ of that
    left = after / np.linalg.norm(after)
    by_hand = np.outer(left, matrix.numpy() @ left)
    assert np.allclose(decoded.numpy(), by_hand, atol=1e-12)
    assert np.allclose(kept.numpy(), matrix.numpy() - by_hand, atol=1e-12)


def test_a_matrix_of_that_rank_is_sent_whole():
    left, right = torch.randn(12, 2, dtype=torch.float64), torch.randn(2, 3, 5, dtype=torch.float64)
    matrix = torch.einsum("ar,rbc->abc", left, right)  # a convolution's: a row for each output
    decoded, kept = sent_and_kept(coder_of(2), matrix, ClientSide(1))
    assert torch.allclose(decoded, matrix, atol=1e-12) and kept.abs().max() < 1e-12


@pytest.mark.parametrize("shape", [(7,), (3, 3), (2, 50), (), (0,), (5, 0)])
def test_what_gains_nothing_is_sent_exactly(shape):
    update = torch.randn(shape)
    decoded, kept = sent_and_kept(coder_of(2), update, ClientSide())
    assert torch.equal(decoded, update) and not kept.any()
    assert coder_of(2).size_of(update) == update.numel() * 4


@settings(max_examples=25, deadline=None)
@given(st.integers(5, 12), st.integers(5, 12), st.integers(1, 2), st.integers(0, 100))
def test_what_was_not_sent_is_kept_and_shrinks(rows, columns, rank, seed):
    """sent + kept = update + kept before; P is orthonormal, so that a code never makes the rest longer."""
    generator = torch.Generator().manual_seed(seed)
    coder, before = coder_of(rank), torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    update = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    side = ClientSide(seed, {"a": before.clone()})
    decoded, kept = sent_and_kept(coder, update, side)
    assert torch.allclose(decoded + kept, update + before, atol=1e-12)
    assert kept.norm() < (update + before).norm()


def test_rounds_send_everything_in_the_end():
    """The same rest, coded again and again, goes to zero."""
    coder, side = coder_of(1), ClientSide(0)
    update = torch.randn(8, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    total, nothing = torch.zeros_like(update), torch.zeros_like(update)
    for number in range(40):
        side.seed = number
        decoded, kept = sent_and_kept(coder, update if number == 0 else nothing, side)
        total += decoded
    assert kept.norm() < 0.01 * update.norm() and torch.allclose(total + kept, update, atol=1e-12)


def test_sizes_are_those_of_shapes_and_types():
    coder = coder_of(3)
    for dtype, width in ((torch.float64, 8), (torch.float32, 4), (torch.bfloat16, 4)):
        update = torch.randn(20, 30).to(dtype)
        assert coder.size_of(update.to("meta")) == 3 * (20 + 30) * width
        decoded, _ = sent_and_kept(coder, update, ClientSide())
        assert decoded.dtype == dtype
    model = {"a": torch.empty(20, 30, device="meta"), "b": torch.empty(9, device="meta")}
    assert coder.sizes(model, model, ROLES) == {"query": 600, "mlp": 36}


def test_bits_do_not_depend_on_threads():
    """A broadcast is decoded by server and clients: the same bits, or every array would be sent again."""
    coder, update = coder_of(4), torch.randn(96, 80, generator=torch.Generator().manual_seed(0))
    data = coder.pack_array(update, np.random.default_rng(0))
    one = coder.unpack_array(data, update)
    left = data.view("<f4")[: 96 * 4].astype(float).reshape(96, 4)
    right = data.view("<f4")[96 * 4 :].astype(float).reshape(80, 4)
    by_hand = [sum(left[5, k] * right[7, k] for k in range(column + 1)) for column in range(4)][-1]
    assert one[5, 7].item() == np.float32(by_hand)


@pytest.mark.parametrize("length", [0, 1, 399, 401, 4 * 400])
def test_bytes_of_another_length_are_refused(length):
    base = {"a": torch.zeros(20, 30)}
    with pytest.raises(ValueError, match="where its codec makes 400"):
        coder_of(2).decode({"a": torch.zeros(length, dtype=torch.uint8)}, base, ROLES)
