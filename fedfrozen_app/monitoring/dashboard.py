"""The Grafana dashboard of the kits: `python -m fedfrozen_app.monitoring.dashboard` writes it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "sites" / "monitoring" / "dashboard.json"
WIDTH, HIGH = 8, 7  # of a panel, in Grafana's grid of 24 columns
SOURCE = {"type": "prometheus", "uid": "${source}"}


@dataclass(frozen=True)
class Panel:
    title: str
    queries: Sequence[tuple[str, str]]  # (PromQL, legend)
    unit: str = "short"  # as Grafana calls it
    kind: str = "timeseries"


SERVER = (
    Panel("Alerts", [('ALERTS{alertstate="firing"}', "{{alertname}} {{site}}{{part}}")], kind="table"),
    Panel("Sites connected", [("fedfrozen_server_site_online", "{{site}}")], kind="stat"),
    Panel("Silent since", [("fedfrozen_server_site_silence_seconds", "{{site}}")], "s"),
    Panel("Sites, as the run sees them", [("fedfrozen_run_site == 1", "{{site}} {{state}}")], kind="table"),
    Panel("Rounds", [("fedfrozen_run_round", "{{run}}"), ("fedfrozen_run_rounds", "{{run}}: all")]),
    Panel("Seconds a minute, by phase", [("rate(fedfrozen_run_seconds_total[1m]) * 60", "{{phase}}")], "s"),
    Panel("Bytes a second, all sites", [("rate(fedfrozen_run_bytes_total[1m])", "{{way}}")], "Bps"),
    Panel("Replies of the last round", [("fedfrozen_run_last_replies", "{{run}} {{state}}")]),
    Panel("Runs that wait or run", [("fedfrozen_server_runs", "{{state}}")]),
)
SITE = (
    Panel("Processes", [("fedfrozen_site_up", "{{party}} {{part}}")], kind="stat"),
    Panel("Nothing done for", [("fedfrozen_site_stalled_seconds", "{{party}} {{part}}")], "s"),
    Panel("Waiting for approval", [("fedfrozen_site_waiting_approvals", "{{party}}")], kind="stat"),
    Panel("Seconds by phase", [("rate(fedfrozen_site_seconds_total[5m])", "{{party}} {{phase}}")], "s"),
    Panel("Replies", [("fedfrozen_site_replies_total", "{{party}} {{state}}")]),
    Panel("Bytes a second", [("rate(fedfrozen_site_bytes_total[1m])", "{{party}} {{way}}")], "Bps"),
    Panel(
        "Epsilon",
        [
            ("fedfrozen_site_epsilon_spent", "{{party}} spent"),
            ("fedfrozen_site_epsilon_left", "{{party}} left"),
        ],
    ),
    Panel("Delay of the link", [("fedfrozen_site_link_delay_seconds", "{{party}}")], "s"),
    Panel("Clock against the server's", [("fedfrozen_site_clock_offset_seconds", "{{party}}")], "s"),
)
MACHINE = (
    Panel("Disk free", [("fedfrozen_disk_free_bytes", "{{party}} {{folder}}")], "bytes"),
    Panel("Memory available", [("fedfrozen_memory_available_bytes", "{{party}}")], "bytes"),
    Panel("GPUs busy", [("fedfrozen_gpu_busy_ratio", "{{party}} {{gpu}}")], "percentunit"),
    Panel("Certificates end in", [("fedfrozen_certificate_seconds", "{{holder}}")], "s", kind="stat"),
)
ROWS = {"Server and runs": SERVER, "Site": SITE, "Machine": MACHINE}


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    top = 0
    for title, group in ROWS.items():
        panels.append({"type": "row", "title": title, "gridPos": _place(0, top, 24, 1), "panels": []})
        for number, panel in enumerate(group):
            left, below = number % 3 * WIDTH, top + 1 + number // 3 * HIGH
            panels.append(_panel(panel, _place(left, below, WIDTH, HIGH)))
        top += 1 + (len(group) + 2) // 3 * HIGH
    for number, one in enumerate(panels, 1):
        one["id"] = number
    source = {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    return {
        "title": "fedfrozen",
        "uid": "fedfrozen",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source]},
        "panels": panels,
    }


def _panel(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    instant = panel.kind == "table"
    return {
        "type": panel.kind,
        "title": panel.title,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": None if "Clock" in panel.title else 0}},
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": SOURCE,
                "expr": query,
                "legendFormat": legend,
                "instant": instant,
                **({"format": "table"} if instant else {}),
            }
            for number, (query, legend) in enumerate(panel.queries)
        ],
    }


def _place(left: int, top: int, width: int, high: int) -> dict[str, int]:
    return {"x": left, "y": top, "w": width, "h": high}


def generate() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(generate(), encoding="utf-8")
