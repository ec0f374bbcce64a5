"""Names of arrays.

A parameter has its own name. An array that a method keeps for it, such as a control variate, is named
`namespace/name`, has the parameter's role and shape, and follows the plan in the same way.
"""

from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")
PARAMETERS = ""  # means the parameters in a list of namespaces


def with_namespace(namespace: str, name: str) -> str:
    return f"{namespace}/{name}"


def parameter_of(name: str) -> str:
    """The parameter that an array belongs to."""
    return name.rpartition("/")[2]


def namespace_of(name: str) -> str:
    """Empty for a parameter, whose name has no slash."""
    return name.rpartition("/")[0]


def is_parameter(name: str) -> bool:
    return "/" not in name


def parameters_in(arrays: Mapping[str, T]) -> dict[str, T]:
    return {name: value for name, value in arrays.items() if is_parameter(name)}


def by_namespace(arrays: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """{namespace: {name: array}} of all arrays except parameters."""
    found: dict[str, dict[str, T]] = {}
    for name, value in arrays.items():
        space, _, named = name.rpartition("/")
        if space:
            found.setdefault(space, {})[named] = value
    return found


def flattened(spaces: Mapping[str, Mapping[str, T]]) -> dict[str, T]:
    """The inverse: arrays by `namespace/name`."""
    return {
        with_namespace(space, name): value for space, named in spaces.items() for name, value in named.items()
    }


def names_in_namespaces(namespaces: Iterable[str], names: Iterable[str]) -> list[str]:
    """The array names of each namespace, for each parameter name."""
    known = tuple(names)
    return [with_namespace(space, name) for space in namespaces for name in known]
