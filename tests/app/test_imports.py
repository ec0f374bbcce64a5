"""Verbs that only look at runs start without what training needs."""

import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "datasets", "flwr", "ray", "matplotlib"}
LIGHT = ("list", "show", "compare", "report", "watch")


@pytest.mark.parametrize("verb", LIGHT)
def test_a_look_imports_nothing_that_trains(verb):
    code = f"""
import importlib, sys
from fedfrozen_app.__main__ import run
from fedfrozen_app.commands import VERBS
importlib.import_module(VERBS[{verb!r}].partition(":")[0])
print(*({HEAVY!r} & set(sys.modules)))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
