"""What the pages state of benchmarks/text_baselines.py, computed from its rows."""

import statistics
from pathlib import Path
from typing import Any

from cells import read, table

DATA = ("trec", "ohsumed", "ncbi", "bc5cdr")
NAME = "text_baselines.jsonl"
PLAIN = {  # the model of a row, and what the table calls it
    "TF-IDF and logistic regression": "TF-IDF",
    "a dictionary of the train rows' words": "dictionary",
    "logistic regression on words and their neighbours": "logistic",
    "conditional random field": "CRF",
}
SCRATCH = {"scratch": "", "chunks": "in chunks "}
NOTHING = "the most frequent class"
WEAK = "TF-IDF and logistic regression, C=1"  # what the baseline of this package was before


class TextBaselines:
    weak = WEAK

    def __init__(self, folder: Path) -> None:
        self.rows = read(folder / NAME)

    def of(self, data: str, model: str) -> list[dict[str, Any]]:
        found = [row for row in self.rows if (row["data"], row["model"]) == (data, model)]
        return sorted(found, key=lambda row: row.get("seed", 0))

    def models(self, data: str) -> list[str]:
        return list(dict.fromkeys(row["model"] for row in self.rows if row["data"] == data))

    def score(self, data: str, model: str) -> float:
        """The mean over the seeds."""
        return statistics.fmean(row["score"] for row in self.of(data, model))

    def best_plain(self, data: str) -> float:
        return max(self.score(data, model) for model in self.models(data) if model in PLAIN)

    def ahead(self, arm: str) -> list[str]:
        """The data on which the mean of this arm is above the best plain model."""
        return [data for data in DATA if self.of(data, arm) and self.score(data, arm) > self.best_plain(data)]

    def behind(self, arm: str) -> list[str]:
        return [data for data in DATA if self.of(data, arm) and data not in self.ahead(arm)]

    def seeds(self, arm: str) -> str:
        """Where there are several, the range of their scores."""
        several = {data: [row["score"] for row in self.of(data, arm)] for data in DATA}
        ranges = [f"{d} {min(v):.3f} to {max(v):.3f}" for d, v in several.items() if len(v) > 1]
        alone = "" if len(ranges) == len(DATA) else "One seed" + (" elsewhere." if ranges else " each.")
        return f"Over seeds: {', '.join(ranges)}. {alone}".strip() if ranges else alone

    def cut(self, data: str, model: str) -> str:
        """The share of the texts whose end is not read, in percent."""
        splits = self.of(data, model)[0]["texts"]["splits"].values()
        return f"{100 * sum(one['cut'] for one in splits) / sum(one['texts'] for one in splits):.0f}"

    def minutes(self, data: str, model: str) -> str:
        return f"{statistics.median(row['seconds'] for row in self.of(data, model)) / 60:.0f}"

    def _cell(self, data: str, names: dict[str, str]) -> str:
        return "<br>".join(
            f"{name} {self.score(data, model):.3f}".strip()
            for model, name in names.items()
            if self.of(data, model)
        )

    def overview(self) -> str:
        head = ["data", "metric", "train rows", "reading nothing", "plain models", "from scratch", "MiniLM"]
        shown = head if any(self.of(data, "minilm") for data in DATA) else head[:-1]
        lines = []
        for data in DATA:
            classes = bool(self.of(data, NOTHING))
            rows = next(row["train_rows"] for row in self.rows if row["data"] == data)
            own = [data, "accuracy" if classes else "entity F1", f"{rows:,}"]
            own += [f"{self.score(data, NOTHING):.3f}" if classes else "0"]
            own += [self._cell(data, names) for names in (PLAIN, SCRATCH, {"minilm": ""})]
            lines.append([cell or "not run" for cell in own][: len(shown)])
        return table(shown, lines)

    def every_seed(self) -> str:
        """A line for each model, for the benchmark's own table."""
        lines = []
        for data in DATA:
            for model in self.models(data):
                own = self.of(data, model)
                scores = ", ".join(f"{row['score']:.3f}" for row in own)
                seconds = f"{statistics.median(row['seconds'] for row in own):,.0f}"
                lines.append([data, model, f"{self.score(data, model):.3f}", scores, seconds])
        return table(["data", "model", "mean", "each seed", "seconds"], lines)
