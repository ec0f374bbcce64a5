"""Masked sums of few bits: exact whoever drops out, never too large, unbiased, rotated, with noise."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from fedfrozen_app.commands.forecast import forecast
from fedfrozen_app.config import SecureAggregationConfig, compose_config, compose_run, read, resolved
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.exchange.train_request import Masking
from fedfrozen_app.privacy.accountant import epsilon_of
from fedfrozen_app.privacy.discrete import discrete_gaussian
from fedfrozen_app.privacy.steps import NOISE, SENSITIVITY, Steps
from fedfrozen_app.secure.layout import Arithmetic, SumLayout, Sums, decode, encode, error_bound
from fedfrozen_app.secure.roster import ProtocolError
from fedfrozen_app.secure.vector import Vector, packed_size, signed, unpacked, word_of
from fedfrozen_app.secure.work import add_noise, noise_share, settings_of
from fedfrozen_app.server.masked_training import renewed_clip
from tests.conftest import SMALL, slowly
from tests.resuming import killed_before_checkpoint
from tests.secure.test_sums import check, drawn_round

ON = "secure_aggregation=on"
COUNT = 200_000
LARGER = ((8, 10, 20), (12, 3, 20), (16, 10, 20), (8, 100, 2), (12, 100, 2), (16, 100, 2))
# 42 levels on each side for three clients of 8 bits.
SMALL_RING = (ON, "secure_aggregation.bits=8", "secure_aggregation.max_examples=100")


def rules_of(bits, cohort, **changes):
    given = {"clip": 0.5, "state_clip": 1.0, "max_examples": 1}
    return Arithmetic(bits, **given | changes, cohort=cohort)


# The wire -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 12, 16, 24, 32])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 33])
def test_numbers_travel_in_their_bits(bits, count):
    rng = np.random.default_rng(count)
    numbers = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), count)
    vector = Vector(rng.integers(0, 2**63, 3).astype("<u8"), numbers.astype(word_of(bits)))
    packed = vector.packed(bits)
    assert len(packed) == packed_size(3, count, bits) == 24 + -(-count * bits // 8)
    found = unpacked(packed.tobytes(), 3, bits)
    assert (found.head == vector.head).all() and (signed(found, bits)[1] == numbers).all()


def test_pairs_of_twelve_bits_by_hand():
    vector = Vector(np.zeros(0, "<u8"), np.array([0xABC, 0x123, 0xFED], "<u2"))
    assert vector.packed(12).tolist() == [0xBC, 0x3A, 0x12, 0xED, 0x0F]


# Sums ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bits", "size", "seeds"),
    [
        (8, 3, 3),
        (12, 10, 1),
        *[pytest.param(*own, marks=pytest.mark.slow) for own in LARGER],
    ],
)
def test_the_sum_is_exact_whoever_drops_out_at_whatever_step(bits, size, seeds):
    for seed in range(seeds):
        check(*drawn_round(seed, size, 1.0, size - 1, bits))


def test_three_clients_by_hand():
    """Eight bits hold ±127: 42 levels each, of 0.5/42 = 1/84."""
    rules, layout = rules_of(8, 3), SumLayout({"w": torch.Size([4])})
    assert rules.levels == 42 and rules.scale("w", ()) == 84
    total = Vector.zeros(layout.head, 4, 8)
    for update in ([0.5, -0.5, 2 / 84, 0.0], [0.5, -0.9, 3 / 84, 0.0], [0.5, -0.5, -1 / 84, 0.0]):
        drawn = np.random.default_rng(0)
        total.add(encode(layout, rules, {"w": torch.tensor(update).double()}, 9, {}, drawn))
    assert signed(total, 8)[1].tolist() == [126, -126, 4, 0]
    sums = decode(layout, rules, total)
    assert sums.arrays["w"][:2].tolist() == [1.5, -1.5] and sums.clipped == 1
    assert sums.examples == 3  # of at most one example each


@pytest.mark.parametrize(("bits", "cohort"), [(8, 3), (8, 10), (8, 100), (8, 127), (12, 100), (12, 2047)])
def test_no_cohort_makes_a_sum_that_does_not_fit(bits, cohort):
    """All at the largest update, with the draw that rounds away from zero."""
    rules, layout = rules_of(bits, cohort, max_examples=7), SumLayout({"w": torch.Size([2])})

    class Up:
        def random(self, count, dtype):
            return np.nextafter(np.ones(count, dtype), 0, dtype=dtype)

    one = encode(layout, rules, {"w": torch.tensor([0.5, -0.5])}, 7, {}, Up())
    numbers = [int(number) for number in signed(one, bits)[1]]
    assert max(map(abs, numbers)) == rules.levels
    assert cohort * rules.levels <= 2 ** (bits - 1) - 1


def test_a_cohort_that_is_too_large_is_refused_before_it_trains():
    rules, layout = rules_of(8, 128), SumLayout({"w": torch.Size([2])})
    assert rules.problem == "numbers of 8 bits are too small for a cohort of 128: raise bits"
    with pytest.raises(ValueError, match="too small for a cohort of 128"):
        encode(layout, rules, {"w": torch.zeros(2)}, 1, {}, np.random.default_rng(0))
    assert rules_of(8, 127).problem is None and rules_of(16, 50_000).problem is None


def test_large_rings_are_as_they_were():
    assert rules_of(16, 3).levels is None
    assert rules_of(16, 3).scale("w", ()) == (2**15 - 1 - 3) / (3 * 0.5)
    assert "rotate" not in settings_of(SecureAggregationConfig(name="on"))
    assert "clip" not in Masking("s", {}).plain


# Rotation -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rotate", [False, True])
def test_the_decoded_sum_is_unbiased(rotate):
    """400 sums of three clients; |z| beyond 5.5 at one of 24 values has a chance below 10⁻⁶."""
    rules, layout = rules_of(8, 3, clip=1.0), SumLayout({"w": torch.Size([24])})
    rules = Arithmetic(**vars(rules) | {"rotate": rotate})
    updates = [torch.from_numpy(np.random.default_rng(n).normal(0, 0.2, 24)) for n in range(3)]
    drawn, found = np.random.default_rng(9), []
    for _ in range(400):
        total = Vector.zeros(layout.head, 24, 8)
        for update in updates:
            total.add(encode(layout, rules, {"w": update}, 1, {}, drawn))
        found.append(decode(layout, rules, total).arrays["w"].numpy())
    errors = np.array(found) - sum(updates).numpy()
    z = errors.mean(0) / errors.std(0) * math.sqrt(400)
    assert np.abs(z).max() < 5.5
    assert np.abs(errors).max() <= error_bound(layout, rules, "w", 3, 1.0)
    down = np.floor(sum(updates).numpy() * 42) / 42 - sum(updates).numpy()  # rounding down would show
    assert np.abs(down.mean()) > 5 * errors.std() / math.sqrt(400)


def test_a_rotation_lets_one_large_value_pass_a_low_clip():
    """One change of 1 among 4,096 of nothing: without a rotation clip=0.1 takes nine tenths of it."""
    layout, update = SumLayout({"w": torch.Size([4096])}), torch.zeros(4096)
    update[7] = 1.0
    found = {}
    for rotate in (False, True):
        rules = Arithmetic(12, 0.1, 1.0, 1, cohort=3, rotate=rotate)
        sums = decode(layout, rules, encode(layout, rules, {"w": update}, 1, {}, np.random.default_rng(0)))
        found[rotate] = float(sums.arrays["w"][7]), sums.clipped
    assert found[False] == (pytest.approx(0.1), 1)
    assert found[True] == (pytest.approx(1.0, abs=0.02), 0)


def test_arrays_beside_parameters_are_not_rotated():
    rules = Arithmetic(12, 1.0, 10.0, 1, cohort=3, rotate=True)
    assert rules.rotates("w") and not rules.rotates("dc/w")


# Renewed bounds -----------------------------------------------------------------------------------------


def sums_with(square, clipped=0):
    arrays = {"w": torch.zeros(10), "v": torch.zeros(5)}
    return Sums(3, 60, 1200, clipped, arrays, {"w": 60.0, "v": 60.0}, {"w": square, "v": 0.0}, {})


def test_a_bound_is_renewed_from_public_sums_by_hand():
    """Σ weight·‖u‖² = 6 over 60 examples and 10 values: a root mean square of 0.1."""
    secure = SecureAggregationConfig(name="on", clip=1.0, rotate=True, renew=4.0)
    assert renewed_clip(secure, sums_with(6.0), 1.0) == pytest.approx(0.4)
    assert renewed_clip(secure, sums_with(600.0), 1.0) == 1.0  # never above what sites agreed to
    assert renewed_clip(secure, None, 0.3) == 0.3  # a round without a sum
    assert renewed_clip(secure, sums_with(0.0), 0.3) == 0.3
    assert renewed_clip(secure, sums_with(6.0, clipped=1), 0.3) == 0.6  # of 45 values: too many


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("secure_aggregation.bits=20",), "use 8, 12, 16, 24 or 32"),
        (("secure_aggregation.renew=4",), "secure_aggregation.rotate=false ignores secure_aggregation.renew"),
        (("secure_aggregation.rotate=true", "secure_aggregation.renew=0.5"), "is out of range"),
        (
            ("secure_aggregation.bits=8", "num_clients=128"),
            "hold a sum over 127 clients, and a round is over 128",
        ),
        (("codec=int8",), "use secure_aggregation.bits=8 for small masked sums, with codec=none"),
    ],
)
def test_what_cannot_work_is_refused(words, sentence):
    with pytest.raises(UserError, match=sentence):
        _ = compose_run([ON, *words]).config


# Noise in the ring --------------------------------------------------------------------------------------


def lowest_epsilon(shares, change, delta):
    """What 400,000 outcomes of the mechanism prove of its epsilon: a threshold test between two neighbouring
    sums, chosen on one half and measured on the other, with Clopper-Pearson bounds at 10⁻⁶ each."""
    here, there = shares[: len(shares) // 2], shares[len(shares) // 2 :] + change
    half = len(here) // 2
    edges = np.quantile(there[:half], np.linspace(0.01, 0.99, 99))
    proven = []
    for rows in (slice(0, half), slice(half, None)):
        trials = len(here[rows])
        false = np.array([(here[rows] > edge).sum() for edge in edges])
        true = np.array([(there[rows] > edge).sum() for edge in edges])
        most = stats.beta.ppf(1 - 1e-6, false + 1, trials - false)
        least = stats.beta.ppf(1e-6, true, trials - true + 1)
        proven.append(np.log(np.maximum((least - delta) / most, 1e-9)))
    return float(proven[1][int(np.argmax(proven[0]))])


@pytest.mark.parametrize("halved", [False, True])
def test_monte_carlo_of_the_mechanism_keeps_its_epsilon_and_half_the_noise_does_not(halved):
    """Sums of three shares in a ring of 12 bits, against one unit that changes a sum by all it can: what was
    said of its numbers, and one more by rounding."""
    delta, carriers, multiplier = 1e-2, 3, 1.0
    rules = Arithmetic(12, 1.0, 1.0, 1, cohort=4, margin=0.25)
    owed = {NOISE: multiplier, SENSITIVITY: 25.0 / rules.scale("", ())}
    claimed = epsilon_of([Steps(multiplier, 1.0, 1)], delta, "rdp", 8.0)
    share = noise_share(1, rules, carriers, owed)
    assert share == pytest.approx(26 / math.sqrt(3))
    rng, total = np.random.default_rng(0), Vector.zeros(0, COUNT, 12)
    for _ in range(carriers):
        numbers = discrete_gaussian(
            COUNT, share / (2 if halved else 1), lambda n: rng.integers(0, 2**64, n, dtype=np.uint64)
        )
        total.add(Vector(np.zeros(0, "<u8"), numbers.astype("<i2").view("<u2")))
    found = lowest_epsilon(signed(total, 12)[1].astype(float), 26, delta)
    assert (found > claimed) == halved, (found, claimed)
    assert found > 0.5 * claimed  # it is no empty bound


def test_noise_that_a_small_ring_cannot_hold_is_refused():
    """Rounding alone may change each of 10,000 numbers by one: that much noise is beyond 8 and 12 bits."""
    for bits in (8, 12):
        vector, rules = Vector.zeros(4, 10_000, bits), Arithmetic(bits, 1.0, 1.0, 1, cohort=3, margin=0.25)
        with pytest.raises(ProtocolError, match="would not fit into the numbers: raise bits"):
            add_noise(vector, rules, 2, {NOISE: 1.0, SENSITIVITY: 1e-3}, lambda n: np.zeros(n, np.uint64))
        assert not vector.body.any()


# Runs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ("secure_aggregation.rotate=true", "secure_aggregation.renew=4"),
        *slowly(
            ("secure_aggregation.bits=12", "strategy=fedfrozen", "strategy.warmup_rounds=1"),
            ("secure_aggregation.bits=32",),
            ("strategy=safl", "strategy.select=fixed", "strategy.top_k=1"),
            ("strategy=scaffold", "client=sgd"),
        ),
    ],
    ids=" ".join,
)
def test_the_run_sends_the_bytes_of_the_plan(train, words):
    words = ("strategy=fedavg", *SMALL_RING, "secure_aggregation.clip=0.1", "num_rounds=2", *words)
    found = forecast(read(resolved(compose_config([*SMALL, *words]))))
    rows = train(*words).rows[1:]
    assert [dict(part) for part in found.up_by_round] == [row["bytes_up_by_role"] for row in rows]
    assert all(row["secure"]["summed"] == 3 for row in rows)
    if "secure_aggregation.renew=4" in words:
        assert rows[0]["secure"]["clip"] == 0.1
        assert 0 < rows[1]["secure"]["clip"] == rows[0]["secure"]["next_clip"] < 0.1


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_its_bound(train, monkeypatch):
    more = ("secure_aggregation.rotate=true", "secure_aggregation.renew=4", "secure_aggregation.clip=0.1")
    words = ("strategy=fedavg", *SMALL_RING, *more, "num_rounds=4", "checkpoint.every=1")
    whole = train(*words, folder="whole")
    with killed_before_checkpoint(monkeypatch, 3):
        train(*words, folder="broken")
    resumed = train(*words, folder="broken", resume=True)
    assert [r["secure"]["clip"] for r in resumed.rows[1:]] == [r["secure"]["clip"] for r in whole.rows[1:]]
    assert all(torch.equal(whole.model[n], resumed.model[n]) for n in whole.model)
