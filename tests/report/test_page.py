"""The page holds what the run holds, stays inert whatever that is, and draws in a browser."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.report.charts import make_charts
from fedfrozen_app.report.fairness import reliability_chart
from fedfrozen_app.report.run_page import render, run_page, write_report

from .conftest import RECORD_BYTES, ROLE_BYTES, make_rows, make_summary, save

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>'\"&$"
VOID = {"meta", "img", "br", "link", "input"}


class Page(HTMLParser):
    """Checks that every tag is closed, and keeps the tags, scripts and text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif self.open and self.open[-1] != "style":
            self.text += data

    @property
    def charts(self) -> dict[str, dict]:
        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} is not JSON")

        data = json.loads(self.scripts[0], parse_constant=refuse)
        return {chart["title"]: chart for chart in data["charts"]}


@pytest.mark.parametrize(("clients", "told"), [(1, "1 client ·"), (10, "10 clients ·"), (None, "")])
def test_the_page_counts_clients_where_their_number_was_set(tmp_path, clients, told):
    """A federation of sites has no number of clients: whoever is there takes part."""
    rows = make_rows(rounds=2, warmup=1)
    summary = make_summary(rows)
    summary["config"]["num_clients"] = clients
    if clients is None:
        summary["config"]["runtime"] = {"name": "deployed"}
    page = report_of(save(tmp_path, rows, summary))
    assert ("dirichlet partition" in page.text) == (clients is not None)  # sites have data of their own
    assert told in page.text and "None" not in page.text and "1 clients" not in page.text


def report_of(run_dir: Path) -> Page:
    return Page(write_report(run_dir).read_text(encoding="utf-8"))


def points(chart: dict, name: str) -> dict[int, float | None]:
    (found,) = [one for one in chart["series"] if one["name"] == name]
    return dict(found["points"])


def test_the_page_holds_the_run(rows, save_run):
    page = report_of(save_run(rows))
    assert "fedfrozen on digits with vit_tiny" in page.text
    assert "fedfrozen strategy=fedfrozen partition.alpha=0.1 seed=0" in page.text
    for text in ("partition.alpha", "torch", "2.13.0", "45,844,000 bytes", "0123456789abcdef"):
        assert text in page.text
    charts = page.charts
    assert points(charts["Accuracy"], "test")[20] == pytest.approx(rows[20]["test_accuracy"], 1e-5)
    assert all(chart["x"]["marks"] == [[5.5, "kernel frozen"]] for chart in charts.values())


def test_bars_add_up_to_the_bytes_of_the_round(rows):
    chart = {chart["title"]: chart for chart in make_charts(rows)}["Sent up by role"]
    assert [one["name"] for one in chart["series"]] == [*ROLE_BYTES, "plan and digests"]
    assert points(chart, "query").keys() == {1, 2, 3, 4, 5}
    assert points(chart, "plan and digests")[7] == pytest.approx(10 * RECORD_BYTES / 1e6)
    for place in (3, 12):
        total = sum(dict(one["points"]).get(place, 0) for one in chart["series"])
        assert total == pytest.approx(rows[place]["bytes_up"] / 1e6, rel=1e-5)


def test_time_not_spent_in_a_named_phase_is_shown_as_other(rows):
    chart = {chart["title"]: chart for chart in make_charts(rows)}["Time by phase"]
    assert "total" not in [one["name"] for one in chart["series"]]
    assert points(chart, "other")[1] == pytest.approx(1.1 - (0.8 + 0.05 + 0.15 + 0.03))


def test_an_unknown_role_is_drawn_too():
    rows = [{"round": 1, "bytes_up": 7, "bytes_up_by_role": {"lora.a": 4, "query": 3}}]
    chart = make_charts(rows)[2]
    assert points(chart, "lora.a") == {1: pytest.approx(4e-6)}
    assert {one["name"] for one in chart["series"]} == {"query", "lora.a"}


def test_one_file_that_asks_the_network_for_nothing(rows, save_run):
    run_dir = save_run(rows)
    Image.new("RGB", (4, 3), "red").save(run_dir / "labels.png")
    html = write_report(run_dir).read_text()
    assert re.findall(r"\w+://[^\"'\s]*", html) == ["http://www.w3.org/2000/svg"]
    page = Page(html)
    sources = [attrs[key] for _, attrs in page.tags for key in ("src", "href") if key in attrs]
    assert len(sources) == 1
    assert sources[0].startswith("data:image/png;base64,")
    assert "link" not in {tag for tag, _ in page.tags}
    assert "url(" not in html
    assert "@import" not in html


def test_what_users_write_stays_text(rows, save_run):
    rows[2]["failures"] = [HOSTILE]
    rows[3]["stage"] = HOSTILE
    rows[4]["bytes_up_by_role"][HOSTILE] = 5
    summary = {
        "config": {
            "strategy": {"name": HOSTILE, HOSTILE: HOSTILE},
            "dataset": HOSTILE,
            "partition": {"name": HOSTILE, "alpha": HOSTILE},
            "num_rounds": HOSTILE,
        },
        "versions": {HOSTILE: HOSTILE},
        **dict.fromkeys(("command", "git_commit", "machine", "device", "seed", "status"), HOSTILE),
    }
    page = report_of(save_run(rows, **summary))
    clean = Page(render(make_rows(), make_summary(make_rows()), None, name="run"))
    assert len(page.scripts) == 2
    assert page.scripts[1] == clean.scripts[1]
    assert {tag for tag, _ in page.tags} == {tag for tag, _ in clean.tags}
    assert not any(key.startswith("on") for _, attrs in page.tags for key in attrs)
    assert page.text.count(HOSTILE) >= 12
    assert any(one["name"] == HOSTILE for one in page.charts["Sent up by role"]["series"])


def test_nan_is_a_gap_a_note_and_a_word(rows, save_run):
    for place in (6, 7):
        rows[place]["test_loss"] = math.nan
    rows[8]["train_loss"] = math.inf
    page = report_of(save_run(rows, final_test_accuracy=math.nan))
    loss = page.charts["Loss"]
    assert points(loss, "test")[6] is None
    assert points(loss, "train")[8] is None
    assert "Not a finite number: train in round 8; test in round 6, 7." in loss["note"]
    assert page.text.count("NaN") == 3


def test_a_model_that_has_burst_is_sure_of_nothing():
    """Its scores are not finite, and neither is how sure it is: the page is written without that point."""
    parts = [{"confidence": math.nan, "right": 0.1, "rows": 9}, {"confidence": 0.7, "right": 0.6, "rows": 9}]
    own = {"all": {}, "groups": {}, "reliability": parts, "hidden": {}}
    found = {"models": {"global": own, "personal": {**own, "reliability": parts[:1]}}}
    assert [each["points"] for each in reliability_chart(found)[0]["series"]] == [
        [[0.7, 0.6]],
        [[0, 0], [1, 1]],
    ]
    assert reliability_chart({"models": {"global": {**own, "reliability": parts[:1]}}}) == []


def test_keys_that_are_absent_are_named(tmp_path):
    rows = [{"round": place, "stage": "train", "test_loss": 1.0} for place in range(4)]
    page = report_of(save(tmp_path / "run", rows, {}))
    charts = page.charts
    assert charts["Loss"]["note"] == "Not measured: train, central validation."
    assert charts["Accuracy"]["series"] == []
    assert "Not measured: test, central validation, clients" in page.text
    assert "Not measured: sent up by role." in page.text
    assert "Privacy spent" not in charts


def test_rounds_that_were_not_evaluated_leave_no_gap():
    rows = make_rows()
    for row in rows:
        if row["round"] % 5:
            del row["test_accuracy"]
    assert points(make_charts(rows)[0], "test").keys() == {0, 5, 10, 15, 20}


def test_an_interrupted_run_says_so(save_run):
    page = report_of(save_run(make_rows(rounds=7), status="interrupted"))
    assert "7 of 20, interrupted: 5 warmup, 2 frozen" in page.text


def test_a_killed_run_is_reported_from_its_rows_alone(tmp_path):
    run_dir = save(tmp_path / "2026-01-01", make_rows(rounds=3), None)
    page = report_of(run_dir)
    assert "2026-01-01" in page.text
    assert "not finished, last written" in page.text


def test_zero_rounds(tmp_path):
    rows = make_rows(rounds=0)
    assert "0 of 20" in report_of(save(tmp_path / "one", rows, make_summary(rows))).text
    report_of(save(tmp_path / "none", [], {}))


def test_a_broken_summary_is_refused(tmp_path):
    run_dir = save(tmp_path / "run", make_rows(rounds=1), None)
    (run_dir / "summary.json").write_text("{")
    with pytest.raises(UserError, match=r"summary\.json is damaged \(it is not JSON\)"):
        write_report(run_dir)


def test_a_long_run_with_many_failures_stays_small(save_run):
    rows = make_rows(rounds=100, warmup=20, clients=50)
    for row in rows[1:]:
        row["failures"] = [f"client {i}: " + "no reply within the time limit; " * 4 for i in range(50)]
    assert write_report(save_run(rows)).stat().st_size < 3_000_000


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=8), inner, max_size=2),
    max_leaves=5,
)


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(st.text(max_size=10), json_values, max_size=5),
    st.lists(st.floats(), max_size=4),
)
@pytest.mark.slow
def test_any_configuration_and_any_losses_make_a_page(config, losses):
    rows = [{"round": place, "test_loss": loss} for place, loss in enumerate(losses)]
    page = Page(render(rows, {"config": config}, None, name="run"))
    assert page.charts["Loss"]["title"] == "Loss"


def test_a_running_run_has_no_final_figure(rows):
    summary = make_summary(rows)
    assert "final test accuracy" in render(rows, summary, None, name="run")
    running = render(rows, summary | {"status": "running, last row at 12:00"}, None, name="run")
    assert "latest test accuracy" in running and "final test accuracy" not in running


def test_clients_that_told_nothing_are_counted(rows):
    told = [{**row, "by_client": {"client_val_after": {"3": 0.5, "7": 1 / 3}}} for row in rows]
    summary = make_summary(rows)
    summary["config"]["num_clients"] = 1000
    page = render(told, summary, None, name="run")
    assert "2 of 1000 clients" in page and "998 reported nothing" in page
    assert "0.33<" in page and "0.3333<" not in page.partition("<h2>Clients</h2>")[2].partition("<h2>")[0]
    summary["config"]["num_clients"] = 2
    assert "Every client (2)" in render(told, summary, None, name="run")


def test_beside_a_clients_figures_stands_from_how_many_rows(rows, save_run):
    folder = save_run(rows)
    assert "rows held out" not in run_page(folder)
    sizes = {client: {"name": client, "rows": 10 + int(client), "held_out": int(client)} for client in "0123"}
    (folder / "clients.json").write_text(json.dumps(sizes))
    table = run_page(folder).partition("<h2>Clients</h2>")[2].partition("</table>")[0]
    assert re.findall(r"<th[^>]*>([^<]*)</th>", table)[3] == "rows held out"
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", table.partition("</tr>")[2].partition("</tr>")[0])
    assert cells[0] == "0" and cells[3] == "0"
    (folder / "clients.json").write_text("[1]")  # changed by hand: the page is whole without it
    assert "rows held out" not in run_page(folder)
