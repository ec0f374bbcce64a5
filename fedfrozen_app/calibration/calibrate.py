"""Calibrate a loaded model: temperature and threshold, evaluated on the test rows."""

import math
from typing import Any

import numpy as np

from fedfrozen_app.calibration.calibration_rows import Part, outputs, parts_of
from fedfrozen_app.calibration.lower_bound import LowerBound, lower_bound
from fedfrozen_app.calibration.masked_sum import MaskedSum, plain_sum
from fedfrozen_app.calibration.private_quantile import PrivateQuantile, private_quantile
from fedfrozen_app.calibration.quantile import conformal_quantile, counter
from fedfrozen_app.calibration.sets import Rule, groups, not_exchangeable, reliability
from fedfrozen_app.calibration.temperature import fit_temperature, part_of
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.local.fair import subgroup_columns
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.tasks.target import Target
from fedfrozen_app.tasks.time_to_event import Cox

# Supported targets: one class, one number, or one time to an event per row.
KINDS = ("image", "text", "table", "regression", "survival", "survival_discrete")
CLIENT, CLASS = "client", "class"
LARGEST_DEVIATION = 0.05  # of the coverage, caused by noise: beyond it, a stated coverage is of little use


def check_task(worker: Worker) -> None:
    kind = worker.task.kind
    if kind not in KINDS:
        raise UserError(
            f"A {kind} model cannot be calibrated: only one class, number or time for each row can."
        )


def rule_of(parts: list[Part], coverage: float, *, classes: bool, masked: MaskedSum | None = None) -> Rule:
    """Compute the rule from sums over the parts only; with `masked`, the sums hide the parts."""
    add, rounding = (plain_sum, 0.0) if masked is None else (masked, masked.rounding)
    temperature = None
    if classes:
        fitted = [part_of(p.logits[p.first], p.labels[p.first].astype(np.int64)) for p in parts]
        some = any(p.first.any() for p in parts)
        temperature = fit_temperature(fitted, add, rounding) if some else 1.0
        parts = [Part(p.name, p.logits[~p.first], p.labels[~p.first], p.first[~p.first]) for p in parts]
    draft = Rule(coverage, 0.0, temperature)
    scores = [draft.scores(part.logits, part.labels) for part in parts]
    count = sum(map(len, scores))
    check_enough(count, coverage)
    threshold = conformal_quantile(coverage, [counter(own) for own in scores], count, add)
    return Rule(coverage, threshold, temperature)


def check_enough(rows: int, coverage: float) -> None:
    least = math.ceil(round(coverage / (1 - coverage), 9))
    if rows < least:
        raise UserError(
            f"{rows} rows are too few for a coverage of {coverage:g}, which needs {least}: hold more out "
            "(dataset.client_validation, dataset.validation), or ask for less."
        )


def time_rule(
    parts: list[Part], coverage: float, target: Target, masked: MaskedSum | None = None
) -> LowerBound:
    """The rule for a target with times; `check_task` has refused other tasks."""
    assert isinstance(target, Cox)
    check_enough(sum(len(part.labels) for part in parts), coverage)
    return lower_bound(parts, coverage, target, plain_sum if masked is None else masked)


def private_rule(
    parts: list[Part], coverage: float, epsilon: float, masked: MaskedSum | None = None
) -> tuple[Rule, PrivateQuantile]:
    """A rule with epsilon for each patient or document: one row of each counts. The temperature stays 1,
    because fitting it would cost epsilon too, and the sets have their coverage at any temperature."""
    draft = Rule(coverage, 0.0, 1.0)
    scores = [
        draft.scores(part.logits, part.labels.astype(np.int64))[
            slice(None) if part.alone is None else part.alone
        ]
        for part in parts
    ]
    found = private_quantile(coverage, scores, epsilon, plain_sum if masked is None else masked)
    if found.deviation > LARGEST_DEVIATION:
        raise UserError(
            f"Noise of epsilon {epsilon:g} would move the coverage by {found.deviation:.0%} and more: hold "
            "more rows out, or give a larger --epsilon."
        )
    return Rule(coverage, found.value, 1.0), found


def calibrate(worker: Worker, source: str, coverage: float, epsilon: float | None = None) -> dict[str, Any]:
    """The content of calibration.json, without the model's digest."""
    check_task(worker)
    target = worker.task.target
    classes = target.has_classes
    if epsilon is not None and not classes:
        raise UserError("--epsilon is for classes: how far off a number or a time may be has no bound.")
    parts = parts_of(worker, source)
    masked = masks_of(worker, source, parts)
    noise: PrivateQuantile | None = None
    rule: Rule | LowerBound
    if target.time_to_event:
        rule = time_rule(parts, coverage, target, masked)
    elif epsilon is None:
        rule = rule_of(parts, coverage, classes=classes, masked=masked)
    else:
        rule, noise = private_rule(parts, coverage, epsilon, masked)
    first = sum(int(part.first.sum()) for part in parts) if classes and noise is None else 0
    rows = sum(len(part.labels) for part in parts) - first
    found: dict[str, Any] = {
        "version": 1,
        **kind_of(target),
        "coverage": coverage,
        "temperature": rule.temperature,
        "threshold": rule.threshold,
        "rows": {
            "source": source,
            "parts": len(parts),
            "temperature": first,
            "quantile": rows if noise is None else noise.numbers,
        },
        "masked": masked is not None,
        "epsilon": epsilon,
        "noise": None if noise is None else noise.deviation,
    }
    table = worker.data.test_table
    if len(table):
        logits, labels = outputs(worker, table)
        by = groups(rule, logits, labels, columns_of(worker, labels), worker.config.dataset.subgroup_floor)
        found |= {"test": by, "notes": not_exchangeable(by, coverage)}
        if isinstance(rule, LowerBound):
            by["all"]["all"]["broken"] = float(rule.broken(logits, labels).mean())
        if rule.temperature is not None and noise is None:
            labels = labels.astype(np.int64)
            found["before"] = reliability(logits, labels, 1.0)
            found["after"] = reliability(logits, labels, rule.temperature)
    return found


def kind_of(target: Target) -> dict[str, Any]:
    if target.time_to_event:
        edges = target.settings.get("edges")
        return {"kind": "time", "edges": None if edges is None else list(edges)}
    return {"kind": "classes" if target.has_classes else "number"}


def masks_of(worker: Worker, source: str, parts: list[Part]) -> MaskedSum | None:
    """Masks for clients' rows, if the run masked its sums: calibration then masks its sums too."""
    settings = worker.config.secure_aggregation
    if settings.name == "off" or source != "clients":
        return None
    return MaskedSum([part.name for part in parts], settings)


def columns_of(worker: Worker, labels: Any) -> dict[str, Any]:
    """Group columns of each test row: its client, class and subgroups."""
    found: dict[str, Any] = {}
    parts = worker.shares.partition
    if worker.shares.test and parts is not None:
        found[CLIENT] = worker.shares.test_clients(len(labels), "")
    if worker.task.target.has_classes:
        found[CLASS] = np.array(worker.corpus.classes, dtype=object)[labels.astype(np.int64)]
    return found | {name: np.asarray(values) for name, values in subgroup_columns(worker).items()}
