"""Lines of the log as JSON: site, run and round in each, and neither secrets nor rows."""

import io
import json
import logging
import os
import subprocess
import sys
import threading

import pytest

from fedfrozen_app.core import logs
from fedfrozen_app.core.logs import JsonLine, OneLine, about, hide, learn, logs_of

ROW = "Ada Lovelace, 1815-12-10, C50.9"
KEY = "-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0w\n-----END PRIVATE KEY-----"


@pytest.fixture
def lines(monkeypatch):
    """What a logger of ours writes, read back."""
    monkeypatch.setattr(logs, "_process", {})
    monkeypatch.setattr(logs, "_secrets", set())
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLine())
    logger = logging.getLogger("fedfrozen_app.tested")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield logger, lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    logger.removeHandler(handler)


def test_what_a_line_is_about(lines):
    log, read = lines
    log.info("before")
    logs_of(site="north")
    with about(run="r1"):
        learn(round=3)
        log.warning("in %s", "round")
        other = threading.Thread(target=log.info, args=("another thread",))
        other.start()
        other.join()
    log.info("after")
    found = [(line["message"], line["site"], line["run"], line["round"]) for line in read()]
    assert found == [
        ("before", None, None, None),
        ("in round", "north", "r1", 3),
        ("another thread", "north", None, None),
        ("after", "north", None, None),
    ]
    assert read()[1]["level"] == "warning" and read()[1]["time"].endswith("+00:00")


def test_concurrent_runs_keep_their_own(lines):
    log, read = lines
    barrier = threading.Barrier(2)

    def run(name):
        with about(run=name):
            barrier.wait(10)
            log.info(name)

    threads = [threading.Thread(target=run, args=(name,)) for name in ("a", "b")]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert all(line["run"] == line["message"] for line in read()) and len(read()) == 2


def test_an_exception_s_text_may_quote_a_row_and_is_left_out(lines):
    log, read = lines
    try:
        try:
            raise ValueError(f"cannot read the row {ROW}")
        except ValueError as error:
            raise KeyError(ROW) from error
    except KeyError:
        log.exception("A message could not be answered.")
    (line,) = read()
    assert line["error"] == ["KeyError", "ValueError"] and "test_logs.py" in line["stack"][0]
    assert ROW not in json.dumps(line) and "Lovelace" not in json.dumps(line)


SECRETS = (
    KEY,
    KEY.partition("\n-----END")[0],  # cut short
    "postgresql://reader:hunter2pass@db/x",
    "the words: agreed words of all",
)


@pytest.mark.parametrize("text", SECRETS)
@pytest.mark.parametrize("formatter", [OneLine(), JsonLine()])
def test_secrets_are_hidden_whoever_writes_them(monkeypatch, formatter, text):
    monkeypatch.setattr(logs, "_secrets", set())
    hide(b"agreed words of all")
    record = logging.LogRecord("x", logging.INFO, "", 0, "it holds %s", (text,), None)
    line = formatter.format(record)
    assert "[hidden]" in line
    for secret in ("MIGHAg", "hunter2pass", "agreed words"):
        assert secret not in line


def test_a_line_is_one_line_and_nothing_a_terminal_obeys(lines):
    log, read = lines
    log.info("two\nlines \x1b[31m \u202e")
    assert read()[0]["message"] == "two\\nlines \\x1b[31m \\u202e"


@pytest.mark.slow
def test_a_whole_run_writes_json_and_nothing_else(tmp_path):
    words = ["dataset=digits", "num_rounds=2", "num_clients=2", "dataset.limit=80", "partition.min_size=4"]
    done = subprocess.run(
        [sys.executable, "-m", "fedfrozen_app", *words, "run_id=told", f"output_dir={tmp_path / 'run'}"],
        env=os.environ | {"FEDFROZEN_LOG": "json"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stderr.splitlines()]
    assert found and all({"site", "run", "round", "message"} <= line.keys() for line in found)
    rounds = [line for line in found if line["message"].startswith("round ")]
    assert [line["round"] for line in rounds][-2:] == [1, 2] and rounds[-1]["run"] == "told"


def test_an_unknown_format_is_one_sentence():
    done = subprocess.run(
        [sys.executable, "-m", "fedfrozen_app", "list"],
        env=os.environ | {"FEDFROZEN_LOG": "xml"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert (
        done.stderr.strip()
        == "fedfrozen: FEDFROZEN_LOG=xml is no format of the logs: set it to text, or to json."
    )
