"""Traces of rounds: one id on all sides, numbers and declared names, and nothing that anybody wrote."""

import json
import re
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedfrozen_app.core import tracing
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.trace_names import NUMBERS, SPANS

pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed (extra tracing)")

# Keys of the format; everything else is a declared name, or digits.
FORMAT = {
    *(
        "resourceSpans",
        "resource",
        "attributes",
        "key",
        "value",
        "stringValue",
        "scopeSpans",
        "scope",
        "name",
    ),
    *("spans", "traceId", "spanId", "parentSpanId", "kind", "startTimeUnixNano", "endTimeUnixNano"),
    *("intValue", "doubleValue", "service.name", "fedfrozen-site", "fedfrozen-server", "fedfrozen"),
}
KNOWN = FORMAT | SPANS | NUMBERS
ID = re.compile(r"[0-9a-f]{16}|[0-9a-f]{32}|[0-9]{1,20}")
each = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def traced(tmp_path, monkeypatch):
    """The spans in the file, once something was done as a site or a server."""

    def start(service="site"):
        path = tmp_path / f"{service}.jsonl"
        path.unlink(missing_ok=True)
        monkeypatch.setenv(tracing.VARIABLE, str(path))
        tracing.start_tracing(service)
        return lambda: spans_of(path.read_text())

    yield start
    tracing.stop_tracing()


def spans_of(text: str) -> list[dict]:
    found = []
    for line in text.splitlines():
        for resource in json.loads(line)["resourceSpans"]:
            found += [span for scope in resource["scopeSpans"] for span in scope["spans"]]
    return found


def words_of(plain: object) -> set[str]:
    """Every text of a JSON value, keys included."""
    if isinstance(plain, dict):
        return set().union(*({key} | words_of(value) for key, value in plain.items()))
    if isinstance(plain, list):
        return set().union(*map(words_of, plain))
    return {plain} if isinstance(plain, str) else set()


def undeclared(text: str) -> set[str]:
    """Texts of a file of traces that are no declared name, no id and no number."""
    words = set().union(*(words_of(json.loads(line)) for line in text.splitlines()))
    return {word for word in words - KNOWN if not ID.fullmatch(word)}


def test_without_the_variable_nothing_is_recorded(monkeypatch, tmp_path):
    monkeypatch.delenv(tracing.VARIABLE, raising=False)
    tracing.start_tracing("site")
    with tracing.round_span("task", "run", 1), tracing.span("trained"):
        tracing.add_span("receive", 0)
    tracing.record_round("run", 1, {"total": 1.0}, {})
    assert not tracing.is_tracing() and list(tmp_path.iterdir()) == []


def test_a_round_is_one_trace_without_a_word_between_server_and_site(traced):
    spans = traced("site")
    began = time.time_ns() - 10**9
    with tracing.round_span("task", "heart-2", 3, began):
        tracing.add_span("receive", began)
        with tracing.round_span("request", "heart-2", 3), tracing.span("trained"):
            pass
    site = {one["name"]: one for one in spans()}
    spans = traced("server")
    seconds = {"total": 2.0, "train": 1.0, "aggregate": 0.25, "evaluate": 0.5}
    tracing.record_round("heart-2", 3, seconds, {"clients_ok": 2, "bytes_up": 10})
    server = {one["name"]: one for one in spans()}
    trace, parent = tracing.trace_ids("heart-2", 3)
    assert {one["traceId"] for one in (*site.values(), *server.values())} == {f"{trace:032x}"}
    assert server["round"]["spanId"] == f"{parent:016x}" == site["task"]["parentSpanId"]
    assert "parentSpanId" not in server["round"]
    assert {site[name]["parentSpanId"] for name in ("receive", "request")} == {site["task"]["spanId"]}
    assert site["trained"]["parentSpanId"] == site["request"]["spanId"]
    assert int(site["task"]["startTimeUnixNano"]) == began
    long = {name: nanoseconds(one) for name, one in server.items()}
    assert long == {"round": 2 * 10**9, "train": 10**9, "aggregate": 25 * 10**7, "evaluate": 5 * 10**8}
    assert server["evaluate"]["endTimeUnixNano"] == server["round"]["endTimeUnixNano"]
    numbers = {one["key"]: one["value"] for one in server["round"]["attributes"]}
    assert numbers == {
        name: {"intValue": text} for name, text in (("round", "3"), ("clients_ok", "2"), ("bytes_up", "10"))
    }
    with tracing.round_span("task", "heart-2", 4):
        pass
    assert spans()[-1]["traceId"] != f"{trace:032x}"


def nanoseconds(span: dict) -> int:
    return int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"])


@each
@given(st.text(min_size=1, max_size=40), st.integers(0, 10**8), st.text(min_size=1, max_size=40))
def test_no_text_of_anybody_is_in_a_span(traced, tmp_path, run, number, secret):
    """The run's id, an exception's text, paths and names of the site."""
    spans = traced("site")
    with (
        pytest.raises(ValueError),
        tracing.round_span("task", run, number),
        tracing.round_span("request", run, number),
        tracing.span("trained"),
    ):
        raise ValueError(f"{secret} in {tmp_path}")
    assert [one["name"] for one in spans()] == ["trained", "request", "task"]
    assert undeclared((tmp_path / "site.jsonl").read_text()) == set()


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("north", {}),
        ("", {}),
        ("task", {"rows": 3}),
        ("task", {"round": "north"}),
        ("task", {"round": True}),
        ("task", {"round": None}),
    ],
)
def test_what_is_not_declared_is_refused(name, numbers):
    with pytest.raises(ValueError) as refused:
        tracing.checked(name, numbers)
    assert "north" not in str(refused.value)


def test_a_span_of_another_library_is_not_ours(traced):
    """An attribute or an event that gets into a span in another way is not written."""
    from opentelemetry import trace

    spans = traced("site")
    with tracing.round_span("task", "run", 1):
        trace.get_current_span().set_attribute("path", "/data/xrays")
        trace.get_current_span().add_event("patient p7")
    with trace.get_tracer("other").start_as_current_span("SELECT * FROM people"):
        pass
    assert [one["name"] for one in spans()] == ["task"]
    assert "xrays" not in json.dumps(spans()) and "p7" not in json.dumps(spans())


@pytest.mark.parametrize(("run", "number"), [(None, 1), ("run", None), ("run", -1), ("run", 10**9)])
def test_a_message_without_a_round_has_no_span(traced, run, number):
    spans = traced("site")
    with tracing.round_span("task", run, number), tracing.span("trained"):
        pass
    assert spans() == []


def test_the_file_is_this_account_s_alone_and_a_full_disk_costs_no_round(traced, tmp_path, caplog):
    traced("site")
    path = tmp_path / "site.jsonl"
    assert path.stat().st_mode & 0o777 == 0o600
    path.unlink()
    path.mkdir()  # what cannot be written to
    for _ in range(2):
        with tracing.round_span("task", "run", 1):
            pass
    assert caplog.text.count("rounds go on without") == 1


def test_a_file_that_cannot_be_written_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setenv(tracing.VARIABLE, str(tmp_path / "nowhere" / "traces.jsonl"))
    with pytest.raises(UserError, match="set FEDFROZEN_TRACES to another file"):
        tracing.start_tracing("site")
    assert not tracing.is_tracing()
