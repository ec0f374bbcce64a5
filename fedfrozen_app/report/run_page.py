"""The report of a run: one self-contained page to mail, archive or print."""

import logging
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import counted
from fedfrozen_app.core.quantiles import HEAD as QUANTILES
from fedfrozen_app.core.quantiles import cells, quantiles
from fedfrozen_app.files.folders import repeating
from fedfrozen_app.files.readers import read_checked, read_object
from fedfrozen_app.files.rows import Row, metric_name, metric_title, number, read_rows
from fedfrozen_app.report.baseline_tables import baselines_section, read_baselines
from fedfrozen_app.report.calibration import calibration_section
from fedfrozen_app.report.charts import make_charts, per_unit
from fedfrozen_app.report.client_charts import CLIENT_VIEWS, client_keys, client_values, in_order, last
from fedfrozen_app.report.console import (
    audit_text,
    count_stages,
    final_metrics,
    headline,
    human_bytes,
    human_seconds,
    rounds_text,
)
from fedfrozen_app.report.curves import series
from fedfrozen_app.report.data_section import data_section, read_data
from fedfrozen_app.report.fairness import fairness_section, read_fairness, reliability_chart
from fedfrozen_app.report.gantt import gantt_section
from fedfrozen_app.report.html import Table, flat, png_text, render_page, save, text
from fedfrozen_app.report.mask_picture import FILE as MASKS
from fedfrozen_app.report.sample_texts import read_samples, sample_lines
from fedfrozen_app.report.site_scores import read_site_scores, site_scores_section
from fedfrozen_app.report.site_states import site_section
from fedfrozen_app.report.summary import method_of, read_summary

log = logging.getLogger(__name__)
ENDED = ("completed", "stopped early", "failed", "interrupted")  # final states
MOST_CLIENTS = 1000  # listed one by one
COARSE = "Each from the rows that this client holds out, which may be very few."


def write_report(run_dir: Path) -> Path:
    """Write report.html of a run, finished or not."""
    path = run_dir / "report.html"
    save(run_page(run_dir), path)
    return path


def run_page(run_dir: Path, *, version: str = "") -> str:
    """The page from metrics.jsonl, summary.json and, if there is one, labels.png; live with `version`."""
    rows = read_rows(run_dir)
    summary = read_summary(run_dir, rows)
    return render(
        rows,
        summary,
        _picture(run_dir / "labels.png"),
        name=run_dir.resolve().name,
        version=version,
        held_out=_held_out(run_dir / "clients.json"),
        fairness=read_fairness(run_dir),
        samples=read_samples(run_dir),
        masks=_picture(run_dir / MASKS),
        data=read_data(run_dir),
        calibration=calibration_section(run_dir),
        baselines=read_baselines(run_dir, summary.get("rounds")),
        by_site=read_site_scores(run_dir),
        sites=site_section(run_dir, rows) if version else None,
    )


def _held_out(path: Path) -> dict[str, int]:
    """The number of held-out rows of each client; empty if not recorded."""
    try:
        found = read_object(path) or {}  # older and deployed runs have none
        return {client: int(sizes["held_out"]) for client, sizes in found.items()}
    except (UserError, ValueError, TypeError, KeyError) as error:
        log.warning("The numbers of rows held out are left out: %s", error)
        return {}


def _picture(path: Path) -> bytes | None:
    """A PNG of the run's folder; None if missing or damaged."""
    try:
        found = read_checked(path)
    except UserError as error:
        log.warning("The picture is left out: %s", error)
        return None
    return None if found is None else found.content


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
    masks: bytes | None = None,
    data: dict[str, Any] | None = None,
    calibration: dict[str, Any] | None = None,
    baselines: Sequence[dict[str, Any]] = (),
    by_site: dict[str, Any] | None = None,
    sites: dict[str, Any] | None = None,
) -> str:
    """The whole page as text; `name` is the title where the configuration names no strategy."""
    title = headline(summary) or name
    charts = make_charts(rows, getattr(method_of(summary.get("config")), "curves", ()))
    audited = summary.get("audited")
    return render_page(
        "run.html",
        title,
        charts=charts + reliability_chart(fairness),
        version=version,
        setting=_setting(summary),
        audit=audit_text(audited) if audited else "",
        completed=summary.get("status", "completed") == "completed",
        rounds=rounds_text(rows, summary),
        scores=_scores(rows, summary),
        labels=png_text(labels) if labels else "",
        metrics=final_metrics(rows, summary),
        stages=_stages(rows),
        samples=[sample_lines(sample) for sample in samples],
        masks=png_text(masks) if masks else "",
        fairness=fairness_section(fairness),
        calibration=calibration,
        baselines=baselines_section(baselines, summary, metric_name(rows)),
        by_site=site_scores_section(by_site),
        sites=sites,
        data=data_section(data),
        gantt=gantt_section(rows),
        clients=_clients(rows, (summary.get("config") or {}).get("num_clients"), held_out or {}),
        failures=[(f"round {row['round']}", str(why)) for row in rows for why in row.get("failures") or []],
        counted_rows=counted(len(rows), "row"),
        by_round=_rounds(rows),
        used=_command(summary),
        details=_details(summary),
    )


def _setting(summary: dict[str, Any]) -> str:
    config = summary.get("config") or {}
    partition, runtime = config.get("partition"), config.get("runtime")
    own_data = isinstance(runtime, dict) and runtime.get("name") == "deployed"  # rows are not partitioned
    words = []
    if config.get("num_clients") is not None:  # unset for sites, which join and leave
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


def _scores(rows: Sequence[Row], summary: dict[str, Any]) -> list[tuple[str, str]]:
    metric = metric_name(rows)
    title = metric_title(metric)
    ended = str(summary.get("status", "completed")).partition(":")[0] in ENDED
    scores = (
        (f"final_test_{metric}", f"{'final' if ended else 'latest'} test {title}", None),
        (f"best_test_{metric}", "best", "best_test_round"),
        (f"selected_test_{metric}", "chosen by validation", "selected_round"),
    )
    found = []
    if summary.get("final_test_perplexity") is not None:
        found.append((f"{number(summary['final_test_perplexity']):.2f}", "final test perplexity"))
    if summary.get("final_test_mae") is not None:
        found.append((f"{number(summary['final_test_mae']):.4g}", f"final test {metric_title('mae')}"))
    for key, label, place in scores:
        if summary.get(key) is not None:
            at = f", round {summary[place]}" if place and summary.get(place) is not None else ""
            found.append((f"{number(summary[key]):.4f}", label + at))
    for way in ("up", "down"):
        if (key := f"total_bytes_{way}") in summary:
            found.append((human_bytes(summary[key]), f"sent {way}, all clients"))
    if not math.isnan(seconds := number(summary.get("seconds"))):
        found.append((human_seconds(seconds), "time"))
    return found


def _stages(rows: Sequence[Row]) -> Table:
    """The cost of a round by stage, which shows what freezing saves."""

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
    head = ["stage", "rounds", "trained parameters", "up per round", "down per round", "time a round"]
    return Table(head, body)


def _clients(rows: Sequence[Row], of_all: int | None, held_out: Mapping[str, int]) -> dict[str, Any] | None:
    """Each client's latest accuracies, as a table of the map. `of_all`: the number of the run's clients."""
    columns = {key: client_values(rows, key) for key in client_keys(rows)}
    if not columns:
        return None
    body = []
    clients = in_order({client for values in columns.values() for client in values})
    if len(clients) > MOST_CLIENTS:
        return _client_bands(columns, len(clients), of_all)
    for client in clients:
        by_column = [values.get(client) or {} for values in columns.values()]
        rounds = {place for values in by_column for place in values}
        cells = [_coarse(last(values)) if values else "" for values in by_column]
        evaluated_on = [str(held_out.get(client, ""))] if held_out else []
        body.append([client, str(len(rounds)), str(max(rounds)), *evaluated_on, *cells])
    evaluated_on = ["rows held out"] if held_out else []
    head = ["client", "rounds", "latest", *evaluated_on, *(CLIENT_VIEWS[key] for key in columns)]
    label, note = f"Every client ({len(body)})", COARSE
    if of_all is not None and len(body) < of_all:
        label = f"{len(body)} of {of_all} clients"
        note += f" {of_all - len(body)} reported nothing: they were never drawn, or hold out no rows."
    return {"label": label, "head": head, "body": body, "note": note}


def _client_bands(
    columns: Mapping[str, Mapping[str, Mapping[int, float]]], clients: int, of_all: int | None
) -> dict[str, Any]:
    """`_clients` for very many clients, as quantiles over them."""
    body = []
    for key, values in columns.items():
        bands = quantiles([last(by_round) for by_round in values.values()])
        if bands:
            body.append([CLIENT_VIEWS[key], f"{len(values):,}", *cells(bands, 2)])
    some = f"{clients:,} clients" if of_all in (None, clients) else f"{clients:,} of {of_all:,} clients"
    note = f"The latest value of each client. {COARSE}"
    return {"label": some, "head": ["", "clients", *QUANTILES], "body": body, "note": note}


def _rounds(rows: Sequence[Row]) -> Table:
    metric = metric_name(rows)
    columns: list[tuple[str, str, Callable[[float], str]]] = [
        (f"test {metric_title(metric)}", f"test_{metric}", _decimal),
        ("test loss", "test_loss", _decimal),
        ("test perplexity", "test_perplexity", _decimal),
        (f"test {metric_title('mae')}", "test_mae", _decimal),
        (f"validation {metric_title(metric)}", f"val_{metric}", _decimal),
        ("validation loss", "val_loss", _decimal),
        ("clients before", "client_val_before", _decimal),
        ("clients after", "client_val_after", _decimal),
        ("train loss", "train_loss", _decimal),
        ("learning rate", "lr", "{:g}".format),
        ("bytes up", "bytes_up", "{:,.0f}".format),
        ("bytes down", "bytes_down", "{:,.0f}".format),
        ("bytes down, cold", "bytes_down_cold", "{:,.0f}".format),
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
    return Table(head, body)


def _coarse(value: float) -> str:
    """Two decimals: a client evaluates on few rows, so more digits would suggest false precision."""
    return "" if math.isnan(value) else f"{value:.2f}"


def _decimal(value: float) -> str:
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e6 else f"{value:.3g}"


def _command(summary: dict[str, Any]) -> str:
    """The run's command, with another output folder."""
    used = summary.get("command", "")
    if not isinstance(used, str):
        used = shlex.join(map(str, used))
    try:
        return shlex.join(repeating(shlex.split(used))) if used else ""
    except ValueError:  # not a shell's command line: shown as it is
        return used


def _details(summary: dict[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    known = ("git_commit", "seed", "device", "machine")
    found = {
        "Code and machine": {key: summary[key] for key in known if summary.get(key) is not None},
        "Full configuration": summary.get("config"),
        "Versions": summary.get("versions"),
    }
    return [(label, flat(values)) for label, values in found.items() if values]
