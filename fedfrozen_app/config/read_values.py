"""`read`: a composed configuration as the dataclasses of `schema`, for values that a person wrote.

It converts each section, then applies the rules of `checks`. Values from another machine go through
`read_strict`, which converts nothing, and then meet the same rules.
"""

from copy import copy
from dataclasses import fields, make_dataclass
from functools import cache
from typing import Any, get_type_hints

from fedfrozen_app.config.checks import check_config
from fedfrozen_app.config.convert import convert
from fedfrozen_app.config.schema import Config, sections
from fedfrozen_app.core.errors import UserError


def read(resolved_config: dict[str, Any], *, here: bool = True) -> Config:
    """The typed configuration, checked: types first, then values and combinations.

    With `here`, this machine must also have the files and the device that it names.
    """
    values = {("start_from" if key == "from" else key): value for key, value in resolved_config.items()}
    config = Config(**vars(convert(_root(), _outside_sections(values))), **_by_section(values))
    check_config(config, here=here)
    return config


def _by_section(values: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, kind in sections().items():
        given = values.get(name, {})  # an older run may lack a section: its defaults
        if not isinstance(given, dict):
            first = fields(kind)[0].name
            raise UserError(f"{name} has keys of its own: set one of them, such as {name}.{first}=VALUE.")
        found[name] = convert(kind, given, f"{name}.")
    return found


def _outside_sections(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in sections()}


@cache
def _root() -> type:
    """A dataclass of the fields of `Config` that are no sections."""
    kinds = get_type_hints(Config)
    own = [(one.name, kinds[one.name], copy(one)) for one in fields(Config) if one.name not in sections()]
    return make_dataclass("Root", own)
