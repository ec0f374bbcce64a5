"""Rows are read as they are, and the picture is drawn whatever they lack."""

import json
import logging
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.files.rows import metric_name, read_rows
from fedfrozen_app.report.curves import running_total, series, stage_marks, write_curves

pytestmark = pytest.mark.pictures


def test_series_skips_absent_keys_and_turns_the_rest_into_nan():
    rows = [
        {"round": 0},
        {"round": 1, "drift": {"kernel": {"rms": 2}}},
        {"round": 2, "drift": {"rest": {}}},
        {"round": 3, "drift": {"kernel": {"rms": math.inf}}},
        {"round": 4, "drift": {"kernel": {"rms": None}}},
    ]
    found = series(rows, "drift.kernel.rms")
    assert found.rounds == [1, 3, 4]
    assert found.values[0] == 2.0
    assert all(map(math.isnan, found.values[1:]))


def test_running_total_passes_over_nan():
    rows = [{"round": i, "bytes_up": n} for i, n in enumerate([1e6, math.nan, 2e6])]
    assert running_total(series(rows, "bytes_up"), 1e-6).values == pytest.approx([1, 1, 3])


@pytest.mark.parametrize(
    ("stages", "marks"),
    [
        (["initial", "warmup", "warmup", "frozen"], [(2.5, "kernel frozen")]),
        (["initial", "frozen", "frozen"], [(0.5, "kernel frozen")]),
        (["initial", "train", "train"], []),
        (["warmup", "frozen", "train"], [(0.5, "kernel frozen"), (1.5, "train")]),
        (["initial"], []),
        ([], []),
    ],
)
def test_stage_marks_stand_between_the_rounds(stages, marks):
    assert stage_marks([{"round": i, "stage": s} for i, s in enumerate(stages)]) == marks


def test_metric_is_what_was_measured():
    assert metric_name([{"test_loss": 1}, {"test_f1": 0.5}]) == "f1"
    assert metric_name([{"test_accuracy": 0.5}]) == "accuracy"
    assert metric_name([]) == "accuracy"


def test_a_cut_last_line_is_left_out_with_a_warning(tmp_path: Path, caplog):
    (tmp_path / "metrics.jsonl").write_text('{"round": 0}\n{"round": 1, "test_lo')
    with caplog.at_level(logging.WARNING):
        assert read_rows(tmp_path) == [{"round": 0}]
    assert "cut short" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"round": 0\n{"round": 1}\n', "line 1 is not JSON"),
        ('{"round": 0}\n[]\n', "line 2 has no round"),
        ('{"test_loss": 1}\n', "line 1 has no round"),
    ],
)
def test_broken_rows_are_refused_by_line(tmp_path: Path, text, message):
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(UserError, match=message):
        read_rows(tmp_path)


def test_rows_nested_too_deeply_are_one_sentence(tmp_path):
    """Before, a RecursionError."""
    (tmp_path / "metrics.jsonl").write_text('{"round":1,"a":' + "[" * 100_000 + "]" * 100_000 + "}\n")
    with pytest.raises(UserError, match=r"line 1 is not JSON"):
        read_rows(tmp_path)


def test_a_folder_without_a_run_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"no metrics\.jsonl"):
        read_rows(tmp_path)


def picture_texts(rows, tmp_path, monkeypatch) -> list[str]:
    """Draw, and return every text of the figure, as the reader of the PNG would see it."""
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    texts: list[str] = []
    original = Figure.savefig

    def spy(figure, *args, **kwargs):
        original(figure, *args, **kwargs)
        texts.extend(t.get_text() for t in figure.findobj(Text) if t.get_visible())

    monkeypatch.setattr(Figure, "savefig", spy)
    write_curves(rows, tmp_path / "curves.png", title="cost $5_ and \\frac{")
    with Image.open(tmp_path / "curves.png") as image:
        assert image.format == "PNG"
        assert image.width > 1000
    return texts


def test_the_picture_marks_the_freeze_and_names_its_lines(rows, tmp_path, monkeypatch):
    texts = picture_texts(rows, tmp_path, monkeypatch)
    assert texts.count("kernel frozen") == 4
    expected = {"test", "central validation", "up", "down", "kernel rms", "rest mean update (norm)"}
    assert expected <= set(texts)


@pytest.mark.parametrize(
    "bare",
    [
        [],
        [{"round": 0, "stage": "initial"}],
        [{"round": 0, "test_accuracy": math.nan}, {"round": 1, "test_accuracy": math.nan}],
    ],
)
def test_an_empty_panel_says_what_is_missing(bare, tmp_path, monkeypatch):
    texts = "\n".join(picture_texts(bare, tmp_path, monkeypatch))
    for missing in ("central validation", "train (clients)", "up", "down", "kernel rms"):
        assert f"no {missing}" in texts


def test_a_panel_with_one_line_says_that_the_other_is_missing(tmp_path, monkeypatch):
    texts = picture_texts(
        [
            {"round": 0, "test_loss": math.inf},
            {"round": 1, "test_loss": 1.0, "train_loss": math.nan},
        ],
        tmp_path,
        monkeypatch,
    )
    assert "no train (clients)\ntest: 1 not finite" in texts


@settings(max_examples=50, deadline=None)
@given(st.floats() | st.integers() | st.none() | st.text() | st.booleans() | st.lists(st.none()))
@pytest.mark.slow
def test_series_never_yields_an_infinite_value(value):
    (found,) = series([{"round": 3, "x": value}], "x").values
    assert math.isnan(found) or math.isfinite(found)


def test_rows_survive_the_round_trip_with_nan(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"round": 1, "test_loss": math.nan}) + "\n")
    assert math.isnan(read_rows(tmp_path)[0]["test_loss"])
