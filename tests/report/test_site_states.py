"""The live page of a deployed run: where each site stands, since when, and what to do."""

import datetime
import json
import os

import pytest

from fedfrozen_app.commands.watch import LivePages
from fedfrozen_app.files import lease, status
from fedfrozen_app.files.lease import Owner
from fedfrozen_app.files.presence import STATES, Presence, SiteState, read_presence, write_presence
from fedfrozen_app.report.site_states import TO_DO, WORDS, version_of

from .browser import sideways
from .conftest import make_rows, save
from .test_page import Page

HASH = "5f" * 32
SINCE = "2026-01-02T03:04:05+00:00"


def now(earlier: float = 0.0) -> str:
    return (datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=earlier)).isoformat(
        timespec="seconds"
    )


def watched(folder, *states, time=None, rows=()):
    """A run that goes on, with these sites."""
    save(folder, list(rows), None)
    status.write(folder, status.new_status({}, []))
    sites = tuple(
        SiteState(f"s{number}-{state}", state, SINCE, "said hello") for number, state in enumerate(states)
    )
    write_presence(folder, Presence(time or now(), 3, HASH, "sources abc", sites))
    return LivePages(folder)


def text_of(pages):
    return Page(pages.page("/", "")).text


def test_every_state_has_its_words_and_what_to_do(tmp_path):
    text = text_of(watched(tmp_path / "run", *STATES, rows=make_rows(rounds=2)))
    for state in STATES:
        assert WORDS[state] in text
        assert (state in TO_DO) == (state not in ("there", "busy", "asleep"))  # which says when it opens
    assert "03:04:05 UTC" in text and f"fedfrozen site approve {HASH[:12]}" in text
    assert "this is sources abc" in text and HASH in text


def test_before_the_first_round(tmp_path):
    """A run that waits for approval has no row yet, and this is when somebody looks."""
    text = text_of(watched(tmp_path / "run", "waiting", "silent"))
    assert "waiting for approval" in text and "its network and its SuperNode" in text


def test_failures_of_the_last_round_are_said_beside_the_sites(tmp_path):
    rows = make_rows(rounds=2)
    rows[-1] |= {
        "failures": ["Client west was set aside: it <b>sent</b> NaN."],
        "discarded": "2 of 3 were sound",
    }
    pages = watched(tmp_path / "run", "there", rows=rows)
    html = pages.page("/", "")
    assert "Round 2: Client west was set aside: it &lt;b&gt;sent&lt;/b&gt; NaN." in html
    assert "Round 2 changed nothing: 2 of 3 were sound." in html


def test_a_lost_process_and_an_old_file(tmp_path):
    pages = watched(tmp_path / "run", "busy", time=now(300))
    assert "Nothing new since" in text_of(pages)
    ended = Owner(**{**vars(Owner.of(os.getpid())), "pid": 2**22 + 7})
    (tmp_path / "run" / lease.FILE).write_text(json.dumps(vars(ended)))
    text = text_of(pages)
    assert "was killed" in text and f"fedfrozen resume {tmp_path / 'run'}" in text


def test_a_run_that_has_ended_shows_no_states(tmp_path):
    pages = watched(tmp_path / "run", "busy", rows=make_rows(rounds=2))
    status.settle(tmp_path / "run", "failed")
    assert "what to do" not in text_of(pages)


def test_the_page_changes_with_a_state_and_not_with_the_time(tmp_path):
    run = tmp_path / "run"
    watched(run, "there")
    before = version_of(run)
    write_presence(run, Presence(now(-1), 3, HASH, "", read_presence(run).sites))
    assert version_of(run) == before
    write_presence(run, Presence(now(), 3, HASH, "", (SiteState("s", "late", SINCE),)))
    assert version_of(run) != before


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"time": 1, "sites": [{"name": "x", "state": "?", "since": ""}]}']
)
def test_a_damaged_file_is_no_presence(tmp_path, text):
    (tmp_path / "flower").mkdir()
    (tmp_path / "flower" / "presence.json").write_text(text)
    assert read_presence(tmp_path) is None and version_of(tmp_path) == ""


@pytest.mark.slow
def test_in_a_browser_narrow_and_dark(tmp_path, visit):
    from .test_watch import serving

    watched(tmp_path / "run", *STATES, rows=make_rows(rounds=4))
    for width, scheme in ((1200, "light"), (400, "dark")):
        with serving(tmp_path / "run") as url:
            page = visit(f"{url}/", width=width, scheme=scheme)
            assert page.locator("table.sites tbody tr").count() == len(STATES)
            assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
            page.close()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_to_do_is_within_a_narrow_window(tmp_path, visit, scheme):
    """On a telephone, too: no scrolling, neither of the page nor of the table."""
    pages = watched(tmp_path / "run", *STATES, rows=make_rows(rounds=2))
    (tmp_path / "page.html").write_text(pages.page("/", "").replace("data-version", "data-no-version"))
    page = visit(tmp_path / "page.html", width=400, scheme=scheme)
    assert sideways(page) == 0
    boxes = [cell.bounding_box() for cell in page.locator(".sites td:last-child").all()]
    assert len(boxes) == len(STATES) and all(box["x"] + box["width"] <= 400 for box in boxes)
