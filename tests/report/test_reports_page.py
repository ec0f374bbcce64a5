"""docs/reports.md: its commands are ones that the app takes."""

import shlex

import pytest

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.config import compose_config, read, resolved
from tests.app.test_docs import ROOT, lines

COMMANDS = [
    shlex.split(line)[1:]
    for line in lines((ROOT / "docs" / "reports.md").read_text())
    if line.startswith("fedfrozen ")
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_is_understood(words, capsys):
    if "=" in words[0]:
        read(resolved(compose_config(words)))
    else:
        assert command(words) == 2  # the folder is the reader's: that it is not there is all that is wrong
        assert f"There is no run folder {words[1]}" in capsys.readouterr().err


def test_the_search_above_finds_them():
    assert {words[0] for words in COMMANDS} >= {"report", "watch"} and len(COMMANDS) == 7
