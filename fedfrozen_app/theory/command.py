"""`fedfrozen theory [OVERRIDES]`: one setting of the laboratory, its table, or all figures and their page."""

import json
import logging
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.table import Table

from fedfrozen_app.config import sentence, with_hydra
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import counted
from fedfrozen_app.core.terminal import Console
from fedfrozen_app.files.disk import replace_file
from fedfrozen_app.files.kinds import check_is_neither
from fedfrozen_app.report.summary import git_commit, versions
from fedfrozen_app.theory.controls import calm, controls, record, sweep
from fedfrozen_app.theory.descent import Walk, agreements, auto_stops, explore, measure, objective, walk
from fedfrozen_app.theory.problem import Setting, make
from fedfrozen_app.theory.studies import (
    TABLE_WARMUPS,
    TableCheck,
    all_settings,
    check_table,
    default_rule,
    describe,
    freeze_value,
    table_settings,
)
from fedfrozen_app.theory.theory_page import CONTROL_HEAD, control_row, write_controls, write_page

log = logging.getLogger(__name__)
# Default numbers of seeds: few for one setting, more for studies that are evaluated.
SEEDS = {"run": 3, "table": 10, "all": 10, "controls": 100}
STUDIES = tuple(SEEDS)
LEAST_SEEDS = {"all": 10, "controls": 4}  # some seeds choose the best fixed warm-up, the others evaluate it


@dataclass
class TheoryConfig:
    study: str
    seeds: int
    output_dir: str | None
    results: str | None
    warmup_rounds: int | str | None
    setting: Setting


def theory(arguments: list[str]) -> None:
    """The verb; a Hydra multirun with -m."""
    failed: list[UserError] = []

    def job(composed: DictConfig) -> float | None:
        try:
            config = read(composed)
            folder = Path(config.output_dir or HydraConfig.get().runtime.output_dir).resolve()
            check_is_neither(folder, "a theory study")
            folder.mkdir(parents=True, exist_ok=True)
            return WORK[config.study](config, folder)
        except UserError as error:
            failed.append(error)
            return None

    with_hydra(job, arguments, name="theory", verb="theory")
    if failed:
        raise failed[0]


def read(composed: DictConfig) -> TheoryConfig:
    resolved_config = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(resolved_config, dict)
    names = {field.name for field in fields(Setting)}
    try:
        typed = OmegaConf.merge(
            OmegaConf.structured(Setting),
            {str(key): value for key, value in resolved_config.items() if key in names},
        )
        setting = OmegaConf.to_object(typed)
    except OmegaConfBaseException as error:
        raise UserError(sentence(error)) from error
    assert isinstance(setting, Setting)
    own = {key: resolved_config[key] for key in ("study", "seeds", "output_dir", "results", "warmup_rounds")}
    if own["study"] not in STUDIES:
        raise UserError(f"study={own['study']} is unknown: choose one of {', '.join(STUDIES)}.")
    if own["seeds"] is None:
        own["seeds"] = SEEDS[own["study"]]
    config = TheoryConfig(**own, setting=setting)
    if not isinstance(config.seeds, int) or config.seeds < 1:
        raise UserError(f"seeds={config.seeds} must be a number of at least 1.")
    if config.study in LEAST_SEEDS and config.seeds < LEAST_SEEDS[config.study]:
        raise UserError(
            f"seeds={config.seeds} is too few for study={config.study}, which evaluates on "
            f"{LEAST_SEEDS[config.study]} or more."
        )
    warmup = config.warmup_rounds
    if not (warmup in (None, "auto") or (isinstance(warmup, int) and 0 <= warmup <= setting.rounds)):
        raise UserError(
            f"warmup_rounds={warmup} must be auto, null, or lie between 0 and rounds={setting.rounds}."
        )
    return config


# One setting -----------------------------------------------------------------------------------------------


def run_one(config: TheoryConfig, folder: Path) -> float:
    """All seeds of one setting: one row per round in metrics.jsonl, means over the seeds. Returns final F."""
    setting, seeds = config.setting, tuple(range(config.seeds))
    problem = make(setting, seeds)
    walked = walk(problem, watched=True)
    agreement = agreements(walked)
    found = auto_stops(setting, walked, objective(problem, walked), default_rule(setting))
    # The squared common movement, estimated from one round's sums.
    signal = walked.kernel_common - walked.kernel_drift / max(setting.cohort - 1, 1)
    fixed = config.warmup_rounds
    stops = (
        [fixed] * len(seeds) if isinstance(fixed, int) else found if fixed == "auto" else [None] * len(seeds)
    )
    if any(stop is not None and stop < setting.rounds for stop in stops):
        # Seeds may freeze at different rounds: each continues from its own.
        parts = []
        for seed, stop in zip(seeds, stops, strict=True):
            own, whole = (
                make(setting, (seed,)),
                Walk(*(getattr(walked, f.name)[[seed]] for f in fields(Walk))),
            )
            parts.append(whole if stop is None else _frozen(own, whole, stop))
        walked = Walk(*(torch.cat([getattr(p, f.name) for p in parts]) for f in fields(Walk)))
    measures = measure(problem, walked)
    nothing = torch.zeros(len(seeds), 1, dtype=torch.float64)
    columns = {field.name: getattr(measures, field.name) for field in fields(measures)}
    for name in ("kernel_drift", "value_drift"):
        columns[name] = torch.cat([nothing, getattr(walked, name).sqrt()], dim=1)
    rows = []
    for number in range(setting.rounds + 1):
        frozen = sum(stop is not None and number > stop for stop in stops)
        row: dict[str, Any] = {"round": number, "seeds_frozen": frozen}
        row |= {name: values[:, number].mean().item() for name, values in columns.items()}
        if number:
            row["agreement"] = agreement[:, number - 1].mean().item()
            if setting.cohort > 1:
                row["signal"] = signal[:, number - 1].mean().item()
        rows.append(json.dumps(row) + "\n")
    replace_file(folder / "metrics.jsonl", "".join(rows))
    final = measures.objective[:, -1]
    summary = {
        "final_objective": final.mean().item(),
        "final_profile": measures.profile[:, -1].mean().item(),
        "final_objective_by_seed": final.tolist(),
        "warmup_rounds_by_seed": stops,
        "setting": asdict(setting),
        **_about(),
    }
    replace_file(folder / "summary.json", json.dumps(summary, indent=2))
    log.info("%s: F = %.4f after %d rounds. %s", describe(setting), final.mean(), setting.rounds, folder)
    return summary["final_objective"]


def _frozen(problem: Any, whole: Walk, stop: int) -> Walk:
    tail = walk(problem, start=stop, origin=whole, train="value")
    joined = {}
    for field in fields(Walk):
        before, after = getattr(whole, field.name), getattr(tail, field.name)
        at = stop + 1 if field.name in ("kernel", "value") else stop
        joined[field.name] = torch.cat([before[:, :at], after[:, at - stop :]], dim=1)
    return Walk(**joined)


# The table, and everything ---------------------------------------------------------------------------------


def run_table(config: TheoryConfig, folder: Path) -> float:
    """Compute the toy table and compare it with the reference; raises if a clear difference has another
    sign."""
    began = time.perf_counter()
    outcomes = explore(table_settings().values(), range(config.seeds))
    check = check_table(outcomes)
    show_table(check, config.seeds)
    record = {
        "rows": [{"heterogeneity": h, "local_steps": t, "final": row} for (h, t), row in check.rows.items()],
        "warmups": TABLE_WARMUPS,
        "compared": check.compared,
        "wrong": check.wrong,
        "finite": check.finite,
        "seconds": time.perf_counter() - began,
        **_about(),
    }
    replace_file(folder / "table.json", json.dumps(record, indent=2))
    if not check.passed:
        raise UserError(f"The table differs from the reference: {'; '.join(check.wrong) or 'not finite'}.")
    return float(len(check.wrong))


def show_table(check: TableCheck, seeds: int) -> None:
    table = Table("heterogeneity, local steps", *(f"T_w={warmup}" for warmup in TABLE_WARMUPS))
    table.title = f"Final F, mean of {counted(seeds, 'seed')}"
    for (level, steps), row in check.rows.items():
        best = min(row)
        cells = (f"[bold]{value:.3f}[/]" if value == best else f"{value:.3f}" for value in row)
        table.add_row(f"{level:g}, {steps}", *cells)
    console = Console()
    console.print(table)
    console.print(
        f"{check.compared - len(check.wrong)} of {check.compared} clear differences have the sign of the "
        f"reference; every run finite: {'yes' if check.finite else 'no'}."
    )


def run_all(config: TheoryConfig, folder: Path) -> float:
    """Every figure, and the page that explains them."""
    began = time.perf_counter()
    seeds = range(config.seeds)
    outcomes = explore(all_settings(), seeds)
    value_frozen = freeze_value(seeds)
    log.info("All settings walked in %.0f s; drawing.", time.perf_counter() - began)
    results = Path(config.results) if config.results else Path(__file__).parents[2] / "benchmarks" / "results"
    page = write_page(folder, outcomes, value_frozen, results, _about())
    check = check_table(outcomes)
    show_table(check, config.seeds)
    log.info("Written in %.0f s: %s", time.perf_counter() - began, page)
    return float(len(check.wrong))


def run_controls(config: TheoryConfig, folder: Path) -> float:
    """The controls: figures, their page, and the mean gain of the best warm-up."""
    began = time.perf_counter()
    lines = controls()
    found = sweep([line.setting for line in lines], range(config.seeds))
    records = [record(line, found[line.setting]) for line in lines]
    about = {"seeds": config.seeds, "seconds": time.perf_counter() - began, **_about()}
    page = write_controls(folder, records, calm(lines, found), about)
    table = Table(*CONTROL_HEAD, title=f"Final F, mean of {counted(config.seeds, 'seed')}")
    for line in records:
        table.add_row(*control_row(line))
    Console().print(table)
    log.info("Written in %.0f s: %s", time.perf_counter() - began, page)
    return sum(line["best_against_never"][0] for line in records) / len(records)


def _about() -> dict[str, Any]:
    return {"command": " ".join(sys.argv), "versions": versions(), "git_commit": git_commit()}


WORK = {"run": run_one, "table": run_table, "all": run_all, "controls": run_controls}
