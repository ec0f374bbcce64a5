"""Every promise of the threat model's pages names a test that exists."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COLUMNS = ["asset", "attacker", "promise", "mechanism", "test", "residual"]
NAMES = ("threat-model.md", "threat-model-access.md", "threat-model-counts.md")
LINES = [line for name in NAMES for line in (ROOT / "docs" / name).read_text().splitlines()]


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def promises():
    """(promise, its cell of tests) of every table with these columns."""
    found, within = [], False
    for line in LINES:
        if not line.startswith("|"):
            within = False
        elif cells(line) == COLUMNS:
            within = True
        elif within and not re.fullmatch(r"[|\-]+", line):
            row = dict(zip(COLUMNS, cells(line), strict=True))
            found.append(pytest.param(row["test"], id=f"{row['asset']}: {row['promise']}"[:80]))
    return found


@cache
def functions_of(path):
    tree = ast.parse(path.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name[:5] == "test_"}


@pytest.mark.parametrize("named", promises())
def test_the_promise_names_tests_that_exist(named):
    places = re.findall(r"`([^`]+)`", named)
    assert places, "no test is named"
    for place in places:
        file, _, name = place.partition("::")
        path = ROOT / file
        assert path.exists(), f"{file} does not exist"
        files = sorted(path.glob("test_*.py")) if path.is_dir() else [path]
        functions = set().union(*map(functions_of, files))
        assert functions and (not name or name in functions), f"{file} has no {name}"


def test_there_are_promises():
    assert len(promises()) >= 25
