"""A real browser for the pages: whatever it complains of or asks the network for is kept."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def chromium() -> Iterator:
    """One headless Chromium for all tests of a worker."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra dev)")
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no chromium or google-chrome on this machine: the pages were not opened in a browser")
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium):
    """Open a page; console messages, errors and requests must be none but the page's own."""
    contexts, heard, asked = [], [], []

    def visit(target: Path | str, *, width: int = 1200, scheme: str = "light"):
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: heard.append(message.text))
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        url = target.resolve().as_uri() if isinstance(target, Path) else target
        page.goto(url)
        page.wait_for_selector("body[data-ready]")
        page.asked = asked
        return page

    yield visit
    for context in contexts:
        context.close()
    assert heard == []


def numbers_drawn(page) -> str:
    """Everything that places something in a drawing, as one text."""
    return page.evaluate(
        """() => [...document.querySelectorAll("svg *")].flatMap((node) =>
            ["d", "x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "width", "height"].map((key) =>
                node.getAttribute(key) ?? "")).join(" ")"""
    )


def sideways(page) -> int:
    """How many pixels the page can be scrolled sideways."""
    return page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
