"""The drawing of spent epsilon: round numbers at its axis, each step where it belongs."""

import pytest

from fedfrozen_app.desk.budget_chart import BOTTOM, TOP, budget_chart, round_ticks
from fedfrozen_app.sites.history import Spent


@pytest.mark.parametrize(
    ("top", "ticks"),
    [
        (8.8, [0, 2, 4, 6, 8]),  # a limit of 8
        (3.3, [0, 1, 2, 3]),
        (1.1, [0, 0.25, 0.5, 0.75, 1]),
        (11.0, [0, 2.5, 5, 7.5, 10]),
        (10.0, [0, 2, 4, 6, 8, 10]),
        (0.055, [0, 0.02, 0.04]),
        (1e-7, [0, 2e-8, 4e-8, 6e-8, 8e-8, 1e-7]),
        (2750.0, [0, 1000, 2000]),
    ],
)
def test_the_axis_has_round_numbers(top, ticks):
    assert round_ticks(top) == pytest.approx(ticks)
    assert all(len(f"{tick:g}") <= 6 for tick in round_ticks(top))


def test_limit_and_steps_have_the_axis_s_scale():
    spent = [Spent("2026-03-01T08:00:00+00:00", "one", 2.0), Spent("2026-03-03T08:00:00+00:00", "two", 6.0)]
    chart = budget_chart(spent, 8.0)
    heights = {label: height for height, label in chart.ticks}
    assert chart.limit == heights["8"] and [dot[1] for dot in chart.dots] == [heights["2"], heights["6"]]
    assert heights["0"] == BOTTOM and min(heights.values()) > TOP
    assert budget_chart([], 8.0) is None
    assert [label for _, label in budget_chart(spent, 0.0).ticks] == ["0", "2", "4", "6"]
