"""Terminal output: a progress bar or one line per round, and a table at the end."""

import logging
import math
import shlex
import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import rich.progress
from rich.table import Column, Table
from rich.text import Text

from fedfrozen_app.core.logs import wants_json
from fedfrozen_app.core.streams import print_text
from fedfrozen_app.core.terminal import Console
from fedfrozen_app.files.rows import HEADLINES, Row, is_long, metric_name, metric_title, number, read_rows
from fedfrozen_app.report.sweep_clock import SWEEP

log = logging.getLogger(__name__)
# Rounds of one stage take similar time, so the time left is estimated from the latest few.
ROUNDS_FOR_ESTIMATE = 5


def human_bytes(count: float) -> str:
    """Decimal units, as network prices are: 1 MB is 10**6 bytes."""
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if round(count, 1) < 1000:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:,.1f} TB"


def human_seconds(seconds: float) -> str:
    """One unit, or two from a minute on."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def count_stages(rows: Sequence[Row]) -> dict[str, int]:
    """How many rounds each stage took, in order; round 0 is the state before training."""
    return dict(Counter(str(row.get("stage", "train")) for row in rows if row["round"] > 0))


def final_metrics(rows: Sequence[Row], summary: dict[str, Any]) -> list[tuple[str, str]]:
    """The final metrics of a run as (label, text); metrics missing from the summary are left out."""
    return list(_final_metrics(rows, summary))


def _final_metrics(rows: Sequence[Row], summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    metric = metric_name(rows)
    title = metric_title(metric)

    def score(key: str, round_key: str = "") -> str:
        at = summary.get(round_key)
        return f"{number(summary[key]):.4f}" + (f" (round {at})" if at is not None else "")

    if (key := f"final_test_{metric}") in summary:
        yield f"Final test {title}", score(key)
    if "final_test_perplexity" in summary:
        yield "Final test perplexity", f"{number(summary['final_test_perplexity']):.2f}"
    if "final_test_mae" in summary:
        yield f"Final test {metric_title('mae')}", f"{number(summary['final_test_mae']):.4g}"
    if (floor := summary.get(f"majority_{metric}")) is not None:
        beaten = number(summary.get(key)) > floor
        what = {"f1": "Tagging nothing" if not floor else "The most frequent label alone"}
        label = what.get(metric, "The most frequent class alone")
        yield label, f"{floor:.4f}" + ("" if beaten else ": the model is no better")
    if (plain := summary.get("baseline") or {}).get(metric) is not None:
        yield f"On the same rows, {plain['name']}", f"{number(plain[metric]):.4f}"
    if (key := f"best_test_{metric}") in summary:
        yield f"Best test {title}", score(key, "best_test_round")
    if summary.get(key := f"selected_test_{metric}") is not None:
        yield f"Test {title} of the round chosen by validation", score(key, "selected_round")
    if own := (summary.get("personal") or {}).get("personal"):
        spread = ", ".join(f"{word} {number(own.get(word)):.4f}" for word in ("mean", "worst"))
        yield f"Personal models, {title} on own test rows", spread
    stability = summary.get("stability") or {}
    if stability.get(key := "std_last_10") is not None and is_long(rows, metric):
        yield "Standard deviation, last 10 rounds", f"{number(stability[key]):.4f}"
    if (key := "best_minus_final") in stability:
        yield "Best minus final", f"{number(stability[key]):.4f}"
    for way in ("up", "down"):
        if (key := f"total_bytes_{way}") in summary:
            exact = summary[key]
            yield f"Sent {way}, all clients", f"{human_bytes(exact)} ({exact:,} bytes)"
    if not math.isnan(seconds := number(summary.get("seconds"))):
        yield "Time", human_seconds(seconds)
    if not math.isnan(virtual := number(summary.get("virtual_seconds"))):
        yield "Virtual time, clients' own machines and links", human_seconds(virtual)
    yield "Rounds", rounds_text(rows, summary)
    failed = sum(row.get("clients_failed") or 0 for row in rows)
    if failed:
        yield "Client replies failed or set aside", f"{failed:,}"
    if not math.isnan(changes := number(summary.get("selection_changes"))):
        yield "Layers new to a client in a round, mean", f"{changes:.2f}"
    yield from _epsilon(rows, summary)
    yield from masked_facts(rows)
    if audited := summary.get("audited"):
        yield "AUDITED, not for use", audit_text(audited)


def _epsilon(rows: Sequence[Row], summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    epsilons = [number(row["epsilon_max"]) for row in rows if "epsilon_max" in row]
    if epsilons:
        unit = f" per {summary['privacy_unit']}" if "privacy_unit" in summary else ""
        warning = " (NOT private: the noise was seeded)" if summary.get("private") is False else ""
        privacy = (summary.get("config") or {}).get("privacy") or {}
        if privacy.get("selection") == "unaccounted" and any("selection" in row for row in rows):
            warning += " (the choice of layers, which is public, is not counted)"
        secure = (summary.get("config") or {}).get("secure_aggregation") or {}
        if secure.get("name") == "on" and secure.get("noise") == "sum":
            trust = f"against a server {colluders_text(rows)}"
            yield "Epsilon of the federation", f"{epsilons[-1]:.3f}{unit}{warning}, {trust}"
        else:
            yield "Largest epsilon of a client", f"{epsilons[-1]:.3f}{unit}{warning}"


def colluders_text(rows: Sequence[Row]) -> str:
    """How many clients of a round may collude with the server before the noise in a sum is insufficient."""
    few = [row["secure"]["noise"]["colluders"] for row in rows if "noise" in row.get("secure", {})]
    if not few or min(few) == 0:
        return "that conspires with no client"
    return f"that conspires with at most {min(few)} of a round's clients"


def masked_facts(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """Facts about masked rounds: the smallest sum, and the effects of rounding and clipping."""
    masked = [row["secure"] for row in rows if "summed" in row.get("secure", {})]
    if not masked:
        return
    sums = [group["summed"] for one in masked for group in one.get("groups", [one]) if group["summed"]]
    yield "Masked: smallest sum", f"over {min(sums)} clients"
    yield (
        "Masked: rounding of a mean, at most",
        f"{max(number(one['rounding']) for one in masked):.2g} a round",
    )
    if clipped := sum(one["clipped"] for one in masked):
        yield "Masked: values clipped", f"{clipped:,}"


def audit_text(audited: dict[str, Any]) -> str:
    return f"up to {audited['canaries']} canaries among the examples of client {audited['client']}"


def rounds_text(rows: Sequence[Row], summary: dict[str, Any]) -> str:
    """ "12 of 20, interrupted: 4 warmup, 8 frozen"."""
    stages = count_stages(rows)
    text = f"{sum(stages.values())}"
    planned = (summary.get("config") or {}).get("num_rounds")
    if planned is not None:
        text += f" of {planned}"
    if (status := summary.get("status", "completed")) != "completed":
        text += f", {status}"
    if stages:
        text += ": " + ", ".join(f"{count} {stage}" for stage, count in stages.items())
    return text


def closing_table(summary: dict[str, Any], run_dir: Path) -> Table:
    """The table that ends a run. Stage sizes come from the rows in the run's folder."""
    table = Table(title=Text(headline(summary) or run_dir.name), show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    # Text, not str: rich would read "[" in a name or path as markup.
    for label, value in final_metrics(read_rows(run_dir), summary):
        table.add_row(Text(label), Text(value))
    return table


def show_end(summary: dict[str, Any], run_dir: Path, console: Console | None = None) -> None:
    """The closing table, and below it the path of the results on a separate line, to copy or click."""
    console = console or Console()
    console.print(closing_table(summary, run_dir))
    if line := better_baseline(summary, run_dir):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    page = run_dir / "report.html"
    print_text(page if page.is_file() else run_dir, console.file)  # rich would wrap it


def better_baseline(summary: dict[str, Any], run_dir: Path) -> str:
    """One line if a plain model does better on the same rows; "" otherwise."""
    plain = summary.get("baseline") or {}
    metric = next((name for name in HEADLINES if name in plain), "accuracy")
    had, own = number(plain.get(metric)), number(summary.get(f"final_test_{metric}"))
    if not had > own:
        return ""
    some = f" ({plain['train_rows']:,} of {plain['of_rows']:,})" * (plain["train_rows"] < plain["of_rows"])
    return (
        f"A plain model does better: {plain['name']}, on the clients' rows in one place{some}, has test "
        f"{metric_title(metric)} {had:.3f}, and this run {own:.3f}. To repeat it: fedfrozen baselines "
        f"{shlex.quote(str(run_dir))}"
    )


def headline(summary: dict[str, Any]) -> str:
    """ "fedfrozen on digits with vit_tiny", as far as the configuration names them."""
    config = summary.get("config") or {}
    words = {one["name"]: one["word"] for one in summary.get("objects") or ()}  # of classes given from Python

    def name(group: str) -> object:
        value = config.get(group)
        found = value.get("name") if isinstance(value, dict) else value
        return words.get(found, found)

    parts = (("", "strategy"), ("on ", "dataset"), ("with ", "model"))
    return " ".join(f"{word}{name(group)}" for word, group in parts if name(group))


class _Description(rich.progress.ProgressColumn):
    """The only column that is cut in a narrow window, at its end."""

    def render(self, task: rich.progress.Task) -> Text:
        return Text(task.description, no_wrap=True, overflow="ellipsis")


class Progress:
    """Shows the rounds as they end: a bar on a terminal, else one line per round.

    The bar counts bytes since it began; a line gives its round's bytes, because a log should show the step at
    a stage change.
    """

    def __init__(self, total_rounds: int, *, start_round: int = 0, stream: TextIO | None = None) -> None:
        self._total = total_rounds
        self._stream = stream if stream is not None else sys.stdout
        self._recent: deque[float] = deque(maxlen=ROUNDS_FOR_ESTIMATE)
        self._first: float | None = None  # seconds of the first round, which compiles and fills caches
        self._score = ""  # the latest score: rounds without evaluation keep showing it in the bar
        self._bytes = Counter[str]()
        self._moved: list[tuple[logging.StreamHandler[Any], TextIO]] = []
        self._bar: rich.progress.Progress | None = None
        self._sweep = SWEEP.get()  # the sweep of this run: bar and time left then cover the sweep
        self._runs, self._before = (self._sweep.runs, self._sweep.done) if self._sweep else (1, 0)
        console = Console(file=self._stream)
        # Not console.is_terminal: FORCE_COLOR would then draw bars into the log files of a CI.
        if self._stream.isatty() and not console.is_dumb_terminal:
            self._bar = rich.progress.Progress(
                rich.progress.SpinnerColumn(table_column=Column(no_wrap=True)),
                rich.progress.TextColumn("{task.fields[place]}"),
                rich.progress.BarColumn(bar_width=8, table_column=Column(no_wrap=True)),
                _Description(),
                console=console,
                transient=self._sweep is not None,  # the next run continues with it
            )
            self._task = self._bar.add_task(
                "starting", total=self._runs * total_rounds, **self._at(start_round)
            )

    def __enter__(self) -> Self:
        if self._bar is not None:
            terminals = (sys.stdout, sys.stderr, self._stream)
            self._bar.start()
            # rich prints writes to sys.stderr above the bar, but log handlers hold the original stream: they
            # are redirected through rich until the bar ends.
            for handler in _stream_handlers():
                if any(handler.stream is terminal for terminal in terminals):
                    self._moved.append((handler, handler.stream))
                    handler.setStream(sys.stderr)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for handler, stream in self._moved:
            handler.setStream(stream)
        self._moved.clear()
        if self._bar is not None:
            self._bar.stop()

    def update(self, row: Row) -> None:
        """Show a round that has ended."""
        seconds = number((row.get("seconds") or {}).get("total"))
        if row["round"] > 0 and not math.isnan(seconds):
            if self._first is None:
                self._first = seconds
            else:
                self._recent.append(seconds)
        metric = metric_name([row])
        score = f"{metric_title(metric)} {number(row[key]):.3f}" if (key := f"test_{metric}") in row else ""
        stage = str(row.get("stage", "train"))
        if self._bar is None:
            parts = [self._at(row["round"])["place"], stage, score]
            parts += [
                f"{way} {human_bytes(row[key])}" for way in ("up", "down") if (key := f"bytes_{way}") in row
            ]
            parts += ["" if math.isnan(seconds) else human_seconds(seconds), self._left(row)]
            line = "  ".join(part for part in parts if part)
            if wants_json():
                log.info(line)
                return
            self._stream.write(line + "\n")
            self._stream.flush()
            return
        self._score = score or self._score
        self._bytes.update({way: row.get(f"bytes_{way}") or 0 for way in ("up", "down")})
        sent = [f"{way} {human_bytes(self._bytes[way])}" for way in ("up", "down")]
        parts = [self._score, stage, self._left(row), *sent]  # a narrow window cuts the last one
        text = "  ".join(part for part in parts if part)
        self._bar.update(self._task, description=text, **self._at(row["round"]))

    def _at(self, server_round: int) -> dict[str, Any]:
        """The position of the bar, and its text."""
        place = f"round {server_round}/{self._total}"
        if self._sweep is not None:
            place = f"{self._sweep.place()} {place}"
        return {"completed": self._before * self._total + server_round, "place": place}

    def _left(self, row: Row) -> str:
        if self._sweep is not None:
            seconds = self._sweep.left(row["round"] / self._total if self._total else 1.0)
            return f"about {human_seconds(seconds)} left of all" if seconds else ""
        rounds = self._total - row["round"]
        if self._first is None or rounds <= 0:
            return ""
        if not self._recent:
            return f"at most {human_seconds(rounds * self._first)} left"
        estimate = rounds * sum(self._recent) / len(self._recent)
        return f"about {human_seconds(estimate)} left"


def _stream_handlers() -> list[logging.StreamHandler[Any]]:
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    return [
        handler
        for logger in loggers
        if isinstance(logger, logging.Logger)  # the rest are placeholders of unused names
        for handler in logger.handlers
        if isinstance(handler, logging.StreamHandler)
    ]
