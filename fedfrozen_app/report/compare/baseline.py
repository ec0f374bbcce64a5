"""Each group against its baseline: choosing the baseline, the tests, and warnings about them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import yaml

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.report.compare.grouping import Settings, shown_value, was_chosen
from fedfrozen_app.report.compare.model import Group, Test
from fedfrozen_app.report.compare.statistics import ALPHA, MIN_SEEDS, holm, paired, smallest_wilcoxon, verdict

DATA = ("dataset", "partition", "num_clients")  # groups that differ in these have other data
MOST_LISTED = 8  # differences in a sentence


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
    """Tests by label of the group; baselines have none."""
    if len(groups) < 2:
        return {}, []
    if not conditions:
        return {}, ["No baseline was named, so nothing is tested: add --baseline KEY=VALUE."]
    basis = [
        group
        for group in groups
        if all(settings[group.label].get(key) == value for key, value in conditions.items())
    ]
    if not basis:
        settings_text = " ".join(f"{key}={value}" for key, value in conditions.items())
        raise UserError(
            f"None of these runs has the baseline's settings ({settings_text}): name one that some have."
        )
    tests: dict[str, Test] = {}
    beside: dict[tuple[str, ...], list[str]] = {}  # settings that methods bring -> labels of their groups
    notes = []
    for group in groups:
        if group in basis or tested not in group.spreads:
            continue
        pairs = [_pair(group, one, settings, conditions) for one in basis]
        pair = _nearest(group, pairs)
        if pair.refused:
            notes.append(_untested(group, pair))
        elif tested in pair.baseline.spreads:
            ours, theirs = group.spreads[tested].values, pair.baseline.spreads[tested].values
            tests[group.label] = replace(paired(ours, theirs, pair.baseline.label), beside=pair.brought)
            if pair.brought:
                beside.setdefault(tuple(pair.brought), []).append(group.label)
    notes += [_beside_note(names, brought) for brought, names in beside.items()]
    return corrected(tests), notes + _doubts(tests)


@dataclass(frozen=True)
class _Pair:
    """A group and a baseline, and their differences besides the baseline's own settings."""

    baseline: Group
    brought: list[str]  # set by the method's file: the test is of the method with these settings
    refused: list[str]  # chosen by the user, or of the data: prevents a test of the method

    @property
    def differences(self) -> int:
        return len(self.brought) + len(self.refused)


def _pair(group: Group, baseline: Group, settings: Mapping[str, Settings], conditions: Settings) -> _Pair:
    ours, theirs = settings[group.label], settings[baseline.label]
    brought: list[str] = []
    refused: list[str] = []
    for key in sorted(_differing(ours, theirs, conditions)):
        theirs_text = shown_value(theirs[key]) if key in theirs else "absent"
        text = f"{key}={shown_value(ours[key]) if key in ours else 'absent'} (baseline: {theirs_text})"
        of_data = key.partition(".")[0] in DATA
        chosen = of_data or was_chosen(key, group.words, baseline.words)
        (refused if chosen else brought).append(text)
    return _Pair(baseline, brought, refused)


def _differing(one: Settings, other: Settings, conditions: Settings) -> set[str]:
    """The keys in which two groups differ, except the baseline's settings."""
    sections = tuple(f"{key.removesuffix('.name')}." for key in conditions if key.endswith(".name"))
    keys = {key for key in {*one, *other} if key not in conditions and not key.startswith(sections)}
    return {key for key in keys if key not in one or key not in other or one[key] != other[key]}


def _nearest(group: Group, pairs: Sequence[_Pair]) -> _Pair:
    """The baseline most similar to the group; `UserError` if there are several."""
    able = [pair for pair in pairs if not pair.refused] or pairs
    fewest = min(pair.differences for pair in able)
    found = [pair for pair in able if pair.differences == fewest]
    if len(found) > 1 and not found[0].refused:
        raise UserError(
            f"Several groups could be the baseline of '{group.label}' "
            f"({'; '.join(sorted(pair.baseline.label for pair in found))}): "
            "add settings to --baseline until one is left."
        )
    return found[0]


def _untested(group: Group, pair: _Pair) -> str:
    others = any(not text.partition(".")[0].startswith(DATA) for text in pair.refused)
    why = "run the baseline with these settings too" if others else "its data are not the baseline's"
    return f"{group.label} is not tested: beside the method it differs in {_listed(pair.refused)}; {why}."


def _beside_note(names: Sequence[str], brought: Sequence[str]) -> str:
    verb = "is" if len(names) == 1 else "are"
    return (
        f"{', '.join(names)} {verb} tested with the settings that the method brings: {_listed(brought)}. For "
        "the method alone, run the baseline with these settings too."
    )


def _listed(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - MOST_LISTED} more" if len(texts) > MOST_LISTED else ""
    return ", ".join(texts[:MOST_LISTED]) + more


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
