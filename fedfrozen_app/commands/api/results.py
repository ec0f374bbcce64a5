"""Runs, sweeps and comparisons in Python: thin objects over their files."""

import tempfile
from collections.abc import Sequence
from functools import cached_property
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from transformers import PreTrainedModel

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.terminal import Console
from fedfrozen_app.files.folders import run_folders
from fedfrozen_app.files.rows import read_rows
from fedfrozen_app.launch import load_run
from fedfrozen_app.report.compare import model as compared
from fedfrozen_app.report.compare.compare_page import render as comparison_page
from fedfrozen_app.report.compare.tables import footnotes, runs_csv, to_csv, to_terminal
from fedfrozen_app.report.console import headline
from fedfrozen_app.report.curves import curves_figure
from fedfrozen_app.report.run_page import run_page
from fedfrozen_app.report.summary import stored_summary

FRAME_HEIGHT = 640


class Run:
    """One run, by the folder of its results (`folder`); finished or not. A notebook shows its report."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def summary(self) -> dict[str, Any]:
        """summary.json: final and best metrics, totals, versions, the resolved configuration."""
        found = stored_summary(self.folder)
        if found is None:
            raise UserError(f"{self.folder} holds no finished run: it has no summary.json.")
        return found

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """One row per round; nested metrics under dotted names, such as `seconds.total`."""
        rows = [{key: value for key, value in row.items() if key != "by_client"} for row in self.rows]
        return pd.json_normalize(rows).set_index("round")

    @cached_property
    def clients(self) -> pd.DataFrame:
        """One row per client and round in which it reported metrics: before and after training."""
        reported = [
            {"round": row["round"], "client": client, "figure": figure, "value": value}
            for row in self.rows
            for figure, values in (row.get("by_client") or {}).items()
            for client, value in values.items()
        ]
        if not reported:
            return pd.DataFrame(index=pd.MultiIndex.from_arrays([[], []], names=["round", "client"]))
        found = pd.DataFrame(reported).pivot(index=["round", "client"], columns="figure", values="value")
        return found.rename_axis(columns=None)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """metrics.jsonl as it is: one dictionary per round."""
        return read_rows(self.folder)

    def model(self, *, trust_folder: bool = False) -> Any:
        """The final global model: a transformers model, or the module that the run was given.

        `trust_folder`: also if the folder names a database, the hub or a package that no run here has used.
        """
        worker = load_run(self.folder, [], trusted=trust_folder)
        if not isinstance(worker.model, PreTrainedModel):
            return worker.model
        with tempfile.TemporaryDirectory() as folder:
            worker.export(Path(folder))
            return type(worker.model).from_pretrained(folder)

    def plot(self) -> Figure:
        """Accuracy, loss, bytes and drift: the picture in curves.png."""
        import matplotlib.pyplot  # noqa: F401  a notebook learns from it how to show figures

        return curves_figure(self.rows, title=headline(self.summary))

    def __repr__(self) -> str:
        metrics = [f"{key}={self.summary[key]:.4f}" for key in self.summary if key.startswith("final_test")]
        return f"Run({str(self.folder)!r}, {', '.join(metrics)})"

    def _repr_html_(self) -> str:
        return framed(run_page(self.folder))


class Comparison:
    """Runs side by side: grouped by everything but the seed, tested against a baseline."""

    def __init__(self, found: compared.Comparison) -> None:
        self._found = found

    @cached_property
    def table(self) -> pd.DataFrame:
        """A row for each group: means, intervals, tests."""
        return pd.read_csv(StringIO(to_csv(self._found)))

    @cached_property
    def runs(self) -> pd.DataFrame:
        """A row for each run."""
        return pd.read_csv(StringIO(runs_csv(self._found)))

    @property
    def notes(self) -> list[str]:
        """Cautions about the comparison, such as too few seeds."""
        return footnotes(self._found)

    def __repr__(self) -> str:
        text = StringIO()
        Console(file=text, width=110).print(*to_terminal(self._found), *self.notes, sep="\n", markup=False)
        return text.getvalue().rstrip()

    def _repr_html_(self) -> str:
        return framed(comparison_page(self._found, link=lambda run: None))


class Sweep:
    """The runs of a sweep, by its folder (`folder`). A notebook shows their comparison."""

    def __init__(self, folder: Path, compare: Any) -> None:
        self.folder = folder
        self._compare = compare

    @property
    def runs(self) -> list[Run]:
        """Each run, in the order of their folders."""
        return [Run(folder) for folder in run_folders([self.folder])]

    def compare(self, **options: Any) -> Comparison:
        """As `fedfrozen.compare` does: `baseline`, `target`, `figure`."""
        return self._compare(self.folder, **options)

    def __repr__(self) -> str:
        return f"Sweep({str(self.folder)!r}, {len(self.runs)} runs)"

    def _repr_html_(self) -> str:
        return self.compare()._repr_html_()


def folders_of(things: Sequence[Any]) -> list[Path]:
    return [thing.folder if isinstance(thing, (Run, Sweep)) else Path(thing).expanduser() for thing in things]


def framed(page: str) -> str:
    """A whole page inside a notebook's cell, with its own styles and scripts."""
    style = f"width:100%;height:{FRAME_HEIGHT}px;border:1px solid #ccc"
    return f'<iframe srcdoc="{escape(page, quote=True)}" style="{style}"></iframe>'
