"""census.html: what stands on it, and how it looks in a real browser, wide and narrow."""

import numpy as np
import pytest

from fedfrozen_app.report.census_page import page, write_page
from tests.census import planted
from tests.census.planted import census
from tests.report.browser import sideways

HOSTILE = '<script>alert("x")</script>'


def federation() -> dict:
    by_site = planted.shifted()
    by_site["west"] = planted.missing_class()["west"]
    by_site["tiny"] = planted.pictures(np.random.default_rng(7), rows=18)
    return census(by_site, refused={"far-north": "it refused; its own log says why"})


@pytest.mark.parametrize("width", [400, pytest.param(1280, marks=pytest.mark.slow)])
def test_the_page_in_a_browser(visit, tmp_path, width):
    write_page(federation(), tmp_path)
    seen = visit(tmp_path / "census.html", width=width)
    assert sideways(seen) == 0 and len(seen.asked) == 1  # it needs nothing else
    text = seen.inner_text("body")
    for words in (
        "Census of 5 sites",
        "far-north reported nothing",
        "west has no class pneumonia",
        "darker: ",
    ):
        assert words in text
    # Sites below one another, classes side by side, each cell with its rows.
    assert seen.locator("svg.heat rect").count() == 5 * 4
    assert "west, pneumonia: 0 rows" in seen.locator("svg.heat").inner_html()
    assert seen.locator("svg.heat").locator("text", has_text="?").count() == 4  # the tiny site's
    assert seen.locator("figure svg:not(.heat)").count() >= 2


def test_names_from_sites_are_escaped():
    by_site = planted.healthy()
    by_site[HOSTILE] = by_site.pop("north")
    labels = by_site[HOSTILE].labels
    by_site[HOSTILE].labels = [HOSTILE if label == "normal" else label for label in labels]
    made = page(census(by_site, refused={HOSTILE: HOSTILE}))
    assert HOSTILE not in made and "&lt;script&gt;" in made


def test_one_site_and_no_answer_of_some_still_make_a_page():
    rng = np.random.default_rng(0)
    assert "There is one site" in page(census({"alone": planted.pictures(rng)}))
    nobody = census({"a": planted.pictures(rng, rows=5), "b": planted.pictures(rng, rows=4)})
    assert "No site reported its classes" in page(nobody)
    assert "Characters of a text" in page(census({"a": planted.texts(rng), "b": planted.texts(rng)}, "text"))
