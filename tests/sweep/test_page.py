"""The commands of docs/sweeps.md do what the page says."""

import shlex
from pathlib import Path

import pytest

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.commands import VERBS
from fedfrozen_app.config import compose_config, read, resolved
from tests.app.test_docs import expanded, lines

PAGE = (Path(__file__).parents[2] / "docs" / "sweeps.md").read_text()
COMMANDS = [shlex.split(line)[1:] for line in lines(PAGE) if line.startswith("fedfrozen ")]


def test_the_search_above_still_finds_them():
    assert len(COMMANDS) >= 9 and {words[0] for words in COMMANDS} >= {"-m", "search", "compare", "plan"}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_of_the_page(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if words[0] in ("plan", "doctor"):
        assert command(words) == 0
    elif words[0] in ("compare", "list", "show"):
        assert command(words) == 2  # DIR and RUN stand for a folder that is not here
        assert "There is no" in capsys.readouterr().err
    else:
        assert words[0] == "-m" or words[0] in VERBS
        overrides = [word for word in words if "=" in word and "interval" not in word]
        for line in expanded(overrides):
            read(resolved(compose_config(line)))
