"""What a class declares, read off its source: the import would bring torch, and take seconds.

Only what stands there plainly can be read so: names, and values that are literals. For all else the answer
is None, and whoever asks must import.
"""

import ast
import importlib.util
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

Place = tuple[str, ast.ClassDef]  # a module's name, and a class in it


@lru_cache(maxsize=64)
def tree_of(module: str) -> ast.Module | None:
    """A module's source, parsed; None where it has none, or is not there."""
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:
        return None
    if spec is None or not (spec.origin or "").endswith(".py"):
        return None
    return ast.parse(Path(str(spec.origin)).read_text(encoding="utf-8"))


def find_class(module: str, name: str) -> Place | None:
    """The class that a name (`Settings`, `base.Settings`) stands for in a module, wherever it is from."""
    tree = tree_of(module)
    if tree is None:
        return None
    head, _, rest = name.partition(".")
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for known in node.names:
                if (known.asname or known.name) == head:
                    if rest:
                        return find_class(f"{node.module}.{known.name}", rest)
                    return find_class(node.module, known.name)
    return None


def summary(module: str, name: str) -> tuple[str, str] | None:
    """(the first line of a class's text, the value of its `paper`)."""
    found = find_class(module, name)
    if found is None:
        return None
    says = (ast.get_docstring(found[1]) or "").partition("\n")[0]
    return says, str(dict(_assigned(found[1])).get("paper", ""))


def settings(module: str, name: str) -> dict[str, Any] | None:
    """Field -> default of the dataclass that a class or one of its bases calls its `Settings`."""
    found = find_class(module, name)
    if found is None:
        return None
    module, node = found
    for statement in node.body:
        if _targets(statement) == ["Settings"] and isinstance(statement, (ast.Assign, ast.AnnAssign)):
            return None if statement.value is None else _defaults(module, ast.unparse(statement.value))
    for base in node.bases:
        if (inherited := settings(module, ast.unparse(base))) is not None:
            return inherited
    return None


def _defaults(module: str, name: str) -> dict[str, Any] | None:
    found = find_class(module, name)
    if found is None:
        return None
    module, node = found
    values: dict[str, Any] = {}
    for base in reversed(node.bases):  # as dataclasses collect them
        inherited = _defaults(module, ast.unparse(base))
        if inherited is None:
            return None
        values |= inherited
    try:
        return values | {field: _literal(module, given) for field, given in _fields(node)}
    except ValueError:
        return None  # worked out by code


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr | None]]:
    """Names and defaults of a dataclass's fields; of `setting(DEFAULT, ...)` its default."""
    for statement in node.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        given = statement.value
        if isinstance(given, ast.Call) and ast.unparse(given.func) == "setting" and given.args:
            given = given.args[0]
        if not ast.unparse(statement.annotation).startswith("ClassVar"):
            yield statement.target.id, given


def _literal(module: str, given: ast.expr | None) -> Any:
    """A literal, or the literal default of another class's field (`Rule.window`); else a ValueError."""
    if isinstance(given, ast.Attribute):
        found = find_class(module, ast.unparse(given.value))
        if found is not None:
            return _literal(found[0], dict(_fields(found[1])).get(given.attr))
    if given is None:
        raise ValueError("it has no default")
    return ast.literal_eval(given)


def _assigned(node: ast.ClassDef) -> Iterator[tuple[str, Any]]:
    for statement in node.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
            for target in _targets(statement):
                yield target, statement.value.value


def _targets(statement: ast.stmt) -> list[str]:
    """The names that a statement gives a value, with or without a type beside them."""
    targets: list[ast.expr] = statement.targets if isinstance(statement, ast.Assign) else []
    if isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]
