"""The pages' script and style: the copy that Flower's bundle carries, and whether the files are sound."""

import re
import subprocess

import pytest

from fedfrozen_app.report import embed


def test_the_copy_is_not_stale():
    copy = (embed.FOLDER / "page_files.py").read_text(encoding="utf-8")
    assert copy == embed.page_files(), "run `python -m fedfrozen_app.report.embed`"


@pytest.mark.parametrize("file", ["page.js", "live.js"])
def test_the_scripts_parse(file):
    driver = pytest.importorskip("playwright._impl._driver", reason="playwright is not installed (extra dev)")
    node, _ = driver.compute_driver_executable()  # playwright brings a node of its own
    done = subprocess.run([node, "--check", embed.FOLDER / file], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_style_holds_rules_and_declarations_alone():
    css = re.sub(r"/\*.*?\*/", "", (embed.FOLDER / "page.css").read_text(encoding="utf-8"), flags=re.DOTALL)
    while re.search(r"\{[^{}]*\}", css):  # from the inner blocks out: what is left over is no rule
        for block in re.findall(r"\{([^{}]*)\}", css):
            for line in filter(str.strip, block.split(";")):
                assert re.fullmatch(r"\s*[\w-]+\s*:\s*[^:;]+", line), line
        css = re.sub(r"[^{};]+\{[^{}]*\}", "", css)
    assert css.strip() == ""


def test_every_variable_of_the_style_is_set():
    files = [(embed.FOLDER / file).read_text(encoding="utf-8") for file in embed.SOURCES.values()]
    used = {name for text in files for name in re.findall(r"var\((--[\w-]+)", text)}
    given = {name for text in files for name in re.findall(r"(--[\w-]+)(?:\s*:|\")", text)}
    assert used and used <= given
