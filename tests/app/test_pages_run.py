"""The pages' Python and the notebooks are carried out, as a reader would."""

import ast
import json
import re
import subprocess
import sys
from io import BytesIO
from pathlib import Path

import pytest
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))


def python_blocks(page):
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["README.md", "docs/python.md", "docs/coming-from.md"])
def test_the_python_of_a_page_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = python_blocks(ROOT / name)
    assert found
    exec(compile("\n".join(found), name, "exec"), {"__name__": "page"})


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path, tmp_path, monkeypatch):
    """Cell by cell; the last expression of each must be able to show itself."""
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": "notebook"}
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        *before, last = _statements("".join(cell["source"]))
        exec("\n".join(before), scope)
        try:
            shown = eval(last, scope)
        except SyntaxError:
            exec(last, scope)
            continue
        show = getattr(shown, "_repr_html_", None)
        if isinstance(shown, Figure):  # it has no HTML of its own: a notebook draws it
            shown.savefig(BytesIO())
        else:
            assert (show() if callable(show) else repr(shown)) is not None


def test_notebooks_hold_no_results():
    """They would be stale at the next change."""
    assert len(NOTEBOOKS) == 3
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text())["cells"]
        assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)


def _statements(source):
    """Each with its decorators, which a node's own place leaves out."""
    lines = source.splitlines()
    found = []
    for node in ast.parse(source).body:
        first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
        found.append("\n".join(lines[first - 1 : node.end_lineno]))
    return found


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    """Links and anchors too: `strict` fails at the first that leads nowhere. Needs the extra `docs`."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (extra docs)")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "tutorial" / "index.html").is_file()


def test_every_page_is_in_the_sites_menu():
    menu = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    listed = re.findall(r": ([\w-]+\.md)$", menu, re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))
