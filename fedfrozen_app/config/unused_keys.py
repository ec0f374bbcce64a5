"""Refuse a key that was given and has no effect: nothing that a person writes is ignored in silence.

Each field declares what it needs (`setting(needs=...)`), a whole section by its `NEEDS`. A word that begins
with `++` is exempt: that marks a key of a sweep over settings of which some have no use for it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from fedfrozen_app.config.keys import owners
from fedfrozen_app.config.needs import Needs, written
from fedfrozen_app.config.schema import NAMED, Config, key_of, sections
from fedfrozen_app.config.settings import about
from fedfrozen_app.core import registry
from fedfrozen_app.core.conf_files import file_values
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import flatten

MARK = "++"
NOTHING = {"null", "none", "false", "0", "0.0", "[]", "{}", "''", '""', ""}  # asks for nothing, and gets that
# The key whose value a group's name stands for in `Needs`, where that is not `GROUP.name`.
CHOSEN = {"dataset": "dataset.kind", "model": "model.source"}
REGISTERED = {"dataset": "datasets", "model": "models", "adapter": "adapters", "codec": "codecs"}
REGISTERED["codec.down"] = "codecs"
WHOLE_FILES = ("experiment", "debug")  # groups whose files set keys of any section


def check_used(
    words: Iterable[str], resolved: Mapping[str, Any], *, runtime_known: bool = True, methods: bool = True
) -> None:
    """Raise a `UserError` for the first key among these words, or in the experiment's file, without effect.

    Without `runtime_known` Flower chose where the clients live, and not the configuration. Without `methods`
    the keys of a strategy are left out, whose class would be imported, and torch with it.
    """
    words = list(words)
    given = dict(_given(words))
    for key, value in given.items():
        if value.strip() in NOTHING and key not in sections():
            continue
        if not methods and "." in key and key.partition(".")[0] in NAMED:
            continue
        for need in _needs(key, resolved):
            if (runtime_known or need.key != "runtime") and (found := _unmet(need, resolved)):
                raise UserError(_refusal(key, value, need, found))
    for group in WHOLE_FILES if methods else ():
        if (name := given.get(group)) is not None:
            _check_file(group, name, given, resolved)


def without_marked(words: Iterable[str], resolved: dict[str, Any]) -> dict[str, Any]:
    """The configuration without marked keys (`++strategy.mu=1`) that the chosen method does not have."""
    for word in words:
        group, _, key = word.removeprefix(MARK).partition("=")[0].partition(".")
        if not word.startswith(MARK) or group not in NAMED or not key:
            continue
        chosen = str(resolved[group].get("name"))
        if chosen not in registry.names(NAMED[group]) or key in registry.settings_of(NAMED[group], chosen):
            continue
        if owners(group, key):
            kept = {name: value for name, value in resolved[group].items() if name != key}
            resolved = resolved | {group: kept}
    return resolved


def _given(words: Iterable[str]) -> Iterator[tuple[str, str]]:
    for word in words:
        key, equals, value = word.partition("=")
        if equals and not key.startswith((MARK, "~", "-", "hydra.")):
            yield key.removeprefix("+"), value


def _needs(key: str, resolved: Mapping[str, Any]) -> tuple[Needs, ...]:
    """What a key needs: first what its whole section does."""
    group, _, name = key.partition(".")
    kinds = sections()
    if group in NAMED and name:
        chosen = str(resolved[group].get("name"))
        return _field_needs(registry.find(NAMED[group], chosen).Settings, name)
    if group not in kinds:
        field = next((one.name for one in fields(Config) if key_of(one.name) == key), "")
        return _field_needs(Config, field)
    whole: tuple[Needs, ...] = getattr(kinds[group], "NEEDS", ())
    if not name:  # the group's file is chosen: that is in vain only where another group rules it out
        return tuple(need for need in whole if need.key != group)
    return (*whole, *_field_needs(kinds[group], name.partition(".")[0]))


def _field_needs(kind: type, name: str) -> tuple[Needs, ...]:
    return next((about(one).needs for one in fields(kind) if one.name == name), ())  # type: ignore[arg-type]


def _unmet(need: Needs, resolved: Mapping[str, Any]) -> str:
    """The setting that makes a need unmet, such as "privacy=none"; "" where it is met."""
    states = []
    for key in need.key.split("|"):
        value = _value(CHOSEN.get(key, key if "." in key else f"{key}.name"), resolved)
        known = registry.BUILT_IN.get(REGISTERED.get(key, ""))
        if need.met(value) or (known is not None and value not in known and value != "none"):
            return ""  # what others bring may use any key
        states.append((f"{CHOSEN.get(key, key)}={value}", value))
    # Of two keys one that chooses nothing explains nothing.
    shown = [state for state, value in states if value != "none"] or [states[0][0]]
    return " and ".join(shown)


def _value(key: str, resolved: Mapping[str, Any]) -> str:
    found: Any = resolved
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return written(found)


def _refusal(key: str, value: str, need: Needs, state: str) -> str:
    return (
        f"{state} ignores {key}: add {need.suggestion}, or leave {key} out "
        f"(in a sweep over both, {MARK}{key}={value} says that this is meant)."
    )


def _check_file(group: str, name: str, given: Mapping[str, str], resolved: Mapping[str, Any]) -> None:
    """An experiment's keys, unless the command line itself has replaced what they need."""
    replaced = {*given, *(key.partition(".")[0] for key in given)}
    for key, value in flatten(file_values(group, name)).items():
        if written(value) in NOTHING or key in given:
            continue
        for need in _needs(key, resolved):
            own = {part.partition(".")[0] for part in need.key.split("|")}
            if not own & replaced and (found := _unmet(need, resolved)):
                raise UserError(f"{group}={name}: {_refusal(key, written(value), need, found)}")
