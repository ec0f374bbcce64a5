"""Which keys and names a command line may use, and the sentence for one that it may not.

Uses only the dataclasses, the file names of `conf/` and the table of built-in methods: a typo should not wait
for Hydra or torch to be imported. Other packages are imported only if a key could be theirs.
"""

import contextlib
import difflib
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from fedfrozen_app.config.schema import NAMED, Config, defaults, key_of, sections
from fedfrozen_app.core import registry
from fedfrozen_app.core.conf_files import choices
from fedfrozen_app.core.errors import UserError

SWEEP = {"-m", "--multirun"}
NO_NAMES = {"null", "true", "false"}  # YAML reads them as something else, and Hydra refuses them


# Keys of older versions, and what replaces them.
REPLACED = {"runtime.gpus": "runtime=ray, with runtime.workers=N for so many GPUs"}


def unknown_key(key: str) -> str:
    """The sentence for a key that the configuration does not have."""
    if key in REPLACED:
        return f"The key '{key}' was removed: use {REPLACED[key]}."
    if key.startswith("model.config"):
        return f"The model's file does not set '{key}': write +{key}=VALUE to add it."
    known = known_keys()
    if key in known:  # another file of the group has it
        group, _, name = key.partition(".")
        have = owners(group, name)
        add = f"add {group}={' or '.join(have)}" if have else f"choose another {group}"
        return f"The chosen {group} has no key '{key}': {add}, or leave it out."
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "`fedfrozen --cfg job` lists the keys."
    return f"There is no key '{key}' in this configuration: {hint}"


def unknown_name(group: str, name: str, options: Iterable[str]) -> str:
    """The sentence for a name that no file of a group has.

    A method may lack its line in the table of names, or the file that lets a configuration choose it.
    """
    offered = registry.places(NAMED[group]) if group in NAMED else {}
    if unlisted := registry.not_in_table(NAMED.get(group, ""), name.removeprefix("base_")):
        return unlisted
    if name in registry.BUILT_IN.get(NAMED.get(group, ""), {}):
        return (
            f"{group}={name} is in the table of names but has no file: add conf/{group}/{name}.yaml with "
            f"`defaults: [base_{name}]` to it."
        )
    if name in offered:
        package = offered[name].partition(":")[0].partition(".")[0]
        return (
            f"The installed package '{package}' offers {group}={name} but no file for it: add "
            f"conf/{group}/{name}.yaml with `defaults: [base_{name}]` to it, and in its pyproject.toml, "
            f'under [project.entry-points."fedfrozen.conf"], {package} = "{package}".'
        )
    return f"Unknown {group} '{name}': choose one of {', '.join(sorted(options))}."


def owners(group: str, key: str) -> list[str]:
    """The built-in methods of a named group that have a setting of this name."""
    kind = NAMED.get(group, "")
    return [name for name in registry.BUILT_IN.get(kind, {}) if key in registry.settings_of(kind, name)]


def check_keys(words: Collection[str]) -> None:
    """Raise a `UserError` for an unknown key or name, before anything heavy is composed or imported.

    Hydra refuses the rest: a key that another file of a group has, and everything but plain KEY=VALUE.
    """
    files = choices()
    known = {*known_keys(installed=False), *files}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not re.fullmatch(r"[a-z_][a-z0-9_.]*", key):
            continue
        if key not in known and not key.startswith(("model.config.", "hydra.")) and key not in known_keys():
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


def known_keys(*, installed: bool = True) -> list[str]:
    """Every key that some configuration has, except those of a model's own `config`.

    With `installed`, also those of methods from other packages, which are imported for it.
    """
    nested = sections()
    tree = {
        key_of(name): defaults(nested[name]) if name in nested else value
        for name, value in defaults(Config).items()
    }
    return [*keys_of(tree), *_named_keys(installed)]


def keys_of(node: Any, prefix: str = "") -> list[str]:
    """Dotted keys, including those that hold others."""
    keys = []
    for key, value in node.items():
        keys.append(prefix + key)
        if isinstance(value, dict):
            keys += keys_of(value, f"{prefix}{key}.")
    return keys


def _named_keys(installed: bool) -> Iterator[str]:
    for key, group in NAMED.items():
        for name in registry.names(group) if installed else registry.BUILT_IN[group]:
            with contextlib.suppress(UserError):  # a broken package matters only to a run that names it
                yield from (f"{key}.{found}" for found in registry.settings_of(group, name))
