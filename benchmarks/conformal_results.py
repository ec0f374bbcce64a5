"""What the pages state of benchmarks/conformal.py, computed from its rows."""

import statistics
from pathlib import Path
from typing import Any

from cells import read, table

DATA = ("digits", "cifar10", "mtsamples")
NAME = "conformal.jsonl"
STATED, WITHIN = 0.9, 0.01


class Conformal:
    def __init__(self, folder: Path) -> None:
        self.rows = read(folder / NAME)

    def of(self, data: str) -> list[dict[str, Any]]:
        return sorted((row for row in self.rows if row["data"] == data), key=lambda row: row["split"])

    def coverage(self, data: str) -> float:
        """The mean over the splits, of all clients' rows together."""
        return statistics.fmean(row["covered"] / row["rows"] for row in self.of(data))

    @property
    def measured(self) -> list[str]:
        return [data for data in DATA if self.of(data)]

    @property
    def within(self) -> list[str]:
        """The data whose mean coverage is the stated one, by a point."""
        return [data for data in self.measured if abs(self.coverage(data) - STATED) <= WITHIN]

    def overview(self) -> str:
        head = ["data", "accuracy", "held out", "splits", "covered, mean", "least to most", "set size"]
        lines = []
        for data in self.measured:
            rows = self.of(data)
            shares = [row["covered"] / row["rows"] for row in rows]
            lines.append(
                [
                    data,
                    f"{rows[0]['accuracy']:.3f}",
                    f"{rows[0]['calibration_rows'] + rows[0]['rows']:,}",
                    str(len(rows)),
                    f"{100 * self.coverage(data):.1f} %",
                    f"{100 * min(shares):.1f} to {100 * max(shares):.1f} %",
                    f"{statistics.fmean(row['size'] for row in rows):.2f}",
                ]
            )
        return table(head, lines)

    def by_client(self, data: str) -> dict[str, float]:
        """The share of each client's rows that are covered, over all splits; the least covered first."""
        sums: dict[str, list[int]] = {}
        for row in self.of(data):
            for client, (count, covered) in row["clients"].items():
                own = sums.setdefault(client, [0, 0])
                own[0] += count
                own[1] += covered
        found = {client: covered / count for client, (count, covered) in sums.items() if count}
        return dict(sorted(found.items(), key=lambda item: item[1]))

    def clients(self) -> str:
        """By client, the least covered first."""
        lines = [
            [data, *(f"{100 * share:.0f} %" for share in self.by_client(data).values())]
            for data in self.measured
        ]
        width = max((len(line) for line in lines), default=1)
        head = ["data", *(str(number) for number in range(1, width))]
        return table(head, [[*line, *[""] * (width - len(line))] for line in lines])

    def worst(self, other: str, number: str) -> float:
        """The largest difference of this number from the `central` or `masked` rule, of any split."""
        return max(row[other][number] for row in self.rows)

    def off(self, other: str, number: str) -> str:
        value = self.worst(other, number)
        return "0" if value == 0 else f"{value:.0e}"

    @property
    def sums(self) -> str:
        counts = [row["masked"]["sums"] for row in self.rows]
        return f"{min(counts)} to {max(counts)}"
