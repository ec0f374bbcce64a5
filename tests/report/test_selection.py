"""The selection's stability by hand, and its picture."""

import numpy as np
import pytest

from fedfrozen_app.report.charts import make_charts
from fedfrozen_app.report.selection import chose, selection_changes, selection_table, write_selection

pytestmark = pytest.mark.pictures

ROWS = [
    {"round": 0},
    {"round": 1, "selection": {"0": [0, 1], "1": [2, 3]}},
    {"round": 2, "selection": {"0": [0, 2]}, "layer_scores": [0.1] * 5},
    {"round": 3, "selection": {"0": [0, 2], "1": [0, 1]}},
]


def test_changes_by_hand():
    # Client 0: 1 of 2 is new in round 2, none in round 3; client 1: both are new in round 3.
    assert selection_changes(ROWS) == pytest.approx((1 + 0 + 2) / 3)
    assert selection_changes(ROWS[:2]) is None and selection_changes([]) is None


def test_layers_that_nobody_chose_are_shown_too(tmp_path):
    rows = [{"round": 1, "layers": [0, 1, 2, 3, 4, 5], "selection": {"0": [1, 2], "1": [2, 3]}}]
    assert selection_table(rows, ["0", "1"]).shape == (2, 6, 1)
    (drawn,) = [one for one in make_charts(rows) if one["title"] == "Selected layers"]
    assert drawn["views"][0]["labels"] == ["0", "1", "2", "3", "4", "5"]
    assert [line[0] for line in drawn["views"][0]["values"]] == [0, 0.5, 1, 0.5, 0, 0]


def test_where_no_layer_can_be_chosen_there_is_no_picture():
    """strategy.select=none: the head alone."""
    rows = [{"round": 1, "layers": [0, 1], "selection": {"0": [], "1": []}}]
    assert not [one for one in make_charts(rows) if one["title"] == "Selected layers"]
    assert not chose(rows) and chose(ROWS)


def test_the_table_and_the_picture(tmp_path):
    table = selection_table(ROWS[1:], ["0", "1"])
    assert table.shape == (2, 5, 3)
    assert table[0, :, 1].tolist() == [1, 0, 1, 0, 0]
    assert np.isnan(table[1, :, 1]).all()  # not in round 2
    write_selection(ROWS, tmp_path / "selection.png")
    assert (tmp_path / "selection.png").read_bytes()[:4] == b"\x89PNG"
