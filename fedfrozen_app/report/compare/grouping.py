"""Groups runs that differ only in the seed, and finds what distinguishes the groups."""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from fedfrozen_app.core.formatting import flatten

# Seed, name, folder and tracking are not part of the experiment.
NOT_SETTINGS = ("seed", "run_id", "output_dir", "overwrite", "track", "debug")
# Configuration groups whose files may set keys of any section.
WHOLE_FILES = ("experiment", "debug")
SHOWN_DIGITS = 8  # of a content digest
SHOWN = 28  # characters of a value in a label
Settings = dict[str, Any]
Words = dict[str, str]  # the overrides of a run's command, by key


def settings_of(summary: Mapping[str, Any]) -> Settings:
    """Python objects appear by name (`net`), and their content separately: `model.content`."""
    found = {key: value for key, value in flatten(summary["config"]).items() if is_setting(key)}
    for one in summary.get("objects") or ():
        section = next((key.partition(".")[0] for key, value in found.items() if value == one["name"]), None)
        if section is not None:
            found = {key: one["word"] if value == one["name"] else value for key, value in found.items()}
            found[f"{section}.content"] = one["digest"][:SHOWN_DIGITS]
    return found


def is_setting(key: str) -> bool:
    return key.partition(".")[0] not in NOT_SETTINGS


def key_of(summary: Mapping[str, Any]) -> str:
    """A key that is equal for runs that differ only in the seed."""
    return json.dumps(settings_of(summary), sort_keys=True)


def differing_keys(settings: Sequence[Settings]) -> list[str]:
    """The keys that distinguish the groups, names first.

    Where strategies differ, a setting of one of them (strategy.mu) adds nothing, unless it differs
    among the groups of that strategy; the same holds for every section that has a name.
    """
    keys = [key for key in dict.fromkeys(key for flat in settings for key in flat) if is_setting(key)]
    differing = []
    for key in keys:
        section = f"{key.split('.')[0]}.name"
        named = "." in key and key != section
        kinds: dict[str, set[str]] = {}
        for flat in settings:
            kind = str(flat.get(section)) if named else ""
            kinds.setdefault(kind, set()).add(json.dumps(flat[key]) if key in flat else "absent")
        if any(len(values) > 1 for values in kinds.values()):
            differing.append(key)
    return sorted(differing, key=lambda key: (not key.endswith(".name"), key != "strategy.name"))


def words_of(summary: Mapping[str, Any]) -> Words | None:
    """The overrides of the run's command; None if unknown."""
    try:
        words = [word.lstrip("+~").partition("=") for word in shlex.split(summary["command"])[1:]]
    except (KeyError, ValueError, AttributeError, TypeError):
        return None
    return {key: value for key, equals, value in words if equals and is_setting(key)}


def was_chosen(key: str, one: Words | None, other: Words | None) -> bool:
    """Whether two runs differ in `key` by their commands, and not because a method's file sets it."""
    if one is None or other is None:
        return True
    words = {*one, *other}
    asked = [word for word in words if key == word or key.startswith(f"{word}.") or word in WHOLE_FILES]
    return any(one.get(word) != other.get(word) for word in asked)


def label_keys(
    settings: Sequence[Settings], differing: Sequence[str], words: Sequence[Words | None]
) -> list[str]:
    """The keys that name a group: those that the user varied, and of the keys that methods set only those
    needed to distinguish groups."""
    named = {key for found in words if found is not None for key in found}
    known = all(found is not None for found in words) and not named.intersection(WHOLE_FILES)

    def is_varied(key: str) -> bool:
        return not known or key in named or (key.endswith(".name") and key.removesuffix(".name") in named)

    chosen = [key for key in differing if is_varied(key)]
    for key in differing:
        if _distinguished(settings, chosen) == len(settings):
            break
        if key not in chosen and _distinguished(settings, [*chosen, key]) > _distinguished(settings, chosen):
            chosen.append(key)
    return chosen


def _distinguished(settings: Sequence[Settings], keys: Sequence[str]) -> int:
    return len({json.dumps([flat.get(key, "absent") for key in keys], default=str) for flat in settings})


def labels(settings: Sequence[Settings], keys: Sequence[str]) -> list[str]:
    """One label per group; long values are cut, unless two labels would then be equal."""
    short = [label(flat, keys, SHOWN) for flat in settings]
    return short if len(set(short)) == len(short) else [label(flat, keys) for flat in settings]


def label(settings: Settings, keys: Sequence[str], most: int | None = None) -> str:
    """ "fedprox alpha=0.1": groups by name, other keys by their last part where that is unambiguous."""
    if not keys:
        return str(settings.get("strategy.name", "all runs"))
    parts = []
    for key in keys:
        if key not in settings:
            continue
        short = key.rpartition(".")[2]
        clear = sum(other.rpartition(".")[2] == short for other in keys) == 1
        value = shown_value(settings[key], most)
        parts.append(value if short == "name" else f"{short if clear else key}={value}")
    return " ".join(parts)


def shown_value(value: Any, most: int | None = None) -> str:
    found = f"{value:g}" if isinstance(value, float) else "null" if value is None else str(value)
    return found if most is None or len(found) <= most else f"{found[: most - 1]}…"


def sorting(settings: Settings, differing: Sequence[str]) -> list[tuple[float, str]]:
    """Sort key: settings first and strategies last, so that compared groups are adjacent."""
    keys = [key for key in differing if not key.startswith("strategy.")]
    keys += [key for key in differing if key.startswith("strategy.")]
    values = (settings.get(key) for key in keys)
    numeric = (int, float)
    return [
        (float(v), "") if isinstance(v, numeric) and not isinstance(v, bool) else (-1.0, str(v))
        for v in values
    ]
