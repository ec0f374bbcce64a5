"""The file of traces: one OTLP request in JSON per line. Imported only where OpenTelemetry is installed."""

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import IdGenerator, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from fedfrozen_app.core.trace_names import NUMBERS, SPANS

log = logging.getLogger(__name__)


class TraceFile(SpanExporter):
    """Appends to a file that only this account reads. A disk that is full costs traces, and no round."""

    def __init__(self, path: Path) -> None:
        self.path, self._warned = path, False
        self._append("")

    def _append(self, text: str) -> None:
        place = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(place, "a") as file:
            file.write(text)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            self._append(as_otlp(spans) + "\n")
        except OSError as error:
            if not self._warned:
                log.warning("Traces cannot be written to %s (%s): rounds go on without.", self.path, error)
            self._warned = True
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS


class RoundIds(IdGenerator):
    """For the one span whose ids are made of run and round."""

    def __init__(self, trace: int, span: int) -> None:
        self._trace, self._span = trace, span

    def generate_trace_id(self) -> int:
        return self._trace

    def generate_span_id(self) -> int:
        return self._span


def as_otlp(spans: Sequence[Any]) -> str:
    """Spans as one line of OTLP in JSON. Only what is declared is written, whatever a span holds."""
    service = str(spans[0].resource.attributes["service.name"])
    return json.dumps(
        {
            "resourceSpans": [
                {
                    "resource": {"attributes": [_attribute("service.name", {"stringValue": service})]},
                    "scopeSpans": [
                        {
                            "scope": {"name": "fedfrozen"},
                            "spans": [_plain(one) for one in spans if one.name in SPANS],
                        }
                    ],
                }
            ]
        }
    )


def _plain(one: Any) -> dict[str, Any]:
    found = {
        "traceId": f"{one.context.trace_id:032x}",
        "spanId": f"{one.context.span_id:016x}",
        "name": one.name,
        "kind": 1,
        "startTimeUnixNano": str(one.start_time),
        "endTimeUnixNano": str(one.end_time),
        "attributes": [
            _attribute(key, _number(one.attributes[key]))
            for key in sorted(NUMBERS)
            if isinstance(one.attributes.get(key), int | float)
        ],
    }
    return found if one.parent is None else found | {"parentSpanId": f"{one.parent.span_id:016x}"}


def _attribute(key: str, value: dict[str, Any]) -> dict[str, Any]:
    return {"key": key, "value": value}


def _number(value: float) -> dict[str, Any]:
    return {"intValue": str(value)} if isinstance(value, int) else {"doubleValue": value}
