"""The report of a run: one page that needs nothing else, to be mailed, archived or printed."""

import base64
import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from fedfrozen_app.files.folders import repeating
from fedfrozen_app.files.rows import Row, metric_name, number, read_rows
from fedfrozen_app.report.charts import (
    CLIENT_VIEWS,
    client_keys,
    client_values,
    in_order,
    last,
    make_charts,
    per_unit,
)
from fedfrozen_app.report.console import (
    audit_text,
    count_stages,
    final_figures,
    headline,
    human_bytes,
    human_seconds,
    rounds_text,
)
from fedfrozen_app.report.curves import series
from fedfrozen_app.report.fairness import read_fairness, reliability_chart, section
from fedfrozen_app.report.html import (
    box,
    cards,
    command,
    document,
    figures,
    flat,
    fold,
    pairs,
    save,
    table,
    text,
)
from fedfrozen_app.report.sample_texts import read_samples, samples_section
from fedfrozen_app.report.summary import method_of, read_summary
from fedfrozen_app.words import counted

ENDED = ("completed", "stopped early", "failed", "interrupted")  # states in which no round follows
COARSE = "Each from the rows that this client holds out, which may be very few."


def write_report(run_dir: Path) -> Path:
    """Write report.html of a run that has ended, or of what it has done so far."""
    path = run_dir / "report.html"
    save(run_page(run_dir), path)
    return path


def run_page(run_dir: Path, *, version: str = "") -> str:
    """From metrics.jsonl, summary.json and, where there is one, labels.png; live with `version`."""
    rows = read_rows(run_dir)
    labels = run_dir / "labels.png"
    picture = labels.read_bytes() if labels.is_file() else None
    return render(
        rows,
        read_summary(run_dir, rows),
        picture,
        name=run_dir.resolve().name,
        version=version,
        held_out=_held_out(run_dir / "clients.json"),
        fairness=read_fairness(run_dir),
        samples=read_samples(run_dir),
    )


def _held_out(path: Path) -> dict[str, int]:
    """By client, the rows that it judges itself on; empty where nobody wrote them down."""
    try:
        return {client: int(sizes["held_out"]) for client, sizes in json.loads(path.read_text()).items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}  # a run of before, sites of their own, or a file that somebody has changed


def render(
    rows: Sequence[Row],
    summary: dict[str, Any],
    labels: bytes | None,
    *,
    name: str,
    version: str = "",
    held_out: Mapping[str, int] | None = None,
    fairness: dict[str, Any] | None = None,
    samples: Sequence[dict[str, Any]] = (),
) -> str:
    """The whole page as text; `name` stands in where the configuration names no strategy."""
    title = headline(summary) or name
    charts = make_charts(rows, getattr(method_of(summary.get("config")), "curves", ()))
    charts += reliability_chart(fairness)
    header = f"""<h1>{escape(title)}</h1>
<p class="soft">{escape(_setting(summary))}</p>
{_status(rows, summary)}
{_cards(rows, summary)}"""
    main = f"""<h2>Curves</h2>
{figures(charts, _picture(labels))}
<h2>Figures</h2>
{box(pairs(final_figures(rows, summary)))}
{_stage_table(rows)}
{samples_section(list(samples))}
{section(fairness)}
{_client_table(rows, (summary.get("config") or {}).get("num_clients"), held_out or {})}
{_failures(rows)}
<h2>Rounds</h2>
{fold(f"Every round ({counted(len(rows), 'row')})", _round_table(rows))}
<h2>To repeat it</h2>
{_repeat(summary)}"""
    return document(title, header, main, charts, version=version)


def _setting(summary: dict[str, Any]) -> str:
    config = summary.get("config") or {}
    partition, runtime = config.get("partition"), config.get("runtime")
    own_data = isinstance(runtime, dict) and runtime.get("name") == "deployed"  # rows are not dealt
    words = []
    if config.get("num_clients") is not None:  # sites come and go
        words.append(counted(config["num_clients"], "client"))
    if "participation" in config:
        words.append(f"participation {text(config['participation'])}")
    if isinstance(partition, dict) and "name" in partition and not own_data:
        alpha = f" (alpha {partition['alpha']})" if partition.get("alpha") is not None else ""
        words.append(f"{partition['name']} partition{alpha}")
    if "seed" in summary:
        words.append(f"seed {summary['seed']}")
    if "device" in summary:
        words.append(f"on {summary['device']}")
    return " · ".join(words)


def _status(rows: Sequence[Row], summary: dict[str, Any]) -> str:
    status = summary.get("status", "completed")
    rounds = escape(rounds_text(rows, summary))
    warning = ""
    if audited := summary.get("audited"):
        warning = f'<p class="warn">An audit, and no model to use: {escape(audit_text(audited))}.</p>'
    if status == "completed":
        return f'{warning}<p class="soft">Completed. Rounds: {rounds}.</p>'
    return f'{warning}<p class="warn">Rounds: {rounds}. The figures are of what was done until then.</p>'


def _cards(rows: Sequence[Row], summary: dict[str, Any]) -> str:
    metric = metric_name(rows)
    ended = str(summary.get("status", "completed")).partition(":")[0] in ENDED
    scores = (
        (f"final_test_{metric}", f"{'final' if ended else 'latest'} test {metric}", None),
        (f"best_test_{metric}", "best", "best_test_round"),
        (f"selected_test_{metric}", "chosen by validation", "selected_round"),
    )
    found = []
    if summary.get("final_test_perplexity") is not None:
        found.append((f"{number(summary['final_test_perplexity']):.2f}", "final test perplexity"))
    for key, label, place in scores:
        if summary.get(key) is not None:
            at = f", round {summary[place]}" if place and summary.get(place) is not None else ""
            found.append((f"{number(summary[key]):.4f}", label + at))
    for way in ("up", "down"):
        if (key := f"total_bytes_{way}") in summary:
            found.append((human_bytes(summary[key]), f"sent {way}, all clients"))
    if not math.isnan(seconds := number(summary.get("seconds"))):
        found.append((human_seconds(seconds), "time"))
    return cards(found)


def _picture(labels: bytes | None) -> str:
    if labels is None:
        return ""
    source = "data:image/png;base64," + base64.b64encode(labels).decode()
    return (
        "<figure><figcaption>Labels of the clients</figcaption>"
        f'<div class="scroll"><img alt="How the labels are spread over the clients" src="{source}"></div>'
        "</figure>"
    )


def _stage_table(rows: Sequence[Row]) -> str:
    """What a round of each stage costs: the saving of freezing, in numbers."""

    def mean(group: Sequence[Row], key: str) -> float:
        values = [value for value in series(group, key).values if not math.isnan(value)]
        return sum(values) / len(values) if values else math.nan

    body = []
    for stage, count in count_stages(rows).items():
        group = [row for row in rows if row["round"] > 0 and row.get("stage", "train") == stage]
        up, down = mean(group, "bytes_up"), mean(group, "bytes_down")
        seconds, trained = mean(group, "seconds.total"), mean(group, "trained_params")
        body.append(
            [
                stage,
                str(count),
                "" if math.isnan(trained) else f"{trained:,.0f}",
                "" if math.isnan(up) else human_bytes(up),
                "" if math.isnan(down) else human_bytes(down),
                "" if math.isnan(seconds) else human_seconds(seconds),
            ]
        )
    if not body:
        return ""
    head = [
        "stage",
        "rounds",
        "trained parameters",
        "up per round",
        "down per round",
        "time a round",
    ]
    return f"<h2>Stages</h2>{box(table(head, body))}"


def _client_table(rows: Sequence[Row], of_all: int | None, held_out: Mapping[str, int]) -> str:
    """Each client's latest accuracies: the map in figures. `of_all`: how many clients the run has."""
    columns = {key: client_values(rows, key) for key in client_keys(rows)}
    if not columns:
        return ""
    body = []
    for client in in_order({client for values in columns.values() for client in values}):
        by_column = [values.get(client) or {} for values in columns.values()]
        rounds = {place for values in by_column for place in values}
        cells = [_coarse(last(values)) if values else "" for values in by_column]
        judged_on = [str(held_out.get(client, ""))] if held_out else []
        body.append([client, str(len(rounds)), str(max(rounds)), *judged_on, *cells])
    judged_on = ["rows held out"] if held_out else []
    head = ["client", "rounds", "latest", *judged_on, *(CLIENT_VIEWS[key] for key in columns)]
    told, note = f"Every client ({len(body)})", COARSE
    if of_all is not None and len(body) < of_all:
        told = f"{len(body)} of {of_all} clients"
        note += f" {of_all - len(body)} told nothing: they were never drawn, or hold out no rows."
    return f'<h2>Clients</h2>{fold(told, table(head, body))}<p class="note">{note}</p>'


def _failures(rows: Sequence[Row]) -> str:
    body = [(f"round {row['round']}", str(text)) for row in rows for text in row.get("failures") or []]
    if not body:
        return ""
    label = f"Failed or set aside ({len(body)})"
    return f"<h2>Failures</h2>{fold(label, pairs(body, 'pairs short'), unfolded=len(body) <= 10)}"


def _round_table(rows: Sequence[Row]) -> str:
    metric = metric_name(rows)
    columns: list[tuple[str, str, Callable[[float], str]]] = [
        (f"test {metric}", f"test_{metric}", _decimal),
        ("test loss", "test_loss", _decimal),
        ("test perplexity", "test_perplexity", _decimal),
        (f"validation {metric}", f"val_{metric}", _decimal),
        ("validation loss", "val_loss", _decimal),
        ("clients before", "client_val_before", _decimal),
        ("clients after", "client_val_after", _decimal),
        ("train loss", "train_loss", _decimal),
        ("learning rate", "lr", "{:g}".format),
        ("bytes up", "bytes_up", "{:,.0f}".format),
        ("bytes down", "bytes_down", "{:,.0f}".format),
        ("trained parameters", "trained_params", "{:,.0f}".format),
        ("clients ok", "clients_ok", "{:,.0f}".format),
        ("failed", "clients_failed", "{:,.0f}".format),
        ("seconds", "seconds.total", "{:,.2f}".format),
        ("kernel drift", "drift.kernel.rms", _decimal),
        ("rest drift", "drift.rest.rms", _decimal),
        (f"epsilon{per_unit(rows)}", "epsilon_max", "{:.3f}".format),
    ]
    head, cells = ["stage", "round"], []
    for label, key, form in columns:
        data = series(rows, key)
        if data.rounds:
            head.append(label)
            texts = ("NaN" if math.isnan(value) else form(value) for value in data.values)
            cells.append(dict(zip(data.rounds, texts, strict=True)))
    body = [
        [str(row.get("stage", "")), str(row["round"])] + [column.get(row["round"], "") for column in cells]
        for row in rows
    ]
    return table(head, body, ruled=True)


def _coarse(value: float) -> str:
    """Two decimals: a client judges on few rows, and more would only look exact."""
    return "" if math.isnan(value) else f"{value:.2f}"


def _decimal(value: float) -> str:
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e6 else f"{value:.3g}"


def _fresh(used: str) -> str:
    """The command with a folder of its own; as it is, where it is no shell's line."""
    try:
        return shlex.join(repeating(shlex.split(used)))
    except ValueError:
        return used


def _repeat(summary: dict[str, Any]) -> str:
    parts = []
    if "command" in summary:
        used = summary["command"]
        parts.append(command(_fresh(used if isinstance(used, str) else shlex.join(map(str, used)))))
    known = ("git_commit", "seed", "device", "machine")
    details: dict[str, Any] = {key: summary[key] for key in known if summary.get(key) is not None}
    if details:
        parts.append(fold("Code and machine", pairs(flat(details))))
    if summary.get("config"):
        parts.append(fold("Full configuration", pairs(flat(summary["config"]))))
    if summary.get("versions"):
        parts.append(fold("Versions", pairs(flat(summary["versions"]))))
    return "\n".join(parts) or '<p class="soft">The run left no command and no configuration.</p>'
