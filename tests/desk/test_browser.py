"""The page in a real browser: decide by keyboard alone, on a narrow window, in the dark. `pytest -m slow`."""

import asyncio
import threading

import pytest

from fedfrozen_app.desk.catalogue import read_texts
from fedfrozen_app.desk.command import Server, listening
from fedfrozen_app.desk.session import Session
from fedfrozen_app.sites import decide
from fedfrozen_app.sites.approval import Approvals
from fedfrozen_app.sites.audit_log import AuditLog
from fedfrozen_app.sites.site_budget import Price, SiteBudget
from tests.desk.looks import problems_of
from tests.desk.steward import PRIVATE, Counted, make_kit, put_before
from tests.report.browser import sideways

pytestmark = pytest.mark.slow


@pytest.fixture
def kit(tmp_path):
    kit = make_kit(tmp_path / "north", privacy_required=True)
    budget, log = SiteBudget(kit.var / "state" / "budget.json"), AuditLog(kit.audit)
    budget.begin("pilot", Price(1.5, 1e-6, "example", "a" * 64), log.head)
    about = {
        "run": "pilot",
        "proposal": "a" * 64,
        "round": 1,
        "arrays": {},
        "bytes": 204_800,
        "examples": 100,
    }
    log.write("sent", **about, epsilon=1.5, epsilon_all_runs=1.5, delta_all_runs=1e-6)
    old = put_before(kit, *PRIVATE, "client.local_epochs=1", run="heart-1")
    decide.approve(kit, Approvals(kit.approvals).find(old.hash))
    return kit


@pytest.fixture
def served(kit, monkeypatch):
    monkeypatch.setattr("fedfrozen_app.desk.command.Counts", Counted)
    place = listening(0)
    server = Server(kit, place, Session(), read_texts())
    thread = threading.Thread(target=lambda: asyncio.run(server.server.serve(sockets=[place])))
    thread.start()
    yield server
    server.close()
    thread.join(20)


@pytest.fixture
def page(chromium, served):
    heard = []
    context = chromium.new_context(viewport={"width": 400, "height": 800}, color_scheme="dark")
    page = context.new_page()
    page.on("console", lambda message: heard.append(message.text))
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.goto(served.address)
    page.wait_for_selector("h1:has-text('What waits')")
    yield page
    context.close()
    assert heard == []


def press_on(page, word: str) -> None:
    """Go to a link, a button or a field with the tabulator alone, and press it."""
    focus_on(page, word)
    page.keyboard.press("Enter")


def focus_on(page, word: str) -> None:
    for _ in range(60):
        page.keyboard.press("Tab")
        name = "document.activeElement.textContent.trim() || document.activeElement.name"
        if page.evaluate(name) == word:
            return
    raise AssertionError(f"{word} cannot be reached by keyboard")


def test_a_steward_refuses_a_bad_run_and_approves_a_good_one_by_keyboard(kit, page):
    bad = put_before(kit, "client.local_epochs=2", run="heart-3")
    page.reload()
    assert "your rules refuse it" in page.inner_text("article")
    press_on(page, "Read and decide")
    page.wait_for_selector("h1:has-text('heart-3')")
    shown = page.inner_text("main")
    assert "NO NOISE" in shown and "Passes over the rows, each round" in shown
    focus_on(page, "reason")
    page.keyboard.type("noise is off, twice the epochs")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=Refused by")
    good = put_before(kit, *PRIVATE, "client.local_epochs=1", "num_rounds=4", run="heart-2")
    page.goto(page.url.partition("/proposal")[0] + "/")
    press_on(page, "Read and decide")
    page.wait_for_selector("h1:has-text('heart-2')")
    press_on(page, "Approve")
    page.wait_for_selector("text=Approved by")
    focus_on(page, "reason")
    page.keyboard.type("the wrong data")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=Refused by")
    told = [(entry["event"], entry["proposal"], entry["reason"]) for entry in decide.decisions(kit)][1:]
    assert told == [
        ("refused", bad.hash, "noise is off, twice the epochs"),
        ("approved", good.hash, ""),
        ("revoked", good.hash, "the wrong data"),
    ]


def test_no_page_is_wider_than_a_narrow_window(kit, page):
    proposal = put_before(kit, *PRIVATE)
    base = page.url.rstrip("/")
    for path in ("", "/decided", "/budget", "/runs", "/log", "/rules", f"/proposal/{proposal.hash}"):
        page.goto(f"{base}{path or '/'}")
        assert sideways(page) == 0, path
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
        assert problems_of(page) == [], path
        page.emulate_media(color_scheme="light")
        assert problems_of(page) == [], f"{path}, light"
        page.emulate_media(color_scheme="dark")
        page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        assert problems_of(page) == [], f"{path}, with all parts open"
    page.goto(f"{base}/budget")
    assert page.locator("svg.chart circle").count() == 1


def test_what_is_folded_opens_with_the_keyboard(kit, page):
    proposal = put_before(kit, *PRIVATE)
    page.goto(f"{page.url.rstrip('/')}/proposal/{proposal.hash}")
    number = " ".join(proposal.hash[at : at + 4] for at in range(0, 64, 4))
    assert number not in " ".join(page.inner_text("main").split())
    press_on(page, "The number")
    assert number in " ".join(page.inner_text("main").split())


def test_another_page_of_this_machine_cannot_decide(kit, served, page, tmp_path):
    """A form on another port, of the same site for a browser, even if it knew our path."""
    proposal = put_before(kit)
    other = page.context.new_page()
    target = f"http://{served.host}{served.session.base}/proposal/{proposal.hash}/approve"
    with listening(0) as place:
        place.listen()

        def answer() -> None:
            for _ in range(2):
                connection, _ = place.accept()
                with connection:
                    connection.recv(4096)
                    form = f"<form method=post action='{target}'><button>go</button></form>"
                    head = f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: {len(form)}\r\n"
                    connection.sendall(f"{head}Connection: close\r\n\r\n{form}".encode())

        threading.Thread(target=answer, daemon=True).start()
        other.goto(f"http://127.0.0.1:{place.getsockname()[1]}/")
        other.click("button")
        other.wait_for_url("**/approve")
        assert "Another page asked for this" in other.content()
    assert Approvals(kit.approvals).decision(proposal.hash) is None


def test_what_is_computed_of_a_page_s_looks_finds_faults(chromium):
    """Each fault once: pale text, no focus, a picture and a field without words, a box that is too wide."""
    page = chromium.new_page(viewport={"width": 400, "height": 300})
    page.set_content(
        """<body style="background:#fff"><main>
        <p style="color:#949494">pale</p><p style="color:#767676">sound</p>
        <button style="outline:none">go</button><svg width=9 height=9></svg><input name=reason>
        <div style="width:600px">wide</div></main></body>"""
    )
    found = problems_of(page)
    assert [one for one in found if one.startswith("contrast")] == ["contrast 3.03: pale"]
    for part in ("focus go: no outline", "no text for <svg", "no label for reason", "cut off <div"):
        assert sum(part in one for one in found) == 1, part
    assert any("pixels wider than the window" in one for one in found)
    page.close()
