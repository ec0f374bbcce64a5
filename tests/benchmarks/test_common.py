"""The benchmarks' statistics: what a published ratio is made of. Nothing here is timed."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarks.scripts import common

positive = st.floats(1e-6, 1e6)


def test_spread_is_median_and_range() -> None:
    found = common.spread([3.0, 1.0, 10.0, 2.0])
    assert (found.median, found.low, found.high) == (2.5, 1.0, 10.0)
    assert found.values == (3.0, 1.0, 10.0, 2.0)
    assert f"{found:.1f}" == "2.5 (1.0–10.0)"
    assert json.loads(json.dumps(asdict(found)))["median"] == 2.5


def test_ratio_is_taken_repeat_by_repeat() -> None:
    # The machine is ten times slower in the second repeat; the ratio of the medians would say 1.1.
    found = common.ratio([2.0, 20.0, 2.2], [1.0, 10.0, 2.0])
    assert found.values == pytest.approx((2.0, 2.0, 1.1))
    assert found.median == pytest.approx(2.0)


def test_ratio_refuses_unequal_repeats() -> None:
    with pytest.raises(ValueError, match="shorter"):
        common.ratio([1.0, 2.0], [1.0])


@given(st.lists(st.tuples(positive, st.floats(0.1, 10)), min_size=1, max_size=9), st.floats(1.0, 20.0))
def test_a_slow_machine_does_not_change_a_ratio(pairs: list[tuple[float, float]], times: float) -> None:
    base = [seconds for seconds, _ in pairs]
    found = common.ratio([times * value for value in base], base)
    slowed = [seconds * slow for seconds, slow in pairs]
    again = common.ratio([times * value for value in slowed], slowed)
    assert found.median == pytest.approx(times) == again.median
    assert found.low <= found.median <= found.high


def test_contestants_take_turns_and_begin_in_turn() -> None:
    request: list[str] = []

    def contestant(name: str) -> int:
        request.append(name)
        return len(request)

    told: list[tuple[int, str, int]] = []
    found = common.interleave(
        {name: lambda name=name: contestant(name) for name in "abc"},
        4,
        lambda number, name, value: told.append((number, name, value)),
    )
    assert "".join(request) == "abcbcacababc"
    assert found == {"a": [1, 6, 8, 10], "b": [2, 4, 9, 11], "c": [3, 5, 7, 12]}
    assert told[3] == (1, "b", 4)


@pytest.mark.parametrize(("megabytes", "arrays"), [(0.03, 1), (768 * 768 * 4 / 1e6, 1), (6.5, 3), (50.0, 22)])
def test_a_blank_model_has_the_size_it_is_asked_for(megabytes: float, arrays: int) -> None:
    model = common.blank_model(megabytes)
    assert len(model) == arrays
    assert common.size_of(model) == pytest.approx(megabytes * 1e6, abs=4)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_the_peak_sees_memory_that_is_gone_again() -> None:
    common.reset_peak()
    before = common.peak_bytes()
    block = bytearray(b"x" * 50_000_000)
    del block
    assert 45e6 < common.peak_bytes() - before < 150e6
    assert common.resident_bytes() <= common.peak_bytes()
