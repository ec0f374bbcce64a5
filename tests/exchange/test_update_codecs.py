"""What each codec sends and what the server makes of it, by hand; bounds, unbiasedness, hostile bytes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfrozen_app.core import registry
from fedfrozen_app.core.seeds import numpy_generator
from fedfrozen_app.exchange.codec import ClientSide
from fedfrozen_app.exchange.codecs.rotation import LONGEST, rotated, segments, signs, unrotated
from fedfrozen_app.exchange.count import bytes_by_role
from fedfrozen_app.exchange.role import Role

ROLES = {"a": Role("query", 0), "b": Role("mlp", 1)}
PLAIN = {"block": 8, "rotate": False}
TURNED = {"block": 8, "rotate": True}
ALL = [
    *[
        ("float16", {}),
        ("bfloat16", {}),
        ("int8", PLAIN),
        ("int8", TURNED),
        ("int4", PLAIN),
        ("int4", TURNED),
    ],
    *[("topk", {"share": 0.25}), ("topk", {"share": 0.01}), ("randomk", {"share": 0.25})],
]


def codec(name, given):
    return registry.find("codecs", name)(given)


def array(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def round_trip(coder, update, seed=0):
    base = {"a": torch.zeros_like(update)}
    return coder.decode(coder.encode({"a": update}, base, ROLES, ClientSide(seed)), base, ROLES)["a"]


# By hand ------------------------------------------------------------------------------------------------


def test_halves_by_hand():
    base = {"a": array(1.0, 1.0, 1.0)}
    trained = {"a": array(1.5, 1 + 2**-12, 1 + 1 / 3)}
    sent = codec("float16", {}).encode(trained, base, ROLES)
    assert sent["a"].view(torch.float16).tolist() == [0.5, 2**-12, 1365 / 4096]  # 1/3 to eleven bits
    sent = codec("bfloat16", {}).encode(trained, base, ROLES)
    whole = codec("bfloat16", {}).decode(sent, base, ROLES)
    assert whole["a"].tolist() == [1.5, 1 + 2**-12, 1 + 171 / 512]  # 1/3 to eight bits


def test_int8_by_hand():
    coder, base = codec("int8", PLAIN), {"a": torch.ones(10, dtype=torch.float64)}
    update = array(127.0, -127, 0, 63, 0, 0, 0, 0.5, 254, -2)  # scales 1 and 2
    sent = coder.encode({"a": base["a"] + update}, base, ROLES, ClientSide(5))["a"]
    assert sent[:8].view(torch.float32).tolist() == [1.0, 2.0]
    coin = numpy_generator(5, "codec", "a").random((2, 8))[0, 7]
    assert sent[8:].view(torch.int8).tolist() == [127, -127, 0, 63, 0, 0, 0, math.floor(0.5 + coin), 127, -1]
    decoded = coder.decode({"a": sent}, base, ROLES)["a"] - base["a"]
    assert decoded.tolist() == [127.0, -127, 0, 63, 0, 0, 0, math.floor(0.5 + coin), 254, -2]


def test_int4_by_hand():
    coder, base = codec("int4", PLAIN), {"a": torch.zeros(9, dtype=torch.float64)}
    update = array(7.0, -7, 0, 3, -1, 0, 0, 0, -14)  # scales 1 and 2
    sent = coder.encode({"a": update}, base, ROLES)["a"]
    assert sent[:8].view(torch.float32).tolist() == [1.0, 2.0]
    assert sent[8:].tolist() == [0x97, 0x30, 0x0F, 0x00, 0x09]  # two's complement, the first value low
    assert coder.decode({"a": sent}, base, ROLES)["a"].tolist() == update.tolist()


def test_a_rotation_by_hand():
    half = signs(2)
    assert rotated(np.array([3.0, 1.0])) == pytest.approx(
        np.array([3 * half[0] + half[1], 3 * half[0] - half[1]]) / math.sqrt(2)
    )
    assert list(segments(2 * LONGEST + 300)) == [
        *[(0, LONGEST, 2), (2 * LONGEST, 256, 1), (2 * LONGEST + 256, 32, 1)],
        *[(2 * LONGEST + 288, 8, 1), (2 * LONGEST + 296, 4, 1)],
    ]
    assert signs(8).tolist() == [-1, 1, 1, 1, 1, -1, -1, -1]  # the same on every machine


def test_topk_by_hand():
    coder, base = codec("topk", {"share": 0.3}), {"a": torch.zeros(10)}
    trained = {"a": array(1.0, -5, 0, 2, 2, 9, 0, 0, 0, 0, dtype=torch.float32)}
    side = ClientSide()
    sent = coder.encode(trained, base, ROLES, side)["a"]
    assert sent[:2].tolist() == [0b01010100, 0]  # of the two equal ones the first
    assert sent[2:].view(torch.uint8).clone().view(torch.float32).tolist() == [-5.0, 2, 9]
    assert side.residual["a"].tolist() == [1, 0, 0, 0, 2, 0, 0, 0, 0, 0]
    # The next round sends what was left before a smaller change.
    sent = coder.encode({"a": trained["a"] * 0 + 1.5}, base, ROLES, side)
    assert coder.decode(sent, base, ROLES)["a"].tolist() == [2.5, 1.5, 0, 0, 3.5, 0, 0, 0, 0, 0]


def test_few_values_are_named_by_index():
    coder, base = codec("topk", {"share": 0.01}), {"a": torch.zeros(300)}
    update = torch.zeros(300)
    update[[7, 299, 150]] = array(3.0, -2, 1, dtype=torch.float32)
    sent = coder.encode({"a": update}, base, ROLES)["a"]
    assert sent[:12].view(torch.int32).tolist() == [7, 150, 299]
    assert len(sent) == 12 + 12
    assert torch.equal(coder.decode({"a": sent}, base, ROLES)["a"], update)


def test_a_seed_names_the_values_of_randomk():
    coder, update = codec("randomk", {"share": 0.5}), torch.arange(1.0, 9.0)
    base, side = {"a": torch.zeros(8)}, ClientSide(1)
    sent = coder.encode({"a": update}, base, ROLES, side)["a"]
    assert len(sent) == 8 + 4 * 4
    first = coder.decode({"a": sent}, base, ROLES)["a"]
    assert int((first != 0).sum()) == 4 and torch.equal(first[first != 0], update[first != 0])
    again = coder.encode({"a": update}, base, ROLES, ClientSide(2))["a"]
    assert again[:8].tolist() != sent[:8].tolist()


def test_arrays_beside_parameters_travel_as_they_are():
    base = {"a": torch.zeros(4)}
    arrays = {"a": torch.ones(4), "dc/a": torch.full((4,), 1 / 3)}
    for name, own in ALL:
        coder = codec(name, own)
        sent = coder.encode(arrays, base, ROLES)
        assert sent["dc/a"] is arrays["dc/a"]
        assert torch.equal(coder.decode(sent, base, ROLES)["dc/a"], arrays["dc/a"])


# Invariants ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "given"), ALL)
@pytest.mark.parametrize("count", [1, 7, 8, 9, 129, 300])
def test_sizes_are_known_before(name, given, count):
    coder, base = codec(name, given), {"a": torch.zeros(count), "b": torch.zeros(2, 3)}
    sent = coder.encode({n: v + 1 for n, v in base.items()}, base, ROLES)
    assert dict(bytes_by_role(sent, ROLES)) == coder.sizes(base, base, ROLES)
    shapes = {n: torch.empty(v.shape, device="meta") for n, v in base.items()}
    assert coder.sizes(shapes, shapes, ROLES) == coder.sizes(base, base, ROLES)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40),
    seed=st.integers(0, 99),
    bits=st.sampled_from(["int8", "int4"]),
)
def test_no_value_moves_by_a_step(values, seed, bits):
    coder, update = codec(bits, PLAIN), array(*values)
    found = round_trip(coder, update, seed)
    for start in range(0, len(values), 8):
        block = update[start : start + 8]
        step = float(block.abs().max()) / coder.levels * (1 + 1e-6) + 1.5e-45  # the least float32
        assert ((found[start : start + 8] - block).abs() <= step).all()


@settings(max_examples=40, deadline=None)
@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=70))
def test_a_rotation_keeps_the_norm_and_is_undone(values):
    found = np.array(values)
    turned = rotated(found)
    assert np.linalg.norm(turned) == pytest.approx(np.linalg.norm(found), rel=1e-12)
    assert unrotated(turned) == pytest.approx(found, rel=1e-9, abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    rounds=st.lists(
        st.lists(st.floats(-1e3, 1e3, width=32), min_size=12, max_size=12), min_size=1, max_size=4
    ),
    name=st.sampled_from(["topk", "randomk"]),
    share=st.sampled_from([0.01, 0.3, 1.0]),
)
def test_what_was_not_sent_is_kept(rounds, name, share):
    """sent + kept = update + kept before, to the bit, in every round."""
    coder, base, side = codec(name, {"share": share}), {"a": torch.zeros(3, 4)}, ClientSide()
    for number, values in enumerate(rounds):
        update = torch.tensor(values, dtype=torch.float32).view(3, 4)
        due = update + side.residual.get("a", torch.zeros(3, 4))
        side.seed = number
        sent = coder.decode(coder.encode({"a": update}, base, ROLES, side), base, ROLES)["a"]
        assert torch.equal(sent + side.residual["a"], due)
        assert not (sent * side.residual["a"]).any()  # either sent or kept
        assert int((sent != 0).sum()) <= math.ceil(share * 12)


# Unbiasedness: each test fails by chance once in about 10⁶ runs; the seeds are fixed -----------------------


@pytest.mark.parametrize(
    ("name", "given"), [("int8", PLAIN), ("int4", PLAIN), ("int8", TURNED), ("int4", TURNED)]
)
def test_rounding_is_unbiased(name, given):
    """The mean error of n rounds, over its standard error, is normal: with 12 values, |z| beyond 5.5 has a
    chance below 12 · 4·10⁻⁸."""
    coder, count = codec(name, given), 800
    update = array(*np.random.default_rng(3).normal(size=12))
    found = torch.stack([round_trip(coder, update, seed) for seed in range(count)])
    errors = found - update
    deviation = errors.std(dim=0)
    assert deviation.max() > 1e-3  # it does round
    tight = deviation < 1e-12  # the largest of a block is exact
    z = errors.mean(dim=0)[~tight] / deviation[~tight] * math.sqrt(count)
    assert (z.abs() < 5.5).all(), z
    assert (errors[:, tight].abs() < 1e-6).all()


def test_rounding_down_would_be_noticed(monkeypatch):
    """The test above can fail: ⌊u/s⌋ without the draw is biased."""
    coder, update = codec("int4", PLAIN), array(*np.random.default_rng(3).normal(size=12))
    base = {"a": torch.zeros_like(update)}

    class NoDraw:
        def random(self, shape):
            return np.zeros(shape)

    monkeypatch.setattr("fedfrozen_app.exchange.codecs.update_codec.numpy_generator", lambda *_: NoDraw())
    error = coder.decode(coder.encode({"a": update}, base, ROLES), base, ROLES)["a"] - update
    assert error.mean() < -0.01


def test_a_rotation_helps_where_few_values_are_large():
    """One value of 100 among 4,096 small ones: the steps of its block are coarse without a rotation."""
    update = torch.from_numpy(np.random.default_rng(0).normal(size=4096))
    update[::128] = 100.0
    errors = [
        float((round_trip(codec("int4", {"block": 128, "rotate": turn}), update) - update).square().mean())
        for turn in (False, True)
    ]
    assert errors[1] < errors[0] / 3


# Hostile bytes ------------------------------------------------------------------------------------------


def refused(name, given, data, count=16, dtype=torch.float32):
    with pytest.raises(ValueError, match="sent") as caught:
        codec(name, given).decode({"a": data}, {"a": torch.zeros(count, dtype=dtype)}, ROLES)
    return str(caught.value)


@pytest.mark.parametrize(("name", "given"), ALL)
def test_other_lengths_and_types_are_refused(name, given):
    size = codec(name, given).size(16, 4)
    for length in (0, size - 1, size + 1, 10 * size):
        text = refused(name, given, torch.zeros(length, dtype=torch.uint8))
        assert text == f"sent {length} bytes for a, where its codec makes {size}"
    refused(name, given, torch.zeros(size))
    refused(name, given, torch.zeros(1, size, dtype=torch.uint8))


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -1.0])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_scales_that_are_no_positive_number_are_refused(name, scale):
    data = torch.zeros(codec(name, PLAIN).size(16, 4), dtype=torch.uint8)
    data[4:8] = torch.tensor([scale]).view(torch.uint8)
    assert "a scale that is no positive number" in refused(name, PLAIN, data)


def test_levels_out_of_range_are_refused():
    data = torch.zeros(8 + 16, dtype=torch.uint8)
    data[9] = 128
    assert "levels beyond 127" in refused("int8", PLAIN, data)
    data = torch.zeros(8 + 8, dtype=torch.uint8)
    data[9] = 0x80
    assert "levels beyond 7" in refused("int4", PLAIN, data)
    data = torch.zeros(8 + 5, dtype=torch.uint8)
    data[-1] = 0x10
    assert "after its last level" in refused("int4", PLAIN, data, count=9)


def test_masks_and_indices_that_name_other_values_are_refused():
    few = {"share": 0.25}
    data = torch.zeros(2 + 16, dtype=torch.uint8)
    data[0] = 0b11111000
    assert "does not name 4 of 16" in refused("topk", few, data)
    data = torch.zeros(2 + 12, dtype=torch.uint8)
    data[:2] = torch.tensor([0b11000000, 0b00000001])  # the last bit is none of nine
    assert "does not name 3 of 9" in refused("topk", few, data, count=9)
    for places in ([3, 3, 4], [4, 3, 5], [1, 2, 300]):
        data = torch.zeros(24, dtype=torch.uint8)
        data[:12] = torch.tensor(places, dtype=torch.int32).view(torch.uint8)
        assert "indices do not name 3 of 300" in refused("topk", {"share": 0.01}, data, count=300)


@pytest.mark.parametrize(("name", "given"), ALL)
def test_an_update_that_is_not_finite_is_not_hidden(name, given):
    """The server must see it, to set the client aside: as a refusal, or as a value that is not finite."""
    update, base = torch.ones(16), {"a": torch.zeros(16)}
    update[3] = math.nan
    sent = codec(name, {"share": 1.0} if "share" in given else given).encode({"a": update}, base, ROLES)
    try:
        found = codec(name, {"share": 1.0} if "share" in given else given).decode(sent, base, ROLES)["a"]
    except ValueError:
        return
    assert not found.isfinite().all()


@pytest.mark.parametrize(("name", "given"), ALL)
def test_settings_of_another_codec_are_refused(name, given):
    with pytest.raises(ValueError, match="settings"):
        codec(name, {**given, "more": 1})
