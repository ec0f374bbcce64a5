"""The overrides in a run folder as plain values, composed by stored_config.py.

A separate module without stored_config.py's imports, for `fedfrozen list` and `show`.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from fedfrozen_app.config import quoted
from fedfrozen_app.config.schema import root_defaults
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import flatten, printable

FILE = re.compile(r"\w[\w-]*")  # of a group in conf/: not a path
RESOLVER = "${"


def plain_overrides(run: Path, overrides: Sequence[Any], had: Mapping[str, Any]) -> list[str]:
    """The overrides that set plain values; others are replaced by their values at the time."""
    if not isinstance(had, Mapping):
        raise UserError(f"{printable(str(run))} holds no configuration: give the folder of a run.")
    before = flatten(dict(had))
    for key, value in before.items():
        if RESOLVER in repr(value):
            raise UserError(
                f"The stored configuration of {printable(str(run))} has ${{...}} in {printable(key)}: a run "
                "folder holds plain values; do not use this one."
            )
    found = []
    for override in parsed_overrides(run, overrides):
        key = str(override.key_or_group)
        if key.startswith("hydra"):
            continue
        if not override.is_sweep_override() and RESOLVER not in repr(override.value()):
            _check_group(run, override)
            found.append(str(override.input_line))
        elif key in before:
            found.append(quoted(f"++{key}", before[key]))
    return found


def parsed_overrides(run: Path, overrides: Sequence[Any]) -> list[Override]:
    if not all(isinstance(word, str) for word in overrides):
        raise UserError(f"The overrides of {printable(str(run))} are no texts: give the folder of a run.")
    try:
        return OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        first = printable(str(error).strip().splitlines()[0])
        raise UserError(f"The overrides of {printable(str(run))} cannot be read: {first}") from error


def _check_group(run: Path, override: Override) -> None:
    """Check that a group override names one of our files, or a package's: `dataset=../../evil` would be a
    path."""
    key, value = str(override.key_or_group), override.value()
    is_setting = "." in key or not isinstance(root_defaults().get(key, {}), dict)
    if override.package is not None or "/" in key or not (is_setting or value is None or _is_file(value)):
        raise UserError(
            f"{printable(str(override.input_line))}, an override of {printable(str(run))}, names no file of "
            "conf/: do not use this folder."
        )


def _is_file(value: Any) -> bool:
    return not isinstance(value, str) or FILE.fullmatch(value) is not None
