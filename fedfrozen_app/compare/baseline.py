"""Each group against its baseline: which one that is, what the tests say, and when to doubt them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import yaml

from fedfrozen_app.compare.grouping import Settings
from fedfrozen_app.compare.model import Group, Test
from fedfrozen_app.compare.statistics import ALPHA, MIN_SEEDS, holm, paired, smallest_wilcoxon, verdict
from fedfrozen_app.errors import UserError


def conditions_of(words: Sequence[str], groups: Sequence[Group]) -> Settings:
    conditions: Settings = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise UserError(
                f"The baseline '{word}' is no setting: write it as a key and a value, strategy=fedavg."
            )
        conditions[key if "." in key or key in _top_keys(groups) else f"{key}.name"] = yaml.safe_load(value)
    if not conditions and len({group.settings.get("strategy.name") for group in groups}) > 1:
        named = any(group.settings.get("strategy.name") == "fedavg" for group in groups)
        conditions = {"strategy.name": "fedavg"} if named else {}
    return conditions


def _top_keys(groups: Sequence[Group]) -> set[str]:
    config = groups[0].runs[0].summary["config"]
    return {key for key, value in config.items() if not isinstance(value, dict)}


def run_tests(
    groups: Sequence[Group], settings: Mapping[str, Settings], conditions: Settings, tested: str
) -> tuple[dict[str, Test], list[str]]:
    """By label; a baseline has none."""
    if len(groups) < 2:
        return {}, []
    if not conditions:
        return {}, ["No baseline was named, so nothing is tested: add --baseline KEY=VALUE."]
    basis = {
        group.label
        for group in groups
        if all(settings[group.label].get(key) == value for key, value in conditions.items())
    }
    if not basis:
        settings_text = " ".join(f"{key}={value}" for key, value in conditions.items())
        raise UserError(
            f"None of these runs has the baseline's settings ({settings_text}): name one that some have."
        )
    spreads = {group.label: group.spreads for group in groups}
    tests, notes = {}, []
    for group in groups:
        if group.label in basis or tested not in group.spreads:
            continue
        found = [name for name in basis if _alike(settings[name], settings[group.label], conditions)]
        if not found:
            notes.append(
                f"{group.label} is not tested: no baseline run has the same settings in all other respects."
            )
        elif len(found) > 1:
            raise UserError(
                f"Several groups could be the baseline of '{group.label}' ({'; '.join(sorted(found))}): "
                "add settings to --baseline until one is left."
            )
        elif tested in spreads[found[0]]:
            tests[group.label] = paired(
                group.spreads[tested].values, spreads[found[0]][tested].values, found[0]
            )
    return corrected(tests), notes + _doubts(tests)


def _alike(one: Settings, other: Settings, conditions: Settings) -> bool:
    """Whether two groups agree in all that the baseline's settings leave open."""
    sections = tuple(f"{key.removesuffix('.name')}." for key in conditions if key.endswith(".name"))
    keys = {key for key in {*one, *other} if key not in conditions and not key.startswith(sections)}
    return all(key in one and key in other and one[key] == other[key] for key in keys)


def corrected(tests: Mapping[str, Test]) -> dict[str, Test]:
    t = {name: test.t for name, test in tests.items() if test.t is not None}
    wilcoxon = {name: test.wilcoxon for name, test in tests.items() if test.wilcoxon is not None}
    t_holm = dict(zip(t, holm(list(t.values())), strict=True))
    wilcoxon_holm = dict(zip(wilcoxon, holm(list(wilcoxon.values())), strict=True))
    done = {
        name: replace(test, t_holm=t_holm.get(name), wilcoxon_holm=wilcoxon_holm.get(name))
        for name, test in tests.items()
    }
    return {name: replace(test, verdict=verdict(test)) for name, test in done.items()}


def _doubts(tests: Mapping[str, Test]) -> list[str]:
    notes = []
    few = [test for test in tests.values() if test.t is None]
    if few:
        most = max(len(test.seeds) for test in few)
        notes.append(
            f"Too few seeds: with {most} shared with the baseline no test is meaningful; "
            f"run {MIN_SEEDS} or more."
        )
    able = [test for test in tests.values() if test.t is not None]
    if able:
        floor = smallest_wilcoxon(min(len(test.seeds) for test in able), len(able))
        if floor >= ALPHA:
            notes.append(
                f"With so few seeds Wilcoxon's corrected p cannot fall below {floor:.3g}, whatever the data."
            )
    return notes
