"""What benchmarks/deployment.py measured of codecs over a slow link: the table of docs/codecs.md."""

import json
import statistics
from pathlib import Path
from typing import Any

from cells import table

NAME = "deployment_codecs.json"


class CodedLink:
    def __init__(self, folder: Path) -> None:
        path = folder / NAME
        self.found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def text(self) -> str:
        if not self.found:
            return "Not measured yet."
        return f"On a link of {self.found['mbit']:g} Mbit/s, for all sites together:\n\n{self.tables()}"

    def tables(self) -> str:
        plain = self.found["codecs"]["float32"]
        lines = []
        for name, own in self.found["codecs"].items():
            share = (own["bytes_up"] + own["bytes_down"]) / (plain["bytes_up"] + plain["bytes_down"])
            sizes = (f"{own[way] / 1e6:.2f}" for way in ("bytes_up", "bytes_down"))
            seconds = statistics.median(own["seconds"])
            lines.append([name, f"{seconds:.1f}", *sizes, f"{share:.2f}"])
        return table(["codec", "seconds a round", "MB up", "MB down", "of float32"], lines)
