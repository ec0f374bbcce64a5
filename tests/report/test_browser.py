"""The run page in a real browser: it draws, answers the hand, and asks the network for nothing."""

import copy
import math

import numpy as np
import pytest

from fedfrozen_app.report.label_picture import label_picture
from fedfrozen_app.report.run_page import write_report

from .browser import numbers_drawn, sideways
from .conftest import make_rows, make_summary, save, with_selection
from .test_page import HOSTILE


def test_every_chart_is_drawn_without_a_complaint(rows, save_run, visit):
    rows[6]["test_loss"] = math.nan
    rows[2]["failures"] = [HOSTILE]
    rows[20]["bytes_up_by_role"][HOSTILE] = 500_000
    path = write_report(save_run(with_selection(rows), command=HOSTILE))
    page = visit(path)
    # accuracy, loss, up, down, so far, drift, time, spread (with a band)
    for index, paths in enumerate([4, 3, 10, 9, 2, 4, 5, 4]):
        figure = page.locator(f"#chart-{index}")
        assert figure.locator("svg path").count() == paths, index
        assert "kernel frozen" in figure.locator("svg").text_content()
    assert "NaN" not in numbers_drawn(page)
    # The loss that is not finite breaks the line: the pen is put down twice.
    line = page.locator("#chart-1 path.line").nth(1).get_attribute("d")
    assert (line.count("M"), line.count("L")) == (2, 18)
    assert page.asked == [path.as_uri()]


@pytest.mark.slow
def test_the_legend_hides_a_series_and_hover_shows_values(rows, save_run, visit):
    page = visit(write_report(save_run(rows)))
    figure = page.locator("#chart-0")
    legend, tip, svg = figure.locator(".legend button"), figure.locator(".tip"), figure.locator("svg")
    legend.first.click()
    assert legend.first.get_attribute("aria-pressed") == "false"
    assert figure.locator("svg path").count() == 3
    assert not tip.is_visible()
    box = svg.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 20, box["y"] + 80)
    assert tip.locator("b").text_content() == "round 20"
    assert f"{rows[20]['val_accuracy']:.4f}" in tip.text_content()
    assert f"{rows[20]['test_accuracy']:.4f}" not in tip.text_content()
    legend.first.click()
    assert figure.locator("svg path").count() == 4
    svg.focus()
    svg.press("ArrowRight")
    assert tip.locator("b").text_content() == "round 0"
    svg.press("ArrowRight")
    assert tip.locator("b").text_content() == "round 1"


@pytest.mark.slow
def test_the_maps_show_one_client_and_one_layer(save_run, visit):
    rows = with_selection(make_rows(rounds=8, warmup=2, clients=3), layers=6, top=2)
    page = visit(write_report(save_run(rows)))
    clients, layers = page.locator("#chart-8"), page.locator("#chart-9")
    svg = layers.locator("svg")
    svg.focus()
    svg.press("ArrowLeft")  # the last cell: layer 5 in round 8
    # Clients 0, 1, 2 begin with layers 8, 9, 10 mod 6 = 2, 3, 4: only the last reaches layer 5.
    assert "round 8" in layers.locator(".tip").text_content()
    assert "0.3333" in layers.locator(".tip").text_content()
    layers.locator("select").select_option(label="client 2: its layers")
    svg.focus()
    svg.press("ArrowLeft")
    assert layers.locator(".tip span").text_content().strip() == "1"
    svg.press("ArrowUp")
    svg.press("ArrowUp")
    assert layers.locator(".tip span").text_content().strip() == "0"
    clients.locator("svg").focus()
    clients.locator("svg").press("ArrowRight")
    worst = rows[1]["by_client"]["client_val_after"]["0"]
    assert clients.locator(".tip span").text_content().strip() == f"{worst:.4f}".rstrip("0")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.slow
def test_a_phone_scrolls_down_only(rows, save_run, visit, scheme):
    rows[3]["failures"] = ["x" * 300]
    page = visit(write_report(save_run(with_selection(rows), command="y" * 500)), width=390, scheme=scheme)
    assert sideways(page) == 0
    for details in page.locator("summary").all():
        details.click()
    assert sideways(page) == 0
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 380) == (scheme == "dark")


@pytest.mark.pictures
@pytest.mark.slow
def test_labels_and_a_long_time_read_well_on_a_phone_at_night(rows, save_run, visit):
    folder = save_run(rows, seconds=641.0)
    label_picture(np.ones((40, 3), dtype=int), "abc", ["x"] * 40, folder / "labels.png")
    page = visit(write_report(folder), width=400, scheme="dark")
    picture = page.locator("figure img")
    assert "invert" in picture.evaluate("(image) => getComputedStyle(image).filter")  # no white block
    assert picture.bounding_box()["width"] >= 540  # its words keep their size; its box scrolls
    assert sideways(page) == 0
    time = page.locator(".card b", has_text="10 min 41 s")
    height = float(time.evaluate("(text) => parseFloat(getComputedStyle(text).lineHeight)"))
    assert time.bounding_box()["height"] < 1.5 * height  # one line


@pytest.mark.slow
def test_print_shows_what_is_folded(rows, save_run, visit):
    page = visit(write_report(save_run(rows)), scheme="dark")
    assert page.pdf()[:4] == b"%PDF"
    assert page.locator("details:not([open])").count() == 0
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


@pytest.mark.slow
def test_odd_runs_are_drawn(tmp_path, visit):
    values = {"constant": 0.5, "tiny": 1e-12, "huge": 1e30, "all nan": math.nan}
    for kind in ["zero rounds", "one value", *values]:
        rows = copy.deepcopy(make_rows(rounds=0 if kind == "zero rounds" else 3, warmup=1))
        for row in rows:
            if kind in values:
                row.update(test_loss=values[kind], train_loss=values[kind])
            elif kind == "one value" and row["round"] != 2:
                row.pop("test_loss")
        page = visit(write_report(save(tmp_path / kind, rows, make_summary(rows))))
        drawn = numbers_drawn(page)
        assert "NaN" not in drawn and "Infinity" not in drawn, kind


@pytest.mark.slow
def test_a_large_report_stays_small(tmp_path, visit):
    rows = with_selection(make_rows(rounds=100, warmup=20, clients=50), layers=24, top=8)
    path = write_report(save(tmp_path / "run", rows, make_summary(rows)))
    assert path.stat().st_size < 3_000_000
    assert visit(path).locator("#chart-9 select option").count() == 52
