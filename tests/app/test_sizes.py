"""A method is a small file: what it says differently, with its maths, and nothing else."""

from pathlib import Path

import pytest

MOST = 120  # lines
ROOT = Path(__file__).parents[2]
METHODS = sorted(path for folder in ("strategies", "clients") for path in (ROOT / folder).glob("*.py"))


@pytest.mark.parametrize("path", METHODS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_method_s_file_is_small_and_says_what_it_is(path):
    text = path.read_text()
    assert len(text.splitlines()) <= MOST
    assert text.startswith('"""')


def test_all_of_them_are_looked_at():
    assert len(METHODS) > 30
