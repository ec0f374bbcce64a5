"""One sentence out of what Hydra and OmegaConf say in several lines."""

import contextlib
import difflib
import re
from collections.abc import Iterable, Iterator
from typing import Any

from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedfrozen_app import registry
from fedfrozen_app.conf_files import choices
from fedfrozen_app.config.schema import NAMED, Config, key_of
from fedfrozen_app.errors import UserError


def sentence(error: Exception, within: str = "") -> str:
    """One sentence out of Hydra's and OmegaConf's several lines; `within` is where its keys lie."""
    if isinstance(error, OverrideParseException):
        return f"'{error.override}' cannot be read: write KEY=VALUE, without spaces, or quote the value."
    if (swept := re.search(r"Ambiguous value for argument '(.*)'", str(error))) is not None:
        return f"{swept[1]} gives several values: add -m to run each of them, or write a list as [a,b]."
    if isinstance(error, ConfigCompositionException) and isinstance(
        error.__cause__, (HydraException, OmegaConfBaseException)
    ):
        return _unknown_key(error) or sentence(error.__cause__)
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return f"Unknown {group} '{name}': choose one of {', '.join(sorted(error.options))}."
    unknown = _unknown_key(error, within)
    if unknown:
        return unknown
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    key = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("full_key:")), "")
    if "Missing mandatory value" in str(error):
        return f"{key} is not set: add {key}=VALUE to the command."
    first_line = lines[0].rstrip(".")
    return f"{within}{key}: {first_line}." if key else f"{first_line}."


def _unknown_key(error: Exception, within: str = "") -> str:
    found = re.search(r"Could not override '([^']+)'|Key '([^']+)' (?:is )?not in", str(error))
    return unknown_key(within + (found[1] or found[2])) if found else ""


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


def check_keys(words: Iterable[str]) -> None:
    """Refuse a key that no configuration has: at once, before what trains is imported or anything composed.

    A key that another file of a group has is for Hydra to refuse, and so is everything but plain KEY=VALUE.
    """
    known = {*known_keys(), *choices()}
    for word in words:
        key, equals, _ = word.partition("=")
        plain = equals and re.fullmatch(r"[a-z_][a-z0-9_.]*", key)
        if plain and key not in known and not key.startswith(("model.config.", "hydra.")):
            raise UserError(unknown_key(key))


def known_keys() -> list[str]:
    """Every key that some configuration has, but those that a model's own `config` brings."""
    declared = keys_of(OmegaConf.to_container(OmegaConf.structured(Config)))
    return [*(key_of(key) for key in declared), *_named_keys()]


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
