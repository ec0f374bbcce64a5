"""Nothing runs the benchmarks day by day: every script is imported, and what it uses of ours is looked up."""

import ast
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(BENCHMARKS.glob("*.py"))
OURS = ("fedfrozen_app", "strategies", "clients", "tests")


@pytest.mark.slow
def test_every_script_can_be_imported():
    """In a process of its own: they are no package, and some change the process they are in."""
    code = f"""
import importlib, sys
sys.path.insert(0, {str(BENCHMARKS)!r})
for name in {[script.stem for script in SCRIPTS]!r}:
    importlib.import_module(name)
"""
    root = BENCHMARKS.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_what_a_script_uses_of_ours_is_there(script):
    """Also what is imported within a function, attributes of our modules, and calls of our functions."""
    tree = ast.parse(script.read_text())
    known = dict(imported(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (owner := known.get(root_of(node.value))) is not None:
            if inspect.ismodule(owner):
                assert hasattr(owner, node.attr), f"line {node.lineno}: {owner.__name__} has no {node.attr}"
        elif isinstance(node, ast.Call) and (called := known.get(root_of(node.func))) is not None:
            assert fits(called, node), f"line {node.lineno}: {called.__name__} takes other arguments"


def imported(tree: ast.AST) -> Iterator[tuple[str, Any]]:
    """Name and object of everything that is imported from our packages, anywhere in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in OURS:
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(
                        f"{node.module}.{alias.name}"
                    )  # a module in a package, or an error
                yield alias.asname or alias.name, getattr(module, alias.name)


def root_of(node: ast.expr) -> str | None:
    return node.id if isinstance(node, ast.Name) else None


def fits(called: Any, call: ast.Call) -> bool:
    """Whether the call's arguments, as far as they are written out, are those that it takes."""
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):
        return True
    open_ended = any(isinstance(one, ast.Starred) for one in call.args) or any(
        one.arg is None for one in call.keywords
    )
    bind = signature.bind_partial if open_ended else signature.bind
    given = [None for one in call.args if not isinstance(one, ast.Starred)]
    try:
        bind(*given, **{one.arg: None for one in call.keywords if one.arg})
    except TypeError:
        return False
    return True


def test_the_check_sees_what_is_wrong():
    call = ast.parse("Job(1)").body[0].value
    known = dict(imported(ast.parse("def later():\n    from fedfrozen_app.run.job import Job")))
    assert not fits(known["Job"], call)
    assert fits(known["Job"], ast.parse("Job(1, 2, 3)").body[0].value)
    assert fits(known["Job"], ast.parse("Job(1, *others)").body[0].value)
    with pytest.raises(ImportError):
        dict(imported(ast.parse("from fedfrozen_app.run.job import Jobs")))
