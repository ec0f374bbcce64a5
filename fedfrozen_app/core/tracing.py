"""Traces of rounds for OpenTelemetry, off unless FEDFROZEN_TRACES names a file.

    FEDFROZEN_TRACES=traces.jsonl     one OTLP request in JSON per line, as OpenTelemetry's collector reads it

A round is one trace. The server and each site make its id themselves, of the run's id and the round's number:
nothing else is exchanged for this, and neither names spans of the other. A span holds its name and
numbers; both must be declared here. It records no exception, whose text may quote a row.
"""

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.trace_names import NUMBERS, SPANS

VARIABLE = "FEDFROZEN_TRACES"
SERVICES = ("server", "site")
MOST_ROUNDS = 10**9

_tracer: Any = None


def trace_ids(run: str, number: int) -> tuple[int, int]:
    """(of the trace, of the server's span) of one round, the same at the server and at each site."""
    found = hashlib.sha256(f"fedfrozen trace\n{number}\n{run}".encode()).digest()
    return int.from_bytes(found[:16]) or 1, int.from_bytes(found[16:24]) or 1


def start_tracing(service: str, exporter: Any = None) -> None:
    """Start tracing, once per process; does nothing without the variable or an exporter."""
    global _tracer
    path = os.environ.get(VARIABLE, "")
    if service not in SERVICES:
        raise ValueError(f"{service} is no part of a federation that traces")
    if exporter is None and not path:
        return
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider, sampling
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor

        from fedfrozen_app.core.trace_file import TraceFile
    except ImportError as error:
        raise UserError(
            f"{VARIABLE} needs OpenTelemetry, which is not installed: pip install 'fedfrozen[tracing]', or "
            f"unset {VARIABLE}."
        ) from error
    try:
        found = exporter or TraceFile(Path(path))
    except OSError as error:
        raise UserError(
            f"Traces cannot be written to {path} ({error}): set {VARIABLE} to another file."
        ) from error
    resource = Resource({"service.name": f"fedfrozen-{service}"})  # not what the environment says of itself
    provider = TracerProvider(resource=resource, sampler=sampling.ALWAYS_ON)
    provider.add_span_processor(SimpleSpanProcessor(found))
    _tracer = provider.get_tracer("fedfrozen")


def stop_tracing() -> None:
    global _tracer
    _tracer = None


def checked(name: str, numbers: dict[str, float]) -> None:
    """`ValueError` for an undeclared name or number: spans contain nothing else."""
    if name not in SPANS:
        raise ValueError("this is no span's name")
    for key, value in numbers.items():
        if key not in NUMBERS or isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"span {name}: it holds a number that is not declared, or no number")


def is_tracing() -> bool:
    return _tracer is not None


@contextmanager
def round_span(name: str, run: str | None, number: int | None, began: int | None = None) -> Iterator[None]:
    """A site's part of a round, or a part of that. `began`: nanoseconds since 1970, if it began before the
    block. Without a run or a round, as in a hello, nothing is recorded."""
    if _tracer is None or run is None or number is None or not 0 <= number < MOST_ROUNDS:
        yield
        return
    context = None if _is_within_a_span() else _round_context(run, number)
    with _started(name, context, began, {"round": number}):
        yield


@contextmanager
def span(name: str) -> Iterator[None]:
    """A child of this thread's current span; without one, nothing is recorded."""
    if _tracer is None or not _is_within_a_span():
        yield
        return
    with _started(name, None, None, {}):
        yield


def add_span(name: str, began: int) -> None:
    """Add a child span that has just ended to this thread's current span."""
    if _tracer is not None and _is_within_a_span():
        checked(name, {})
        _tracer.start_span(name, start_time=began).end()


def record_round(run: str, number: int, seconds: dict[str, float], numbers: dict[str, float]) -> None:
    """The server's part of a round that has just ended. `train` and `aggregate` alternate in a round, and are
    drawn one after another, each as long as it took in all."""
    if _tracer is None:
        return
    numbers = numbers | {"round": number}
    checked("round", numbers)
    end = time.time_ns()
    spent = {name: int(1e9 * seconds.get(name, 0.0)) for name in ("total", "train", "aggregate", "evaluate")}
    began = end - spent["total"]
    whole = _server_span(run, number, began, numbers)
    at = began
    for name in ("train", "aggregate"):
        _child(name, whole, at, at + spent[name])
        at += spent[name]
    _child("evaluate", whole, end - spent["evaluate"], end)
    whole.end(end)


def _round_context(run: str, number: int) -> Any:
    from opentelemetry import trace

    ids = trace_ids(run, number)
    sampled = trace.TraceFlags(trace.TraceFlags.SAMPLED)
    return trace.set_span_in_context(
        trace.NonRecordingSpan(trace.SpanContext(*ids, is_remote=True, trace_flags=sampled))
    )


def _is_within_a_span() -> bool:
    from opentelemetry import trace

    return trace.get_current_span().is_recording()


@contextmanager
def _started(name: str, context: Any, began: int | None, numbers: dict[str, float]) -> Iterator[None]:
    checked(name, numbers)
    with _tracer.start_as_current_span(
        name,
        context=context,
        start_time=began,
        attributes=numbers,
        record_exception=False,
        set_status_on_exception=False,
    ):
        yield


def _server_span(run: str, number: int, began: int, numbers: dict[str, float]) -> Any:
    from opentelemetry.context import Context

    from fedfrozen_app.core.trace_file import RoundIds

    usual = _tracer.id_generator
    _tracer.id_generator = RoundIds(*trace_ids(run, number))
    try:
        return _tracer.start_span("round", context=Context(), start_time=began, attributes=numbers)
    finally:
        _tracer.id_generator = usual


def _child(name: str, parent: Any, began: int, end: int) -> None:
    from opentelemetry import trace

    context = trace.set_span_in_context(parent)
    _tracer.start_span(name, context=context, start_time=began).end(max(began, end))
