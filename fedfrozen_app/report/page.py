"""The report of a run: one page that needs nothing else, to be mailed, archived or printed.

Names, paths and failure messages come from users and sites, so all text is escaped, and a content
security policy lets only our own script and style run: a slip in the escaping would still be inert.
"""

import base64
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from fedfrozen_app.errors import UserError
from fedfrozen_app.report.console import (
    count_stages,
    final_figures,
    headline,
    human_bytes,
    human_seconds,
    rounds_text,
)
from fedfrozen_app.report.curves import (
    Row,
    Series,
    metric_name,
    number,
    read_rows,
    running_total,
    series,
    stage_marks,
)
from fedfrozen_app.report.template import CSS, SCRIPT

Chart = dict[str, Any]

# In the order in which a Transformer uses them; query and key, which freezing removes, stand out.
ROLE_COLOURS = {
    "embedding": "purple",
    "query": "vermillion",
    "key": "orange",
    "value": "blue",
    "output": "sky",
    "mlp": "green",
    "norm": "yellow",
    "head": "ink2",
    "prompt": "wine",
    "fusion": "olive",
}
PHASE_COLOURS = {
    "train": "blue",
    "aggregate": "orange",
    "evaluate": "green",
    "checkpoint": "purple",
}
SPARE_COLOURS = ("indigo", "wine", "olive", "sky", "yellow", "vermillion")


def write_report(run_dir: Path) -> Path:
    """Write report.html from metrics.jsonl, summary.json and, where there is one, labels.png."""
    rows = read_rows(run_dir)
    summary = _read_summary(run_dir / "summary.json")
    labels = run_dir / "labels.png"
    picture = labels.read_bytes() if labels.is_file() else None
    path = run_dir / "report.html"
    html = render(rows, summary, picture, name=run_dir.resolve().name)
    # JSON can carry half of a surrogate pair, which UTF-8 cannot.
    path.write_text(html, encoding="utf-8", errors="backslashreplace")
    return path


def render(rows: Sequence[Row], summary: dict[str, Any], labels: bytes | None, *, name: str) -> str:
    """The whole page as text; `name` stands in where the configuration names no strategy."""
    title = headline(summary) or name
    charts = make_charts(rows)
    rounds = [row["round"] for row in rows] or [0]
    data = {"first": min(rounds), "last": max(rounds), "charts": charts}
    policy = f"default-src 'none'; img-src data:; style-src '{_digest(CSS)}'; script-src '{_digest(SCRIPT)}'"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{CSS}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p class="soft">{escape(_setting(summary))}</p>
{_status(rows, summary)}
{_cards(rows, summary)}
</header>
<main>
<h2>Curves</h2>
<noscript><p class="warn">The charts need JavaScript; their values are in the table of rounds.</p>
</noscript>
<div class="charts">
{"".join(_figure(index, chart) for index, chart in enumerate(charts))}
{_picture(labels)}
</div>
<h2>Figures</h2>
<div class="box scroll">{_pairs(final_figures(rows, summary))}</div>
{_stage_table(rows)}
{_failures(rows)}
<h2>Rounds</h2>
{_fold(f"Every round ({len(rows)} rows)", _round_table(rows))}
<h2>To repeat it</h2>
{_repeat(summary)}
</main>
<script id="data" type="application/json">{_embed(data)}</script>
<script>{SCRIPT}</script>
</body>
</html>
"""


def make_charts(rows: Sequence[Row]) -> list[Chart]:
    """What the script draws, in the order of the page."""
    metric = metric_name(rows)
    marks = stage_marks(rows)

    def lines(title: str, unit: str, *specs: tuple[str, Series, str, bool], zero: bool) -> Chart:
        made = [_series(name, data, colour, dashed) for name, data, colour, dashed in specs]
        return _chart(title, unit, "line", made, marks, from_zero=zero)

    def of(name: str, key: str, colour: str, dashed: bool = False) -> tuple[str, Series, str, bool]:
        return name, series(rows, key), colour, dashed

    def sent(way: str, colour: str, dashed: bool = False) -> tuple[str, Series, str, bool]:
        return way, running_total(series(rows, f"bytes_{way}"), 1e-6), colour, dashed

    charts = [
        lines(
            metric.capitalize(),
            "",
            of("test", f"test_{metric}", "blue"),
            of("central validation", f"val_{metric}", "vermillion", True),
            of("clients before local training", "client_val_before", "purple", True),
            of("clients after local training", "client_val_after", "green"),
            zero=False,
        ),
        lines(
            "Loss",
            "",
            of("train", "train_loss", "vermillion"),
            of("test", "test_loss", "blue"),
            of("central validation", "val_loss", "green", True),
            zero=False,
        ),
        _stacked(rows, marks, "Sent up by role", "MB", "bytes_up_by_role", "bytes_up", 1e-6),
        _stacked(rows, marks, "Sent down by role", "MB", "bytes_down_by_role", "bytes_down", 1e-6),
        lines("Sent so far", "MB", sent("up", "blue"), sent("down", "orange", True), zero=True),
        lines(
            "Client drift",
            "",
            of("kernel rms", "drift.kernel.rms", "vermillion"),
            of("kernel mean update (norm)", "drift.kernel.mean_update", "vermillion", True),
            of("rest rms", "drift.rest.rms", "blue"),
            of("rest mean update (norm)", "drift.rest.mean_update", "blue", True),
            zero=True,
        ),
        _stacked(rows, marks, "Time by phase", "s", "seconds", "seconds.total", 1.0),
    ]
    if any("epsilon_max" in row for row in rows):
        epsilon = of("largest epsilon of a client", "epsilon_max", "purple")
        charts.append(lines("Privacy spent", "", epsilon, zero=True))
    return charts


def _chart(title: str, unit: str, kind: str, made: list[Chart], marks: Sequence, *, from_zero: bool) -> Chart:
    """Only series with something to draw are kept; the note says in words what is missing."""
    drawn = [one for one in made if any(value is not None for _, value in one["points"])]
    absent = [one["name"] for one in made if not one["points"]]
    notes = [f"Not measured: {', '.join(absent)}."] if absent else []
    broken = []
    for one in made:
        bad = [str(place) for place, value in one["points"] if value is None]
        if bad:
            more = f" and {len(bad) - 8} more" if len(bad) > 8 else ""
            broken.append(f"{one['name']} in round {', '.join(bad[:8])}{more}")
    if broken:
        notes.append(f"Not a finite number: {'; '.join(broken)}.")
    return {
        "title": title,
        "unit": unit,
        "kind": kind,
        "from_zero": from_zero,
        "series": drawn,
        "marks": list(marks),
        "note": " ".join(notes),
    }


def _series(name: str, data: Series, colour: str, dashed: bool = False) -> Chart:
    # Six digits are below a pixel, and JSON knows no NaN.
    values = (None if math.isnan(value) else float(f"{value:.6g}") for value in data.values)
    points = list(zip(data.rounds, values, strict=True))
    return {"name": name, "colour": colour, "dashed": dashed, "points": points}


def _stacked(
    rows: Sequence[Row], marks: Sequence, title: str, unit: str, key: str, total: str, scale: float
) -> Chart:
    """Bars of the parts under `key`; what the parts leave of `total` gets its own, grey one."""
    known = PHASE_COLOURS if key == "seconds" else ROLE_COLOURS
    found = {part for row in rows for part in (row.get(key) or {})} - {"total"}
    parts = [part for part in known if part in found] + sorted(found - known.keys())
    made = []
    for index, part in enumerate(parts):
        colour = known.get(part) or SPARE_COLOURS[index % len(SPARE_COLOURS)]
        made.append(_series(part, _scaled(_part(rows, key, part), scale), colour))
    rest = _rest(rows, key, total, parts)
    if any(value > 0 for value in rest.values):
        name = "other" if key == "seconds" else ("plan and digests" if parts else "all roles")
        made.append(_series(name, _scaled(rest, scale), "grey"))
    chart = _chart(title, unit, "bars", made, marks, from_zero=True)
    if not parts:
        chart["note"] = f"Not measured: {title.lower()}. {chart['note']}".strip()
    return chart


def _part(rows: Sequence[Row], key: str, part: str) -> Series:
    # Not series(): a site may name a role with a dot in it.
    having = [row for row in rows if part in (row.get(key) or {})]
    return Series([row["round"] for row in having], [number(row[key][part]) for row in having])


def _rest(rows: Sequence[Row], key: str, total: str, parts: Sequence[str]) -> Series:
    whole = series(rows, total)
    by_round = {row["round"]: row.get(key) or {} for row in rows}
    left = [
        value - sum(number(by_round[place].get(part, 0)) for part in parts)
        for place, value in zip(whole.rounds, whole.values, strict=True)
    ]
    # Phases are timed apart from the total, which may leave a rest of a hair below nothing.
    return Series(whole.rounds, [value if math.isnan(value) else max(value, 0.0) for value in left])


def _scaled(data: Series, scale: float) -> Series:
    return Series(data.rounds, [value * scale for value in data.values])


def _read_summary(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {"status": "unfinished: it left no summary.json"}
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON: mend it, or remove it to report the rounds alone.") from error
    if not isinstance(summary, dict):
        raise UserError(f"{path} must hold one JSON object: mend it, or remove it.")
    return summary


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _embed(data: object) -> str:
    """JSON that no text in it can end early: "<" only ever stands inside JSON strings."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _setting(summary: dict[str, Any]) -> str:
    config = summary.get("config") or {}
    partition = config.get("partition") or {}
    words = []
    if "num_clients" in config:
        words.append(f"{config['num_clients']} clients")
    if "participation" in config:
        words.append(f"participation {_text(config['participation'])}")
    if isinstance(partition, dict) and "name" in partition:
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
    if status == "completed":
        return f'<p class="soft">Completed. Rounds: {rounds}.</p>'
    return f'<p class="warn">Rounds: {rounds}. The figures are of what was done until then.</p>'


def _cards(rows: Sequence[Row], summary: dict[str, Any]) -> str:
    metric = metric_name(rows)
    scores = (
        (f"final_test_{metric}", f"final test {metric}", None),
        (f"best_test_{metric}", "best", "best_test_round"),
        (f"selected_test_{metric}", "chosen by validation", "selected_round"),
    )
    cards = []
    for key, label, place in scores:
        if summary.get(key) is not None:
            at = f", round {summary[place]}" if place and summary.get(place) is not None else ""
            cards.append((f"{number(summary[key]):.4f}", label + at))
    for way in ("up", "down"):
        if (key := f"total_bytes_{way}") in summary:
            cards.append((human_bytes(summary[key]), f"sent {way}, all clients"))
    if not math.isnan(seconds := number(summary.get("seconds"))):
        cards.append((human_seconds(seconds), "time"))
    made = (
        f'<div class="card"><b>{escape(value)}</b><span>{escape(label)}</span></div>'
        for value, label in cards
    )
    return f'<div class="cards">{"".join(made)}</div>'


def _figure(index: int, chart: Chart) -> str:
    unit = f" <small>{escape(chart['unit'])}</small>" if chart["unit"] else ""
    # Without a series the script leaves the figure alone, so the note is written here.
    note = "" if chart["series"] else f'<p class="note">{escape(chart["note"])}</p>'
    caption = f"<figcaption>{escape(chart['title'])}{unit}</figcaption>"
    return f'<figure id="chart-{index}">{caption}{note}</figure>\n'


def _picture(labels: bytes | None) -> str:
    if labels is None:
        return ""
    source = "data:image/png;base64," + base64.b64encode(labels).decode()
    return (
        "<figure><figcaption>Labels of the clients</figcaption>"
        f'<img alt="How the labels are spread over the clients" src="{source}"></figure>'
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
    return f'<h2>Stages</h2><div class="box scroll">{_table(head, body)}</div>'


def _failures(rows: Sequence[Row]) -> str:
    body = [(f"round {row['round']}", str(text)) for row in rows for text in row.get("failures") or []]
    if not body:
        return ""
    label = f"Failed or set aside ({len(body)})"
    return f"<h2>Failures</h2>{_fold(label, _pairs(body, 'pairs short'), unfolded=len(body) <= 10)}"


def _round_table(rows: Sequence[Row]) -> str:
    metric = metric_name(rows)
    columns: list[tuple[str, str, Callable[[float], str]]] = [
        (f"test {metric}", f"test_{metric}", _decimal),
        ("test loss", "test_loss", _decimal),
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
        ("epsilon", "epsilon_max", "{:.3f}".format),
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
    return _table(head, body)


def _decimal(value: float) -> str:
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e6 else f"{value:.3g}"


def _repeat(summary: dict[str, Any]) -> str:
    parts = []
    if "command" in summary:
        command = summary["command"]
        words = command if isinstance(command, str) else " ".join(map(str, command))
        parts.append(f'<div class="box"><pre>{escape(words)}</pre></div>')
    known = ("git_commit", "seed", "device", "machine")
    facts: dict[str, Any] = {key: summary[key] for key in known if summary.get(key) is not None}
    if facts:
        parts.append(_fold("Code and machine", _pairs(_flat(facts))))
    if summary.get("config"):
        parts.append(_fold("Full configuration", _pairs(_flat(summary["config"]))))
    if summary.get("versions"):
        parts.append(_fold("Versions", _pairs(_flat(summary["versions"]))))
    return "\n".join(parts) or '<p class="soft">The run left no command and no configuration.</p>'


def _flat(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as dotted keys, which is how they are overridden."""
    flat = []
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat += _flat(value, f"{prefix}{key}.")
        else:
            flat.append((f"{prefix}{key}", _text(value)))
    return flat


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _pairs(pairs: Iterable[tuple[str, str]], kind: str = "pairs") -> str:
    lines = (f"<tr><th>{escape(key)}</th><td>{escape(value)}</td></tr>" for key, value in pairs)
    return f'<table class="{kind}">{"".join(lines)}</table>'


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Numbers, after a first column of text; a rule where that column changes."""
    top = '<tr><th class="text">' + "</th><th>".join(map(escape, head)) + "</th></tr>"
    texts, before = [], ""
    for first, *rest in body:
        begins = ' class="begins"' if before not in ("", first) and len(body) > 5 else ""
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        texts.append(f'<tr{begins}><td class="text">{escape(first)}</td>{cells}</tr>')
        before = first
    lines = "".join(texts)
    return f'<table class="numbers"><thead>{top}</thead><tbody>{lines}</tbody></table>'


def _fold(label: str, content: str, *, unfolded: bool = False) -> str:
    return (
        f"<details{' open' if unfolded else ''}><summary>{escape(label)}</summary>"
        f'<div class="scroll">{content}</div></details>'
    )
