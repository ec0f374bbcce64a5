"""docs/python-api.md, from what `fedfrozen` offers: `python -m fedfrozen_app.commands.api.api_page`."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import fedfrozen
from fedfrozen_app.core.conf_files import conf_dir

PAGE = conf_dir().parent / "docs" / "python-api.md"
HEAD = """# Python API

Everything that `import fedfrozen` offers, as its source documents it (written by
`python -m fedfrozen_app.commands.api.api_page`). [Python](python.md) shows how it is used.
"""
# Every name once, in reading order.
SECTIONS = {
    "Calls": ("run", "sweep", "resume", "load", "compare"),
    "What they give": ("Run", "Sweep", "Comparison"),
    "For a method of your own": ("Strategy", "Plan", "Algorithm", "squared_distance", "setting"),
    "What goes wrong": ("UserError", "RunFailed"),
}


def page() -> str:
    return HEAD + "".join(
        f"\n## {title}\n" + "".join(_thing(name, getattr(fedfrozen, name)) for name in names)
        for title, names in SECTIONS.items()
    )


def _thing(name: str, thing: Any) -> str:
    if not inspect.isclass(thing):
        return f"\n### {name}\n\n{_code(_signature(name, thing))}\n{_text(thing)}\n"
    members = "".join(f"\n{_code(line)}\n{text}\n" for line, text in _members(name, thing))
    return f"\n### {name}\n\n{_text(thing)}\n{members}"


def _members(owner: str, thing: type) -> Iterator[tuple[str, str]]:
    """(signature, docstring) of the public members that have a docstring."""
    own = [one for one in reversed(thing.__mro__) if one.__module__.startswith("fedfrozen")]
    for name, found in (item for one in own for item in vars(one).items()):
        if name.startswith("_"):
            continue
        if isinstance(found, (property, cached_property)):
            function = found.fget if isinstance(found, property) else found.func
            if function is not None and function.__doc__:
                yield f"{owner}.{name}: {_returned(function)}", _text(function)
        elif inspect.isfunction(found) and found.__doc__:
            yield _signature(f"{owner}.{name}", found), _text(found)


def _signature(name: str, function: Any) -> str:
    """As the source writes it, without `self`: `run(*overrides: str, **keys: Any) -> Run`."""
    arguments = [one for one in _split(ast.unparse(_node(function).args)) if one and one != "self"]
    line = f"{name}({', '.join(arguments)}) -> {_returned(function)}"
    if len(line) <= 100:
        return line
    each = "".join(f"    {one},\n" for one in arguments)
    return f"{name}(\n{each}) -> {_returned(function)}"


def _split(arguments: str) -> list[str]:
    """Split at the commas between arguments, not at those within one."""
    found, depth = [""], 0
    for sign in arguments:
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and not depth:
            found.append("")
        else:
            found[-1] += sign
    return [one.strip().replace("=", " = ") for one in found]


def _returned(function: Any) -> str:
    returns = _node(function).returns
    return ast.unparse(returns).strip("'") if returns is not None else "Any"


def _node(function: Any) -> ast.FunctionDef:
    node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(node, ast.FunctionDef)
    return node


def _text(thing: Any) -> str:
    return inspect.cleandoc(thing.__doc__ or "")


def _code(line: str) -> str:
    return f"```text\n{line}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
