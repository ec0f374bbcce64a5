"""The Gantt chart of a run that does not wait, from rows made by hand."""

import pytest

from fedfrozen_app.report.gantt import gantt_section
from fedfrozen_app.report.paced_gantt import paced_pictures, requests_of

# Client 0 takes 1 s, client 1 2.5 s; the server steps at every reply, and drops those over one step old.
ROWS = [
    {"round": 0, "virtual_seconds": 0.0, "stage": "initial"},
    {
        "round": 1,
        "stage": "warmup",
        "virtual_seconds": 1.0,
        "virtual_by_client": {"0": [0.0, 0.0, 0.5, 0.5], "1": [0.0, 0.0, 2.0, 0.5]},
        "virtual_asked": {"0": 0.0, "1": 0.0},
        "pacing": {"used": [["0", 0]], "dropped": [], "at_work": ["1"]},
    },
    {
        "round": 2,
        "stage": "warmup",
        "virtual_seconds": 2.0,
        "virtual_by_client": {"0": [0.0, 0.0, 0.5, 0.5]},
        "virtual_asked": {"0": 1.0},
        "pacing": {"used": [["0", 0]], "dropped": [], "at_work": ["1"]},
    },
    {
        "round": 3,
        "stage": "warmup",
        "virtual_seconds": 4.0,
        "virtual_by_client": {"0": [0.0, 0.0, 1.5, 0.5], "1": [0.0, 0.0, 2.0, 0.5]},
        "virtual_asked": {"0": 2.0, "1": 2.5},
        "pacing": {"used": [["0", 0]], "dropped": [["1", 2]], "at_work": ["1"]},
    },
    {
        "round": 4,
        "stage": "warmup",
        "virtual_seconds": 5.0,
        "virtual_by_client": {"0": [0.0, 0.0, 1.5, 0.5]},
        "virtual_asked": {"0": 4.0},
        "pacing": {"used": [["1", 1]], "dropped": [], "at_work": ["0"]},
    },
]


def test_a_reply_is_found_in_the_row_of_its_arrival():
    found = [(one.client, one.asked, one.age, one.dropped) for one in requests_of(ROWS)]
    assert found == [
        ("0", 0.0, 0, False),
        ("1", 0.0, 2, True),
        ("0", 1.0, 0, False),
        ("0", 2.0, 0, False),
        ("1", 2.5, 1, False),
        ("0", 4.0, None, False),
    ]


def test_bars_steps_and_marks_lie_at_their_times():
    (picture,) = paced_pictures(ROWS)
    assert picture["title"] == "Rounds 1 to 4: 5 s from 0 s on"
    assert picture["steps"] == pytest.approx([110 + 128, 110 + 256, 110 + 512, 110 + 640 - 1])
    marks = {(mark["x"] + mark["width"], mark["text"], mark["colour"]) for mark in picture["marks"]}
    assert marks == {
        (238.0, "", "green"),
        (366.0, "", "green"),
        (622.0, "", "green"),
        (430.0, "×", "wine"),
        (750.0, "1", "orange"),
    }
    trained = [bar for bar in picture["bars"] if bar.title == "client 1 trains 2 s"]
    assert [(bar.x, bar.width) for bar in trained] == [(110.0, 256.0), (430.0, 256.0)]
    # What is at work at the end is cut off there.
    assert max(bar.x + bar.width for bar in picture["bars"]) == 750.0


def test_the_section_explains_its_marks_and_a_synchronous_run_has_none():
    section = str(gantt_section(ROWS))
    assert "staleness weight" in section and "dropped, 2 steps old" in section
    plain = [{k: v for k, v in row.items() if k not in ("pacing", "virtual_asked")} for row in ROWS]
    assert "staleness" not in str(gantt_section(plain)) and "Round 1, warmup" in str(gantt_section(plain))
    assert gantt_section([{"round": 0}]) is None
