"""Which keys and names a command line may use, and the sentence for one that it may not.

From the dataclasses, the file names of `conf/` and the strategies' sources alone: a typo should not wait for
Hydra or torch to be imported.
"""

import contextlib
import difflib
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from fedfrozen_app import registry
from fedfrozen_app.conf_files import choices
from fedfrozen_app.config.schema import NAMED, Config, defaults, key_of, sections
from fedfrozen_app.errors import UserError

SWEEP = {"-m", "--multirun"}
NO_NAMES = {"null", "true", "false"}  # YAML reads them as something else: Hydra says what is wrong


def unknown_key(key: str) -> str:
    """What to say of a key that a configuration does not have."""
    if key.startswith("model.config"):
        return f"The model's file does not set '{key}': write +{key}=VALUE to add it."
    known = known_keys()
    if key in known:  # another file of the group has it
        group = key.partition(".")[0]
        return f"The chosen {group} has no key '{key}': leave it out, or choose another {group}."
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "`fedfrozen --cfg job` lists the keys."
    return f"There is no key '{key}' in this configuration: {hint}"


def unknown_name(group: str, name: str, options: Iterable[str]) -> str:
    """What to say of a name that no file of a group has."""
    return f"Unknown {group} '{name}': choose one of {', '.join(sorted(options))}."


def check_keys(words: Collection[str]) -> None:
    """Refuse a key or a name that no configuration has: before anything is composed or imported that trains.

    A key that another file of a group has is for Hydra to refuse, and so is everything but plain KEY=VALUE.
    """
    files = choices()
    known = {*known_keys(), *files}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not re.fullmatch(r"[a-z_][a-z0-9_.]*", key):
            continue
        if key not in known and not key.startswith(("model.config.", "hydra.")):
            raise UserError(unknown_key(key))
        if key in files and not _brings_files(words):
            _check_names(key, value.split(",") if SWEEP & set(words) else [value], files[key])


def _brings_files(words: Iterable[str]) -> bool:
    return any(word.startswith(("--config", "-cd", "-cp", "hydra.searchpath")) for word in words)


def _check_names(group: str, names: list[str], files: list[str]) -> None:
    added = [name for kind, name in registry.REGISTERED if kind == NAMED.get(group)]
    for name in names:
        plain = re.fullmatch(r"[A-Za-z_]\w*", name) and name not in NO_NAMES
        if plain and name not in (*files, *added):
            raise UserError(unknown_name(group, name, files))


def known_keys() -> list[str]:
    """Every key that some configuration has, but those that a model's own `config` brings."""
    nested = sections()
    tree = {
        key_of(name): defaults(nested[name]) if name in nested else value
        for name, value in defaults(Config).items()
    }
    return [*keys_of(tree), *_named_keys()]


def keys_of(node: Any, prefix: str = "") -> list[str]:
    """Dotted, with those that hold others."""
    keys = []
    for key, value in node.items():
        keys.append(prefix + key)
        if isinstance(value, dict):
            keys += keys_of(value, f"{prefix}{key}.")
    return keys


def _named_keys() -> Iterator[str]:
    for key, group in NAMED.items():
        for name in registry.names(group):
            with contextlib.suppress(UserError):  # of another's package that is broken nobody asked
                yield from (f"{key}.{found}" for found in registry.settings_of(group, name))
