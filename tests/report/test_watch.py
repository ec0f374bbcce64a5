"""`report` and `watch`: pages of what is finished and of what is not, on this machine only."""

import json
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.commands.watch import LivePages, make_server

from .comparisons import make_sweep
from .conftest import make_rows, make_summary, save
from .test_page import Page


@contextmanager
def serving(folder):
    with make_server(folder, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))  # seconds between looks
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def get(url, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
        return answer.status, answer.read().decode()


def append(run, rows):
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


# report ---------------------------------------------------------------------------------------------------


def test_report_of_a_run_that_is_going_on(train, capsys):
    run = train("num_rounds=3", "strategy.warmup_rounds=1", "seed=4")
    finished = run.summary
    (run.folder / "manifest.jsonl").unlink()  # what follows would be damage
    (run.folder / "summary.json").unlink()
    lines = (run.folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run.folder / "metrics.jsonl").write_text("".join(lines[:3]))
    capsys.readouterr()
    assert command(["report", str(run.folder)]) == 0
    assert capsys.readouterr().out.strip() == str(run.folder / "report.html")
    page = Page((run.folder / "report.html").read_text())
    assert "2 of 3, not finished, last written" in page.text
    assert finished["command"] in page.text and "dataset.name" in page.text
    assert "fedfrozen on digits with vit_mini" in page.text


def test_the_summary_of_an_earlier_life_is_not_taken_for_this_one(tmp_path):
    rows = make_rows(rounds=4)
    run = save(tmp_path / "run", rows, make_summary(rows[:3], rounds=2, final_test_accuracy=0.123456))
    assert command(["report", str(run)]) == 0
    page = Page((run / "report.html").read_text())
    assert "0.1235" not in page.text
    assert f"{rows[4]['test_accuracy']:.4f}" in page.text


def test_report_of_a_sweep_with_a_run_that_failed_and_one_that_goes_on(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "sweep", seeds=2)
    failed, going = sweep / "8", save(sweep / "9", make_rows(rounds=7), None)
    failed.mkdir()
    (failed / "status.json").write_text(json.dumps({"state": "failed", "reason": "no such data"}))
    assert command(["report", str(sweep)]) == 0
    page = Page((sweep / "comparison.html").read_text())
    assert "failed: no such data" in page.text and "not finished, last written" in page.text
    assert "4 finished runs" in page.text and "2 left out" in page.text
    assert str(going) in page.text


def test_bad_words_end_with_a_sentence(tmp_path, capsys):
    for words, told in (
        (["report", "nowhere"], "There is no run folder nowhere"),
        (["report"], "The following arguments are required: DIR"),
        (["report", str(tmp_path)], "holds no run"),
        (["watch", str(tmp_path), "--port", "x"], "invalid int value"),
        (["watch", "nowhere"], "There is no run folder nowhere"),
        (["watch", str(tmp_path), "--port", "70000"], "Port 70000 cannot be used"),
    ):
        assert command(words) == 2, words
        assert told in capsys.readouterr().err, words


# watch ----------------------------------------------------------------------------------------------------


def test_a_page_is_sent_again_only_when_something_is_new(tmp_path):
    rows = make_rows(rounds=6)
    run = save(tmp_path / "run", rows[:3], None)
    with serving(run) as url:
        status, html = get(url + "/")
        version = html.split('data-version="')[1].split('"')[0]
        assert status == 200 and "connect-src 'self'" in html
        assert get(f"{url}/?after={version}") == (204, "")
        append(run, rows[3:5])
        status, html = get(f"{url}/?after={version}")
        assert status == 200 and "Every round (5 rows)" in html


def test_a_sweep_leads_to_its_runs_and_to_nothing_else(tmp_path):
    sweep = make_sweep(tmp_path / "a sweep", seeds=1)
    outside = save(tmp_path / "outside", make_rows(rounds=1), None)
    with serving(sweep) as url:
        assert 'href="/run/0"' in get(url + "/")[1]
        assert "fedavg on digits" in get(url + "/run/0")[1]
        for path in (
            "/run/../outside",
            "/run/%2e%2e/outside",
            f"/run{outside}",
            "/run/7",
            "/x",
            "/metrics.jsonl",
        ):
            with pytest.raises(urllib.error.HTTPError) as refused:
                get(url + path)
            assert refused.value.code == 404


def test_only_this_machine_is_answered_and_only_by_its_name(tmp_path):
    with serving(save(tmp_path / "run", make_rows(rounds=1), None)) as url:
        port = int(url.rpartition(":")[2])
        assert get(url + "/", Host=f"localhost:{port}")[0] == 200
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(url + "/", Host=f"elsewhere.example:{port}")
        assert refused.value.code == 403
        for _, _, _, _, address in socket.getaddrinfo(socket.gethostname(), port, socket.AF_INET):
            if not address[0].startswith("127."):
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection(address, timeout=5)


def test_a_page_is_made_once_for_all_who_look(tmp_path):
    run = save(tmp_path / "run", make_rows(rounds=1), None)
    watched = LivePages(run)
    assert watched.page("/", "") is watched.page("/", "")


@pytest.mark.slow
def test_an_open_page_grows_and_keeps_what_was_hidden(tmp_path, visit):
    rows = make_rows(rounds=9)
    folder = tmp_path / "run"
    folder.mkdir()
    with serving(folder) as url:
        page = visit(url + "/")
        assert "No run here yet" in page.text_content("h1")
        save(folder, rows[:4], None)
        page.wait_for_selector("#chart-0 .legend button", timeout=15_000)
        page.locator("#chart-0 .legend button").first.click()
        page.get_by_text("Every round").click()
        append(folder, rows[4:])
        page.wait_for_selector("text=Every round (10 rows)", timeout=15_000)
        assert page.locator("#chart-0 svg path").count() == 3
        assert page.locator("#chart-0 .legend button").first.get_attribute("aria-pressed") == "false"
        assert page.get_by_text("kernel drift").is_visible()  # still unfolded
        assert {address.split("?")[0] for address in page.asked} == {url + "/"}
    page.close()


def test_control_c_ends_it_cleanly(tmp_path, capsys):
    run = save(tmp_path / "run", make_rows(rounds=1), None)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answers = []

    def look_then_interrupt():
        for _ in range(100):
            try:
                answers.append(get(f"http://127.0.0.1:{port}/")[0])
                break
            except urllib.error.URLError:
                time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    hand = threading.Thread(target=look_then_interrupt)
    hand.start()
    try:
        assert command(["watch", str(run), "--port", str(port)]) == 0
    finally:
        hand.join()
        signal.signal(signal.SIGINT, before)
    out = capsys.readouterr().out
    assert answers == [200]
    assert f"http://127.0.0.1:{port}/" in out and out.endswith("Stopped watching.\n")
