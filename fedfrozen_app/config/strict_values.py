"""`read_strict`: values that another machine sent, as a dataclass; for the site boundary.

Nothing is converted, resolved or looked up, and an unknown key is an error. `read` is the counterpart for
values that a person wrote on the same machine. Both share the bounds that each field declares.
"""

import types
from collections.abc import Collection, Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, fields
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fedfrozen_app.config.settings import MISSING, first_complaint

T = TypeVar("T")


def read_strict(
    kind: type[T], given: Any, where: str = "", *, without: Collection[str] = (), whole: bool = False
) -> T:
    """The dataclass, every value of its field's type; a `ValueError` names the first one that is not.

    Keys may be left out where the field has a default, unless `whole`. Fields in `without` cannot be given.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"{where.rstrip('.') or 'it'} is no mapping")
    known = {found.name: found for found in fields(kind) if found.name not in without}  # type: ignore[arg-type]
    for key in given:
        if key not in known:
            raise ValueError(f"{where.rstrip('.') or 'it'} has a key that is not known")
    hints = get_type_hints(kind)
    values = {}
    for name, found in known.items():
        if name in given:
            values[name] = _fitting(given[name], hints[name], f"{where}{name}")
        elif whole or not _has_default(found):
            raise ValueError(f"{where}{name} is missing")
    if (complaint := first_complaint(kind, values)) is not None:
        raise ValueError(f"{where}{complaint[0]} is out of bounds")
    return kind(**values)


def _has_default(found: Field) -> bool:
    return found.default_factory is not NO_DEFAULT or found.default not in (NO_DEFAULT, MISSING)


def _fitting(value: Any, hint: Any, where: str) -> Any:
    """The value as a field of this type holds it; whole numbers may stand for floats."""
    if hint is Any:
        return value
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        for one in inner:
            try:
                return _fitting(value, one, where)
            except ValueError:
                continue
    elif origin is Literal:
        if value in inner:
            return value
    elif origin in (list, tuple):
        if isinstance(value, (list, tuple)):
            items = [_fitting(item, inner[0] if inner else Any, where) for item in value]
            return items if origin is list else tuple(items)
    elif hint in (list, tuple):
        if isinstance(value, (list, tuple)):
            return hint(value)
    elif origin is dict or hint is dict:
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            of = inner[1] if inner else Any
            return {key: _fitting(item, of, where) for key, item in value.items()}
    elif hint is type(None):
        if value is None:
            return None
    elif hint is float:
        if type(value) in (int, float):
            return float(value)
    elif isinstance(hint, type) and type(value) is hint:  # a bool is no int here
        return value
    raise ValueError(f"{where} is of another type")
