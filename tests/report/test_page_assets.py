"""The pages' script, style and templates: they are sound, and the bundle's copy of them is current."""

import re
import subprocess

import pytest

from fedfrozen_app.report.page_assets import GENERATED, SOURCES, generate


def test_the_copy_is_not_stale():
    copy = GENERATED.read_text(encoding="utf-8")
    assert copy == generate(), "run `python -m fedfrozen_app.report.page_assets`"


@pytest.mark.parametrize("file", ["page.js", "live.js"])
def test_the_scripts_parse(file):
    driver = pytest.importorskip("playwright._impl._driver", reason="playwright is not installed (extra dev)")
    node, _ = driver.compute_driver_executable()  # playwright brings a node of its own
    done = subprocess.run([node, "--check", SOURCES / file], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_style_holds_rules_and_declarations_alone():
    css = re.sub(r"/\*.*?\*/", "", (SOURCES / "page.css").read_text(encoding="utf-8"), flags=re.DOTALL)
    while re.search(r"\{[^{}]*\}", css):  # from the inner blocks out: what is left over is no rule
        for block in re.findall(r"\{([^{}]*)\}", css):
            for line in filter(str.strip, block.split(";")):
                assert re.fullmatch(r"\s*[\w-]+\s*:\s*[^:;]+", line), line
        css = re.sub(r"[^{};]+\{[^{}]*\}", "", css)
    assert css.strip() == ""


def test_every_variable_of_the_style_is_set():
    files = [(SOURCES / file).read_text(encoding="utf-8") for file in ("page.js", "live.js", "page.css")]
    used = {name for text in files for name in re.findall(r"var\((--[\w-]+)", text)}
    given = {name for text in files for name in re.findall(r"(--[\w-]+)(?:\s*:|\")", text)}
    assert used and used <= given
