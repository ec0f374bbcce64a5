"""Lines in a log, a bar on a real pseudo-terminal, and the table that ends a run."""

import io
import logging
import math
import os
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from fedfrozen_app.report.console import (
    Progress,
    closing_table,
    final_metrics,
    human_bytes,
    human_seconds,
    show_end,
)

from .conftest import make_rows, make_summary


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (1_234_567, "1.2 MB"),
        (45_000_000_000, "45.0 GB"),
        (2_500_000_000_000, "2.5 TB"),
    ],
)
def test_bytes_in_decimal_units(count, text):
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.84, "0.8 s"),
        (12.4, "12 s"),
        (59.7, "1 min 00 s"),
        (200, "3 min 20 s"),
        (3599.6, "1 h 00 min"),
        (3900, "1 h 05 min"),
    ],
)
def test_seconds(seconds, text):
    assert human_seconds(seconds) == text


def test_what_an_epsilon_leaves_out_stands_beside_it():
    rows = [{"round": 1, "test_accuracy": 0.5, "epsilon_max": 2.0, "selection": {"0": [1]}}]
    summary = {"privacy_unit": "patient", "selection_changes": 0.6667, "private": True}
    summary["config"] = {"privacy": {"selection": "noisy"}}
    told = dict(final_metrics(rows, summary))
    assert told["Largest epsilon of a client"] == "2.000 per patient"
    assert told["Layers new to a client in a round, mean"] == "0.67"
    summary["config"] = {"privacy": {"selection": "unaccounted"}}
    left_out = "2.000 per patient (the choice of layers, which is public, is not counted)"
    assert dict(final_metrics(rows, summary))["Largest epsilon of a client"] == left_out


def test_a_few_rounds_show_no_stability():
    for rounds, shown in ((3, False), (19, False), (20, True)):
        rows = make_rows(rounds=rounds)
        told = dict(final_metrics(rows, make_summary(rows)))
        assert ("Standard deviation, last 10 rounds" in told) is shown, rounds
        assert "Best minus final" in told


def lines_of(rows, total, **options) -> list[str]:
    stream = io.StringIO()
    with Progress(total, stream=stream, **options) as progress:
        for row in rows:
            progress.update(row)
    return stream.getvalue().splitlines()


def test_a_line_a_round_when_it_is_no_terminal():
    base = {"stage": "warmup", "test_accuracy": 0.8124, "bytes_up": 1_200_000}
    rows = [
        {"round": 0, "stage": "initial", "test_accuracy": 0.1},
        {"round": 2, **base, "bytes_down": 1_900_000, "seconds": {"total": 1.2}},
        {"round": 3, **base, "bytes_down": 1_900_000, "seconds": {"total": 0.8}},
    ]
    # After round 3, 17 rounds of 0.8 seconds are left: the first that ran here may have compiled.
    assert lines_of(rows, 20) == [
        "round 0/20  initial  accuracy 0.100",
        "round 2/20  warmup  accuracy 0.812  up 1.2 MB  down 1.9 MB  1.2 s  at most 22 s left",
        "round 3/20  warmup  accuracy 0.812  up 1.2 MB  down 1.9 MB  0.8 s  about 14 s left",
    ]


def test_lines_of_rows_that_lack_nearly_everything():
    rows = [{"round": 1}, {"round": 2, "stage": "train", "test_f1": math.nan, "seconds": {}}]
    assert lines_of(rows, 2, start_round=0) == ["round 1/2  train", "round 2/2  train  f1 nan"]
    assert lines_of([], 0) == []


@pytest.fixture
def terminal(monkeypatch):
    """A pseudo-terminal, and what was written to it."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "110")
    reader, writer = os.openpty()
    stream = os.fdopen(writer, "w", buffering=1)

    def read() -> str:
        stream.flush()
        os.set_blocking(reader, False)
        chunks = []
        while True:
            try:
                chunks.append(os.read(reader, 65536))
            except BlockingIOError:
                return b"".join(chunks).decode()

    yield stream, read
    stream.close()
    os.close(reader)


def screen(text: str) -> list[str]:
    """The lines that remain visible, for the few control codes that rich writes."""
    lines, row = [""], 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", text):
        if token == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif token == "\r":
            continue
        elif token.startswith("\x1b"):
            if token.endswith("A"):
                row -= int(token[2:-1] or 1)
            elif token.endswith("K"):
                lines[row] = ""
        else:
            lines[row] += token
    return [line.rstrip() for line in lines if line.strip()]


def test_the_bar_counts_bytes_so_far_and_log_lines_stand_above_it(terminal):
    stream, read = terminal
    logger = logging.getLogger("test_console.bar")
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        with Progress(3, stream=stream) as progress:
            for place in (1, 2, 3):
                row = {"round": place, "stage": "train", "bytes_up": 1_000_000, "bytes_down": 500}
                progress.update({**row, "test_accuracy": place / 10, "seconds": {"total": 2.0}})
                logger.warning("client %d is [late]", place)
        assert handler.stream is stream
    finally:
        logger.removeHandler(handler)
    *above, bar = screen(read())
    assert above == ["client 1 is [late]", "client 2 is [late]", "client 3 is [late]"]
    assert "round 3/3" in bar
    assert "accuracy 0.300  train  up 3.0 MB  down 1.5 kB" in bar


def test_the_bar_ends_cleanly_when_the_run_is_interrupted(terminal):
    stream, read = terminal
    before = sys.stdout, sys.stderr
    bar = Progress(10, start_round=4, stream=stream)
    with pytest.raises(KeyboardInterrupt), bar as progress:
        progress.update({"round": 5, "stage": "train", "seconds": {"total": 3.0}})
        raise KeyboardInterrupt
    text = read()
    assert text.rstrip().endswith("\x1b[?25h")  # the cursor is shown again
    assert "at most 15 s left" in screen(text)[-1]
    assert (sys.stdout, sys.stderr) == before


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_a_narrow_window_keeps_round_score_and_time(terminal, monkeypatch, columns):
    stream, read = terminal
    monkeypatch.setenv("COLUMNS", str(columns))
    row = {"stage": "frozen", "test_accuracy": 0.9, "bytes_up": 45_800_000, "bytes_down": 10**9}
    with Progress(20, stream=stream) as progress:
        progress.update({"round": 19, **row, "seconds": {"total": 100.0}})
    (bar,) = screen(read())
    assert len(bar) <= columns
    assert "round 19/20" in bar
    assert "accuracy 0.900" in bar
    assert columns < 60 or "accuracy 0.900  frozen  at most 1" in bar


def test_a_dumb_terminal_gets_lines(terminal, monkeypatch):
    stream, read = terminal
    monkeypatch.setenv("TERM", "dumb")
    with Progress(2, stream=stream) as progress:
        progress.update({"round": 1, "stage": "train"})
    assert read() == "round 1/2  train\r\n"


def shown(table) -> str:
    stream = io.StringIO()
    Console(file=stream, width=140).print(table)
    return stream.getvalue()


def test_closing_table(rows, save_run):
    run_dir = save_run(rows)
    summary = make_summary(rows)
    text = shown(closing_table(summary, run_dir))
    assert "fedfrozen on digits with vit_tiny" in text
    assert f"{summary['final_test_accuracy']:.4f}" in text
    assert f"(round {summary['best_test_round']})" in text
    # By hand: 10 clients x (278,300 or 212,300 role bytes + 420), 5 and 15 rounds.
    assert "45.8 MB (45,844,000 bytes)" in text
    assert "20 of 20: 5 warmup, 15 frozen" in text
    assert str(run_dir) not in text


def test_the_path_of_the_report_stands_on_a_line_of_its_own(rows, save_run):
    """At 40 columns too: it can be copied and clicked."""
    run_dir = save_run(rows)
    for page in (run_dir, run_dir / "report.html"):
        stream = io.StringIO()
        show_end(make_summary(rows), run_dir, Console(file=stream, width=40))
        assert stream.getvalue().splitlines()[-1] == str(page)
        (run_dir / "report.html").write_text("")


def test_the_first_round_does_not_stand_for_those_to_come(rows):
    """It compiles: 130 s, and then rounds of a second."""
    stream = io.StringIO()
    with Progress(5, stream=stream) as progress:
        for number, seconds in ((1, 130.0), (2, 1.0), (3, 1.0)):
            progress.update({"round": number, "seconds": {"total": seconds}})
    said = [line.rpartition("  ")[2] for line in stream.getvalue().splitlines()]
    assert said == ["at most 8 min 40 s left", "about 3.0 s left", "about 2.0 s left"]


def test_figures_of_an_interrupted_f1_run_with_failures():
    rows = make_rows(rounds=7, metric="f1")
    rows[3]["clients_failed"] = 2
    figures = dict(final_metrics(rows, make_summary(rows, status="interrupted")))
    assert figures["Final test f1"] == f"{rows[-1]['test_f1']:.4f}"
    assert figures["Rounds"] == "7 of 20, interrupted: 5 warmup, 2 frozen"
    assert figures["Client replies failed or set aside"] == "2"


def test_a_bare_summary_still_gives_a_table(save_run):
    run_dir: Path = save_run([{"round": 0, "test_accuracy": 0.1}])
    assert "Rounds" in shown(closing_table({}, run_dir))
    nan = dict(final_metrics([], {"final_test_accuracy": math.nan, "total_bytes_up": 5}))
    assert nan["Final test accuracy"] == "nan"
    assert nan["Sent up, all clients"] == "5 B (5 bytes)"


@pytest.mark.parametrize(("final", "text"), [(0.3, "0.2080"), (0.208, "0.2080: the model is no better")])
def test_a_model_that_learned_nothing_is_called_so(final, text):
    rows = [{"round": 1, "test_accuracy": final}]
    figures = dict(final_metrics(rows, {"final_test_accuracy": final, "majority_accuracy": 0.208}))
    assert figures["The most frequent class alone"] == text


def test_no_better_is_said_of_f1_too():
    def said(final: float, floor: float) -> dict[str, str]:
        rows = [{"round": 1, "test_f1": final}]
        return dict(final_metrics(rows, {"final_test_f1": final, "majority_f1": floor}))

    assert said(0.0, 0.0)["Tagging nothing"] == "0.0000: the model is no better"
    assert said(0.2, 0.0)["Tagging nothing"] == "0.0000"
    assert said(0.3, 0.31)["The most frequent label alone"] == "0.3100: the model is no better"
