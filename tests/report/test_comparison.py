"""The comparison page: what it draws follows from the rows, and it works in a real browser."""

import json
import math
from statistics import fmean, stdev

import pytest

from fedfrozen_app.files.rows import read_rows
from fedfrozen_app.report.compare.collect import collect
from fedfrozen_app.report.compare.compare_page import COLOURS, make_charts, write_comparison

from .browser import numbers_drawn, sideways
from .comparisons import make_sweep
from .test_page import HOSTILE, Page


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    return make_sweep(tmp_path_factory.mktemp("sweep"), alphas=(0.1, 0.5), seeds=6)


def test_curves_are_means_over_seeds_with_bands(sweep):
    comparison = collect([sweep])
    lines, paths, dots, loss = make_charts(comparison)
    own = [read_rows(sweep / str(number)) for number in range(6)]  # fedavg, alpha 0.1
    scores = [rows[7]["test_accuracy"] for rows in own]
    first = lines["series"][0]
    assert first["name"] == "fedavg alpha=0.1"
    assert dict(first["points"])[7] == pytest.approx(fmean(scores), rel=1e-5)
    band = {place: (low, high) for place, low, high in first["band"]}
    assert band[7] == pytest.approx((fmean(scores) - stdev(scores), fmean(scores) + stdev(scores)), rel=1e-5)
    sent = sum(row.get("bytes_up", 0) + row.get("bytes_down", 0) for row in own[0][:8]) / 1e6
    assert paths["series"][0]["points"][7] == (pytest.approx(sent), dict(first["points"])[7], "round 7")
    assert dots["series"][0]["values"][2] == ["seed 2", pytest.approx(own[2][20]["test_accuracy"], rel=1e-5)]
    assert loss["series"][3]["name"] == "fedfrozen alpha=0.5"


def test_private_runs_are_drawn_against_epsilon_too(tmp_path):
    sweep = make_sweep(tmp_path, seeds=3, rounds=4)
    assert not [one for one in make_charts(collect([sweep])) if "epsilon" in one["title"]]
    for path in sweep.glob("*/metrics.jsonl"):
        seed = json.loads(path.with_name("summary.json").read_text())["seed"]
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        spent = [{"epsilon_max": row["round"] * (1 + seed), "privacy_unit": "patient"} for row in rows]
        path.write_text("".join(json.dumps(row | own) + "\n" for row, own in zip(rows, spent, strict=True)))
    (drawn,) = [one for one in make_charts(collect([sweep])) if "epsilon" in one["title"]]
    assert drawn["title"] == "Test accuracy against epsilon per patient" and len(drawn["series"]) == 2
    for path in drawn["series"]:  # means over the seeds: the round times 1, 2 and 3
        assert [point[0] for point in path["points"]] == [0, 2, 4, 6, 8]


def test_a_strategy_keeps_its_colour_and_a_setting_its_stroke(sweep):
    lines = make_charts(collect([sweep]))[0]["series"]
    looks = {one["name"]: (one["colour"], one["stroke"]) for one in lines}
    assert looks["fedavg alpha=0.1"] == ("blue", "") and looks["fedavg alpha=0.5"] == ("blue", "dashed")
    assert looks["fedfrozen alpha=0.5"] == ("vermillion", "dashed")


def test_many_groups_all_look_different(tmp_path):
    alphas = [0.1 + number / 10 for number in range(10)]
    lines = make_charts(collect([make_sweep(tmp_path, alphas=alphas, seeds=1, rounds=2)]))[0]["series"]
    assert len(lines) == 20 > len(COLOURS)
    assert len({(one["colour"], one["stroke"]) for one in lines}) == 20
    assert all("band" not in one for one in lines)  # one seed has no spread


def test_a_curve_ends_where_the_first_seed_ends(tmp_path):
    sweep = make_sweep(tmp_path, strategies=("fedavg",), seeds=2, rounds=6)
    path = sweep / "1" / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:5]))
    lines, paths, *_ = make_charts(collect([sweep]))
    assert [place for place, _ in lines["series"][0]["points"]] == [0, 1, 2, 3, 4]
    assert len(paths["series"][0]["points"]) == 5


def test_the_page_holds_tables_tests_and_what_was_left_out(sweep, tmp_path):
    (sweep / "3" / "report.html").write_text("")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "metrics.jsonl").write_text("")
    html = write_comparison(collect([sweep, broken]), sweep / "comparison.html").read_text()
    page = Page(html)
    assert "4 groups · 24 finished runs · 6 seeds · baseline strategy=fedavg · 1 left out" in page.text
    for told in ("fedavg, fedfrozen on digits with vit_tiny", "p (W)", "95 % interval", "fedfrozen seed=5"):
        assert told in page.text
    assert f"Left out: {broken}: not finished" in page.text
    assert [attrs["href"] for tag, attrs in page.tags if tag == "a"] == ["3/report.html"]


def test_one_of_a_kind_is_said_so(tmp_path):
    alone = collect([make_sweep(tmp_path, ("fedavg",), seeds=1)])
    page = write_comparison(alone, tmp_path / "comparison.html").read_text()
    assert "1 group · 1 finished run · 1 seed" in page


def test_hostile_names_stay_text(tmp_path):
    sweep = make_sweep(tmp_path, strategies=("fedavg", HOSTILE), seeds=2, rounds=3)
    page = Page(write_comparison(collect([sweep]), tmp_path / "page.html").read_text())
    assert len(page.scripts) == 2 and HOSTILE in page.text
    assert not {"img"} & {tag for tag, _ in page.tags}


@pytest.mark.slow
def test_it_is_drawn_hidden_and_hovered(sweep, visit):
    path = write_comparison(collect([sweep]), sweep / "comparison.html")
    page = visit(path)
    curves, paths, dots = (page.locator(f"#chart-{index}") for index in range(3))
    assert curves.locator("svg path.band").count() == 4 and curves.locator("svg path.line").count() == 4
    curves.locator(".legend button").first.click()
    assert curves.locator("svg path.band").count() == 3 and curves.locator("svg path.line").count() == 3
    paths.locator("svg").focus()
    paths.locator("svg").press("ArrowRight")
    assert "round 0" in paths.locator(".tip").text_content() and "MB" in paths.locator(".tip").text_content()
    dots.locator("svg").focus()
    dots.locator("svg").press("ArrowDown")
    assert "seed 5" in dots.locator(".tip").text_content()
    early = curves.locator("svg circle.dot").count()
    curves.get_by_text("second half").click()
    assert curves.locator("svg circle.dot").count() == math.floor(early / 21) * 11
    assert "NaN" not in numbers_drawn(page)
    assert page.asked == [path.as_uri()]


@pytest.mark.slow
def test_a_phone_scrolls_down_only(sweep, visit):
    page = visit(write_comparison(collect([sweep]), sweep / "comparison.html"), width=390, scheme="dark")
    for details in page.locator("summary").all():
        details.click()
    assert sideways(page) == 0


@pytest.fixture
def twins(tmp_path):
    """Two strategies whose runs are equal to the last digit, and differ from round to round by a hair."""
    sweep = make_sweep(tmp_path, strategies=("fedavg", "fedprox"), seeds=2, rounds=4)
    for number in range(4):
        path = sweep / str(number) / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            row["test_accuracy"] = 0.093 + 0.0005 * row["round"]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        summary = json.loads(path.with_name("summary.json").read_text())
        summary["final_test_accuracy"] = rows[-1]["test_accuracy"]
        path.with_name("summary.json").write_text(json.dumps(summary))
    return sweep


def test_equal_runs_are_called_equal(twins):
    comparison = collect([twins])
    lines = make_charts(comparison)[0]
    assert lines["note"].endswith("one line covers the other: fedavg and fedprox.")
    page = write_comparison(comparison, twins / "comparison.html").read_text()
    assert "highest mean final test accuracy: all alike" in page


@pytest.mark.slow
def test_an_axis_of_accuracies_spans_enough_and_its_ticks_differ(twins, visit):
    page = visit(write_comparison(collect([twins]), twins / "comparison.html"), width=400)
    for chart in range(3):
        texts = page.locator("figure").nth(chart).locator("svg text").all()
        shown = [text.text_content() for text in texts if text.get_attribute("text-anchor") == "end"]
        ticks = [float(word) for word in shown if word.replace(".", "").isdigit()]
        if ticks:
            assert len(set(ticks)) == len(ticks) and max(ticks) - min(ticks) >= 0.05 - 1e-9
    cut = page.evaluate(
        """() => [...document.querySelectorAll("svg text")].filter((text) => {
            const box = text.getBoundingClientRect(), edge = text.ownerSVGElement.getBoundingClientRect();
            return box.right > edge.right + 1 || box.left < edge.left - 1;
        }).map((text) => text.textContent)"""
    )
    assert cut == []
