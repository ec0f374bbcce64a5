"""One sentence in place of the several lines of a Hydra or OmegaConf error."""

import re

from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from fedfrozen_app.config.keys import unknown_key, unknown_name
from fedfrozen_app.config.schema import NAMED
from fedfrozen_app.core import registry


def sentence(error: Exception, within: str = "") -> str:
    """The error in one sentence; `within` precedes the keys that it names, such as `client.`."""
    if isinstance(error, OverrideParseException):
        return _unread(str(error.override))
    if (swept := re.search(r"Ambiguous value for argument '(.*)'", str(error))) is not None:
        return f"{swept[1]} gives several values: add -m to run each of them, or write a list as [a,b]."
    if isinstance(error, ConfigCompositionException) and isinstance(
        error.__cause__, (HydraException, OmegaConfBaseException)
    ):
        return _unknown_key(error) or sentence(error.__cause__)
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return unknown_name(group, name, error.options)
    if (inherited := re.search(r"In '(.+)': Could not load '(.+)/base_(\w+)'", str(error))) is not None:
        return _unknown_base(*inherited.groups())
    unknown = _unknown_key(error, within)
    if unknown:
        return unknown
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    key = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("full_key:")), "")
    if isinstance(error, MissingMandatoryValue):
        return f"{within}{key} is not set: add {within}{key}=VALUE to the command."
    first_line = lines[0].rstrip(".")
    return f"{within}{key}: {first_line}." if key else f"{first_line}."


def _unread(override: str) -> str:
    """Hydra's grammar gives brackets, commas and the like a meaning: a path that has them needs quotes."""
    key, equals, value = override.partition("=")
    if not equals or not value.strip() or key != key.strip() or set("'\"$") & set(value):
        return f"'{override}' cannot be read: write KEY=VALUE, without spaces, or quote the value."
    return f"'{override}' cannot be read: put the value in quotes, and all of it: \"{key}='{value}'\"."


def _unknown_base(file: str, group: str, name: str) -> str:
    unlisted = registry.not_in_table(NAMED.get(group, ""), name)
    return unlisted or (
        f"conf/{file}.yaml inherits base_{name}, but no {group} is called '{name}': the name after base_ "
        "must be in the table of names (fedfrozen_app/core/registry.py) or a package's entry point."
    )


def _unknown_key(error: Exception, within: str = "") -> str:
    found = re.search(r"Could not override '([^']+)'|Key '([^']+)' (?:is )?not in", str(error))
    return unknown_key(within + (found[1] or found[2])) if found else ""
