"""The panels of the dashboard, from a Prometheus: `python -m tests.chaos.panels DATA.json OUT.png`."""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from fedfrozen_app.monitoring.dashboard import ROWS
from tests.chaos.alerting import Prometheus

STEP = 5  # seconds
COLUMNS, WIDTH, HIGH = 3, 4.4, 2.1  # inches of a panel


def ask(prometheus: Prometheus, since: float) -> list[dict[str, Any]]:
    """Every query of the dashboard over this time."""
    found = []
    for panels in ROWS.values():
        for panel in panels:
            series = []
            for query, legend in panel.queries:
                span = {"query": query, "start": since, "end": time.time(), "step": STEP}
                for one in prometheus.get(f"/api/v1/query_range?{urlencode(span)}")["result"]:
                    name = legend
                    for key, value in one["metric"].items():
                        name = name.replace("{{" + key + "}}", value)
                    series.append({"name": name.partition("{{")[0].strip(), "values": one["values"]})
            found.append({"title": panel.title, "unit": panel.unit, "series": series})
    return found


def draw(panels: list[Mapping[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [panel for panel in panels if panel["series"]]
    rows = -(-len(shown) // COLUMNS)
    figure, axes = plt.subplots(rows, COLUMNS, figsize=(COLUMNS * WIDTH, rows * HIGH), layout="constrained")
    begin = min(float(one["values"][0][0]) for panel in shown for one in panel["series"])
    for place in axes.flat[len(shown) :]:
        place.axis("off")
    for panel, place in zip(shown, axes.flat, strict=False):
        for one in panel["series"][:8]:
            times = [(float(moment) - begin) / 60 for moment, _ in one["values"]]
            values = [float(value) for _, value in one["values"]]
            place.plot(times, values, ".-", lw=1.2, ms=1.5, label=one["name"])
        unit = "" if panel["unit"] == "short" else f" ({panel['unit']})"
        place.set_title(f"{panel['title']}{unit}", fontsize=9)
        place.legend(fontsize=5, loc="upper left", framealpha=0.6)
        place.tick_params(labelsize=6)
        place.set_xlim(left=0)
    figure.supxlabel("minutes", fontsize=8)
    figure.savefig(path, dpi=100)


def main() -> None:
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
