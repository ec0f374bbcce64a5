"""One sentence out of what Hydra and OmegaConf say in several lines."""

import re

from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf.errors import OmegaConfBaseException

from fedfrozen_app.config.keys import unknown_key, unknown_name


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
        return unknown_name(group, name, error.options)
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
