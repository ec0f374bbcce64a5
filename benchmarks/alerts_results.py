"""What docs/monitoring.md states of `python -m tests.chaos.twelve_alerts`, from its rows."""

from pathlib import Path

from cells import read

NAME = "twelve_alerts.jsonl"


class TwelveAlerts:
    def __init__(self, folder: Path) -> None:
        self.rows = read(folder / NAME)

    def slowest(self, what: str) -> str:
        """`fired`: seconds after the fault; `cleared`: after its repair."""
        worst = max(self.rows, key=lambda row: float(row[what]))
        return f"{worst[what]:.0f} s ({worst['fault']})"
