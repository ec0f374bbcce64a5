"""What others wrote does not move the cursor, whatever prints it: logs, tables, lines."""

import io
import logging
import re
from pathlib import Path

import pytest
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import fedfrozen_app
from fedfrozen_app.__main__ import run as command
from fedfrozen_app.core.logs import OneLine
from fedfrozen_app.core.streams import print_text
from fedfrozen_app.core.terminal import Console

EVIL = "north\x1b[2J\x1b]0;owned\x07\u202e\u009b8m\ud800"
SHOWN = "north\\x1b[2J\\x1b]0;owned\\x07\\u202e\\x9b8m\\ud800"


def logged(message, *details, exc_info=None):
    record = logging.LogRecord("fedfrozen_app", logging.INFO, "", 0, message, details, exc_info)
    return OneLine().format(record)


def test_a_record_is_one_printable_line():
    assert logged("Refused: %s.", f"{EVIL}\r\nRound 1: all is well") == (
        f"Refused: {SHOWN}\\r\\nRound 1: all is well."
    )


def test_a_traceback_keeps_its_lines():
    try:
        raise ValueError(EVIL)
    except ValueError as error:
        lines = logged("It failed.", exc_info=(ValueError, error, error.__traceback__)).split("\n")
    assert lines[0] == "It failed." and lines[1].startswith("Traceback") and len(lines) >= 4
    assert lines[-1] == f"ValueError: {SHOWN}" and all(map(str.isprintable, lines))


@pytest.mark.parametrize("made", [Text, Panel, lambda text: text])
def test_a_console_prints_what_is_printable(made):
    table = Table("site", title=Text(EVIL))
    table.add_row(made(EVIL))
    stream = io.StringIO()
    console = Console(file=stream, width=200, force_terminal=True, color_system="standard")
    console.print(table)
    console.print(f"- {EVIL}", markup=False)
    console.print(Text("red", style="red"))
    shown = stream.getvalue()
    assert "\x1b[31mred\x1b[0m" in shown  # our own colours stay
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert all(line.isprintable() for line in plain.split("\n"))
    assert "- " + SHOWN.replace("\\x07", "") in plain  # rich drops the bell itself


def test_lines_stay_and_nothing_else(capsys):
    print_text(f"one\n{EVIL}")
    assert capsys.readouterr().out == f"one\n{SHOWN}\n"


def test_a_sentence_that_ends_a_command(capsys):
    assert command(["show", "no\x1b[2Jfolder"]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_nobody_prints_past_it():
    """Rich's own console prints whatever it is given."""
    package = Path(fedfrozen_app.__file__).parent
    others = [
        path.name
        for path in package.rglob("*.py")
        if re.search("from rich.console|rich import", path.read_text())
    ]
    assert others == ["terminal.py"]
