"""Which runs belong together: everything but the seed is the same; and what tells the groups apart."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fedfrozen_app.words import flatten

# Its seed and name, where it was put and who else was told of it say nothing about what a run tried.
NOT_SETTINGS = ("seed", "run_id", "output_dir", "overwrite", "track", "debug")
Settings = dict[str, Any]


def settings_of(summary: Mapping[str, Any]) -> Settings:
    return {key: value for key, value in flatten(summary["config"]).items() if is_setting(key)}


def is_setting(key: str) -> bool:
    return key.partition(".")[0] not in NOT_SETTINGS


def key_of(summary: Mapping[str, Any]) -> str:
    """The same text for runs that differ in nothing but the seed."""
    return json.dumps(settings_of(summary), sort_keys=True)


def differing_keys(settings: Sequence[Settings]) -> list[str]:
    """The keys that tell the groups apart, names first.

    Where strategies differ, a setting of one of them (strategy.mu) tells nothing more, unless it differs
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


def label(settings: Settings, differing: Sequence[str]) -> str:
    """ "fedprox alpha=0.1": names alone, other keys by their last part where that is clear."""
    if not differing:
        return str(settings.get("strategy.name", "all runs"))
    parts = []
    for key in differing:
        if key not in settings:
            continue
        short = key.rpartition(".")[2]
        clear = sum(other.rpartition(".")[2] == short for other in differing) == 1
        value = settings[key]
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        parts.append(shown if short == "name" else f"{short if clear else key}={shown}")
    return " ".join(parts)


def sorting(settings: Settings, differing: Sequence[str]) -> list[tuple[float, str]]:
    """Settings first and strategies last, so that what is to be compared stands together."""
    keys = [key for key in differing if not key.startswith("strategy.")]
    keys += [key for key in differing if key.startswith("strategy.")]
    values = (settings.get(key) for key in keys)
    numeric = (int, float)
    return [
        (float(v), "") if isinstance(v, numeric) and not isinstance(v, bool) else (-1.0, str(v))
        for v in values
    ]
