"""The unmasked sum is the plain sum, to the last bit, whoever drops out; or there is none."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats

from fedfrozen_app.secure import layout as layouts
from fedfrozen_app.secure.layout import Arithmetic, SumLayout, decode, encode, error_bound
from fedfrozen_app.secure.sum_up import TooFew
from fedfrozen_app.secure.vector import Vector, unpacked
from tests.secure.parties import Round, terms

STEPS = ("keys", "shares", "mask", "confirm", "unmask")
RELAXED = settings(deadline=None, suppress_health_check=list(HealthCheck))


def drawn_plan(rng: np.random.Generator) -> SumLayout:
    """Some arrays, parameters and others beside them, of any shape; figures; layers that clients choose."""
    names = [f"layer.{number}.weight" for number in range(rng.integers(1, 5))]
    names += [f"dc/{name}" for name in names if rng.integers(2)]
    shapes = {name: torch.Size(rng.integers(0, 5, size=rng.integers(0, 4)).tolist()) for name in names}
    shapes["head"] = torch.Size([3])
    figures = tuple(f"figure_{number}" for number in range(rng.integers(0, 3)))
    return SumLayout(shapes, figures, equal=("dc",) if rng.integers(2) else (), chosen=bool(rng.integers(2)))


def drawn_vectors(plan: SumLayout, rules: Arithmetic, names: list[str], rng: np.random.Generator):
    vectors, plain = {}, {}
    for name in names:
        sent = [n for n in plan.shapes if not plan.chosen or rng.integers(2)]
        updates = {n: torch.from_numpy(rng.normal(0, 0.7, tuple(plan.shapes[n]))) for n in sent}
        weight = int(rng.integers(1, rules.max_examples + 1))
        figures = {figure: float(rng.normal()) for figure in plan.figures if rng.integers(4)}
        vectors[name] = encode(plan, rules, updates, weight, figures, rng)
        plain[name] = (updates, weight, figures)
    return vectors, plain


def drawn_round(seed: int, size: int, fraction: float, neighbours: int | None, bits: int):
    """A round of this size in which up to `fraction` of the tolerable drop-outs happen, at drawn steps."""
    rng = np.random.default_rng(seed)
    names = sorted(f"site-{number}" for number in range(size))
    plan = drawn_plan(rng)
    rules = Arithmetic(bits, clip=1.0, state_clip=10.0, max_examples=int(rng.integers(1, 500)), cohort=size)
    vectors, plain = drawn_vectors(plan, rules, names, rng)
    about = terms(neighbours=neighbours)
    most = round(fraction * (size - about.needed(size)))
    gone: dict[str, set[str]] = {step: set() for step in STEPS}
    for name in rng.permutation(names)[:most]:
        gone[STEPS[rng.integers(len(STEPS))]].add(str(name))
    return Round(names, about, gone, bits=bits), plan, rules, vectors, plain


def check(found: Round, plan: SumLayout, rules: Arithmetic, vectors, plain) -> None:
    total = found.run(vectors)
    head = sum(vectors[name].head for name in found.collector.survivors)
    body = sum(vectors[name].body.astype(np.uint64) for name in found.collector.survivors)
    assert (total.head == head).all()
    modulus = np.uint64(2**found.bits)
    assert (total.body % modulus == body % modulus).all()
    lost = {name for step in ("keys", "shares", "mask") for name in found.gone.get(step, ())}
    assert set(found.collector.survivors) == set(found.names) - lost
    sums = decode(plan, rules, total)
    assert sums.replies == len(found.collector.survivors)
    taken = [plain[name] for name in found.collector.survivors]
    assert sums.examples == sum(weight for _, weight, _ in taken)
    for name, shape in plan.shapes.items():
        parts = [(plan.weight_of(name, w), u[name]) for u, w, _ in taken if name in u]
        bound = 10.0 if "/" in name else 1.0
        exact = sum((w * u.clamp(-bound, bound) for w, u in parts), torch.zeros(shape, dtype=torch.float64))
        assert sums.weights[name] == sum(w for w, _ in parts)
        if parts and exact.numel():
            off = (sums.arrays[name] - exact).abs().max() / sums.weights[name]
            assert off <= error_bound(plan, rules, name, len(parts), sums.weights[name]) * (1 + 1e-9)
    for figure in plan.figures:
        known = [(w, f[figure]) for _, w, f in taken if figure in f]
        if len(known) == len(taken):
            mean = sum(w * value for w, value in known) / sum(w for w, _ in known)
            assert sums.figures[figure][0] == pytest.approx(mean, abs=len(known) / layouts.FRACTION)
        else:
            assert figure not in sums.figures


@settings(RELAXED, max_examples=15)
@given(
    st.integers(0, 2**32),
    st.integers(2, 8),
    st.floats(0, 1),
    st.sampled_from([None, 2, 4]),
    st.sampled_from([16, 24, 32]),
)
def test_the_sum_is_exact_whoever_drops_out(seed, size, fraction, neighbours, bits):
    fraction = fraction if neighbours is None else 0  # a sparse graph promises a share, not a number
    check(*drawn_round(seed, size, fraction, neighbours, bits))


@pytest.mark.slow
@settings(RELAXED, max_examples=60)
@given(
    st.integers(0, 2**32),
    st.integers(2, 50),
    st.floats(0, 1),
    st.sampled_from([16, 24, 32]),
)
def test_the_sum_is_exact_for_cohorts_up_to_fifty(seed, size, fraction, bits):
    check(*drawn_round(seed, size, fraction, size - 1, bits))


@pytest.mark.slow
@settings(RELAXED, max_examples=40)
@given(st.integers(0, 2**32), st.integers(34, 50), st.floats(0, 1))
def test_on_a_sparse_graph_the_sum_is_exact_or_there_is_none(seed, size, fraction):
    """Too many of one client's neighbours may be gone, though of all not too many are."""
    drawn = drawn_round(seed, size, fraction, None, 32)
    try:
        check(*drawn)
    except TooFew:
        assert fraction > 0.2


@pytest.mark.slow
def test_the_sum_of_fifty_with_a_third_gone():
    check(*drawn_round(5, 50, 0.9, None, 32))


@pytest.mark.parametrize("step", STEPS)
def test_drop_outs_at_each_step_up_to_the_threshold_and_beyond(step):
    """Of seven, five are needed: two may go at any step, and a third ends the round without a sum."""
    names = [f"site-{number}" for number in range(7)]
    rng = np.random.default_rng(1)
    plan, rules = SumLayout({"w": torch.Size([40])}), Arithmetic(32, 1.0, 10.0, 100, cohort=7)
    vectors, _ = drawn_vectors(plan, rules, names, rng)
    found = Round(names, gone={step: names[2:4]})
    total = found.run(vectors)
    inside = [n for n in names if n not in names[2:4] or step in ("confirm", "unmask")]
    assert (total.body == sum(vectors[name].body for name in inside)).all()
    # Those who never sent keys are no part of the cohort: there the bound is the fewest that are asked for.
    beyond = Round(names, gone={step: names[2:5]}, fewest=5)
    with pytest.raises(TooFew):
        beyond.run(vectors)
    if step != "keys" and step != "shares":  # what the server holds tells nothing: it is masked still
        plain = sum(vectors[name].body for name in names if name not in names[2:5])
        assert not (beyond.collector.sum.body == plain).any()


@pytest.mark.slow
def test_a_sparse_graph_of_a_hundred():
    names = [f"site-{number:03}" for number in range(100)]
    about = terms(neighbours=8)
    rng = np.random.default_rng(2)
    plan, rules = SumLayout({"w": torch.Size([20])}), Arithmetic(32, 1.0, 10.0, 100, cohort=100)
    vectors, _ = drawn_vectors(plan, rules, names, rng)
    found = Round(names, about, gone={"mask": names[10:12], "unmask": names[60:61]})
    total = found.run(vectors)
    assert (total.body == sum(v.body for n, v in vectors.items() if n not in names[10:12])).all()
    drawn = {name: set(found.sessions[name].drawn) for name in names}
    assert {len(own) for own in drawn.values()} == {8} and len({*map(frozenset, drawn.values())}) > 90
    for name in found.collector.survivors:  # both sides of a pair know of it
        own = drawn[name] | {other for other in names if name in drawn[other]}
        assert set(found.sessions[name].partners) == own


# What the server sees ---------------------------------------------------------------------------------


def test_masked_vectors_are_uniform_over_many_rounds():
    """Chi-square over the bytes of the same tiny update, masked again and again; and over single numbers."""
    names = ["a", "b", "c"]
    plan, rules = SumLayout({"w": torch.Size([64])}), Arithmetic(32, 1.0, 10.0, 100, cohort=3)
    updates = {"w": torch.full((64,), 1e-3)}
    vectors = {name: encode(plan, rules, updates, 10, {}, np.random.default_rng(0)) for name in names}
    seen = []
    for _ in range(100):
        found = Round(names)
        found.masks(found.shares(found.keys()), vectors)
        seen.append(np.frombuffer(found.wire[0], np.uint8))
    every = np.bincount(np.concatenate(seen), minlength=256)
    assert stats.chisquare(every).pvalue > 1e-4
    # The top byte of each number over the rounds: a mask that repeats would show here.
    tops = np.stack([unpacked(bytes(one), plan.head, 32).body >> 28 for one in seen])
    low = min(stats.chisquare(np.bincount(column, minlength=16)).pvalue for column in tops.T)
    assert low > 1e-4 / 64
    assert len({bytes(one) for one in seen}) == len(seen)
    # The test can tell: without masks it fails at once.
    plain = np.bincount(vectors["a"].packed(32), minlength=256)
    assert stats.chisquare(plain).pvalue < 1e-12


def test_no_piece_of_an_update_is_on_the_wire():
    """Of the plain vector, and of the update as float32, no 4 bytes at their place and no 8 anywhere."""
    names = ["a", "b", "c"]
    plan, rules = SumLayout({"w": torch.Size([500])}), Arithmetic(32, 1.0, 10.0, 100, cohort=3)
    vectors, plain = drawn_vectors(plan, rules, names, np.random.default_rng(3))
    found = Round(names)
    found.masks(found.shares(found.keys()), vectors)
    for name, sent in zip(names, found.wire, strict=True):
        clear = vectors[name].packed(32).tobytes()
        update = plain[name][0]["w"].float().numpy().tobytes()
        for text in (clear, update):
            pieces = [text[start : start + 8] for start in range(0, len(text) - 8, 4)]
            assert not any(piece in sent for piece in pieces if piece.strip(b"\0\xff"))
        same = np.frombuffer(clear, np.uint32) == np.frombuffer(sent, np.uint32)
        assert same.sum() <= 1  # by chance one in four billion


# Arithmetic -------------------------------------------------------------------------------------------


def test_rounding_is_right_on_average_and_within_one_unit():
    rules = Arithmetic(16, clip=1.0, state_clip=1.0, max_examples=1, cohort=2)
    plan = SumLayout({"w": torch.Size([20_000])})
    value = 0.300001234
    sums = decode(
        plan,
        rules,
        encode(
            plan,
            rules,
            {"w": torch.full((20_000,), value, dtype=torch.float64)},
            1,
            {},
            np.random.default_rng(0),
        ),
    )
    unit = 1 / rules.scale("w", ())
    off = sums.arrays["w"].numpy() - value
    assert np.abs(off).max() < unit and set(np.unique(np.round(off / unit, 6)).tolist()).__len__() == 2
    assert abs(off.mean()) < 5 * unit / np.sqrt(20_000)


def test_what_is_too_large_is_clipped_and_counted_and_what_is_not_finite_refused():
    rules = Arithmetic(32, clip=0.5, state_clip=2.0, max_examples=10, cohort=2)
    plan = SumLayout({"w": torch.Size([3]), "c/w": torch.Size([3])}, equal=("c",))
    updates = {"w": torch.tensor([0.1, -0.9, 0.7]), "c/w": torch.tensor([-3.0, 1.0, 0.0])}
    sums = decode(plan, rules, encode(plan, rules, updates, 99, {}, np.random.default_rng(0)))
    assert sums.examples == 10 and sums.clipped == 3  # 99 examples count as the 10 that are allowed
    assert torch.allclose(sums.arrays["w"] / 10, torch.tensor([0.1, -0.5, 0.5]).double(), atol=1e-6)
    assert torch.allclose(sums.arrays["c/w"], torch.tensor([-2.0, 1.0, 0.0]).double(), atol=1e-6)
    assert sums.squares["w"] == pytest.approx(10 * (0.01 + 0.25 + 0.25), rel=1e-5)
    updates["w"][1] = float("nan")
    with pytest.raises(ValueError, match="not finite in w"):
        encode(plan, rules, updates, 1, {}, np.random.default_rng(0))


def test_the_largest_sum_of_a_whole_cohort_still_fits():
    for bits in (16, 24, 32):
        for sign in (1.0, -1.0):
            rules = Arithmetic(bits, clip=0.25, state_clip=1.0, max_examples=7, cohort=50)
            plan = SumLayout({"w": torch.Size([5])})
            total = Vector.zeros(plan.head, plan.body)
            for number in range(50):
                total.add(
                    encode(plan, rules, {"w": torch.full((5,), sign)}, 7, {}, np.random.default_rng(number))
                )
            sums = decode(plan, rules, total)
            bound = error_bound(plan, rules, "w", 50, 350)
            assert (sums.arrays["w"] / 350 - sign * 0.25).abs().max() <= bound


def test_a_metric_that_some_lack_is_nobody_s():
    """One site alone has validation rows: the sum must be neither its metric nor its row count."""
    plan = SumLayout({"head": torch.Size([2])}, ("client_val_after", "train_loss"))
    rules = Arithmetic(32, clip=1.0, state_clip=10.0, max_examples=1000, cohort=3)
    rng, update = np.random.default_rng(0), {"head": torch.zeros(2)}
    places = [plan._slots[part, "client_val_after"] for part in ("behind", "figure")]
    found = []
    for _ in range(200):
        head = np.zeros(plan.head, np.uint64)
        for weight, own in ((137, {"client_val_after": 0.8125}), (50, {}), (60, {})):
            vector = encode(plan, rules, update, weight, own | {"train_loss": 1.5}, rng)
            head += vector.head
        sums = decode(plan, rules, Vector(head, np.zeros(2, np.uint32)))
        assert sums.examples == 247 and sums.figures == {"train_loss": (1.5, 247)}
        found.append(head[places])
    # Uniform modulo 2^64: chi-square over the highest four bits of both places.
    for place in np.array(found).T:
        counts = np.bincount((place >> np.uint64(60)).astype(int), minlength=16)
        assert stats.chisquare(counts).pvalue > 1e-6


def test_who_lacks_a_metric_and_how_many_do_does_not_show():
    """Whatever the others have, one client without it makes the places uniform."""
    plan = SumLayout({"head": torch.Size([1])}, ("m",))
    rules = Arithmetic(32, clip=1.0, state_clip=10.0, max_examples=10, cohort=4)
    rng, update = np.random.default_rng(1), {"head": torch.zeros(1)}
    for lacking in ((0,), (3,), (0, 1, 2), (0, 1, 2, 3)):
        places = set()
        for _ in range(50):
            head = np.zeros(plan.head, np.uint64)
            for client in range(4):
                head += encode(plan, rules, update, 5, {} if client in lacking else {"m": 1.0}, rng).head
            places.add(tuple(head[-2:].tolist()))
            assert decode(plan, rules, Vector(head, np.zeros(1, np.uint32))).figures == {}
        assert len(places) == 50  # nothing fixed is left in them
