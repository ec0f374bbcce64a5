"""From folders to a comparison: read the runs, group them by everything but the seed, test them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.files.rows import metric_name, metric_title
from fedfrozen_app.report.compare.baseline import conditions_of, run_tests
from fedfrozen_app.report.compare.grouping import (
    differing_keys,
    key_of,
    label_keys,
    labels,
    settings_of,
    sorting,
    words_of,
)
from fedfrozen_app.report.compare.model import Comparison, Group, Run, Spread, bounds
from fedfrozen_app.report.compare.runs import horizon_of, metrics_of, read_runs, with_target
from fedfrozen_app.report.compare.statistics import spread


def collect(
    folders: Sequence[Path],
    *,
    baseline: Sequence[str] = (),
    target: float | None = None,
    tested: str = "final",
) -> Comparison:
    """Compare the runs in these folders, or below them.

    `baseline` are words such as "strategy=fedavg": each group is tested against the group that has these
    settings and is otherwise the same. Default: strategy=fedavg if such a group exists.
    """
    runs, left_out = read_runs(folders)
    if not runs:
        reasons = ". ".join(f"{folder}: {reason}" for folder, reason in left_out[:3])
        raise UserError(f"There is no finished run to compare here. {reasons}".strip())
    metrics = {metric_name(run.rows) for run in runs}
    if len(metrics) > 1:
        named = " and some ".join({"f1": "F1"}.get(name, metric_title(name)) for name in sorted(metrics))
        raise UserError(f"Some of these runs report {named}: compare them separately.")
    (metric,) = metrics

    settings = {key_of(run.summary): settings_of(run.summary) for run in runs}
    differing = differing_keys(list(settings.values()))
    members = {key: [run for run in runs if key_of(run.summary) == key] for key in settings}
    if target is None:
        target = _reachable(members.values(), metric)
    horizon = horizon_of(runs)
    words = {key: words_of(members[key][0].summary) for key in settings}
    shown = label_keys(list(settings.values()), differing, list(words.values()))
    names = dict(zip(settings, labels(list(settings.values()), shown), strict=True))
    groups = []
    for key in sorted(settings, key=lambda key: sorting(settings[key], shown)):
        measured = [
            with_target(
                replace(run, metrics=metrics_of(run.summary, run.rows, metric)), metric, target, horizon
            )
            for run in members[key]
        ]
        own = {name: settings[key][name] for name in differing if name in settings[key]}
        groups.append(Group(names[key], own, shown, words[key], measured, _spreads(measured, metric)))
    everything = {names[key]: values for key, values in settings.items()}
    first = next(iter(everything.values()))
    common = {
        key: value
        for key, value in first.items()
        if all(key in values and values[key] == value for values in everything.values())
    }
    conditions = conditions_of(baseline, groups)
    tests, notes = run_tests(groups, everything, conditions, tested)
    groups = [replace(group, test=tests.get(group.label)) for group in groups]
    notes += _notes(runs)
    return Comparison(metric, tested, target, horizon, groups, conditions, common, left_out, notes)


def _spreads(runs: Sequence[Run], metric: str) -> dict[str, Spread]:
    names = dict.fromkeys(name for run in runs for name in run.metrics)
    return {
        name: spread(
            {run.seed: run.metrics[name] for run in runs if name in run.metrics}, bounds(name, metric)
        )
        for name in names
    }


def _reachable(groups: Iterable[Sequence[Run]], metric: str) -> float:
    """The highest whole hundredth that every group's mean final metric reaches."""
    means = [sum(run.summary[f"final_test_{metric}"] for run in members) / len(members) for members in groups]
    return math.floor(min(means) * 100) / 100


def _notes(runs: Sequence[Run]) -> list[str]:
    """Notes on differences other than settings, such as versions and devices."""
    notes = []
    for name in dict.fromkeys(name for run in runs for name in run.summary.get("versions") or {}):
        found = {str((run.summary.get("versions") or {}).get(name)) for run in runs}
        if len(found) > 1:
            notes.append(f"The runs were made with different versions of {name}: {', '.join(sorted(found))}.")
    devices = {str(run.summary.get("device")) for run in runs}
    if len(devices) > 1:
        notes.append(f"The runs were made on different devices: {', '.join(sorted(devices))}.")
    commits = {str(run.summary.get("git_commit")) for run in runs}
    if len(commits) > 1:
        notes.append("The runs were made by different commits of this code.")
    totals = ((run.summary.get(f"total_bytes_down{end}") for end in ("", "_cold")) for run in runs)
    if any(cold is not None and sent != cold for sent, cold in totals):
        notes.append("Sites held arrays from earlier runs: bytes down are counted as if they had held none.")
    return notes
