"""`python -m fedfrozen_app.config.built_in` writes core/built_in_table.py: what built-in methods declare.

Listing methods and reading their keys must not import them, because that imports torch. The table holds what
is needed for that; a test fails when it is not current.
"""

import json
from pathlib import Path
from typing import Any

from fedfrozen_app.config.schema import NAMED
from fedfrozen_app.core import registry

TABLE = Path(registry.__file__).with_name("built_in_table.py")
HEAD = '''\
"""What built-in methods declare: their first line, paper, settings and defaults.

Written by `python -m fedfrozen_app.config.built_in`: change the classes, and run it again.
"""

# ruff: noqa: E501
from typing import Any

'''


def table_source() -> str:
    """The source of the table, formatted as by `ruff format`."""
    table = {
        group: {name: registry.declared_by(registry.find(group, name)) for name in registry.BUILT_IN[group]}
        for group in NAMED.values()
    }
    return f"{HEAD}DECLARED: dict[str, dict[str, dict[str, Any]]] = {_literal(table)}\n"


def _literal(value: Any, indent: int = 0) -> str:
    """Python source of plain values: one line per key of a dictionary."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(_literal(item, indent) for item in value)}]"
    if not isinstance(value, dict) or not value:
        return repr(value)
    space = " " * 4 * (indent + 1)
    lines = [f"{space}{_literal(key)}: {_literal(item, indent + 1)},\n" for key, item in value.items()]
    return f"{{\n{''.join(lines)}{' ' * 4 * indent}}}"


if __name__ == "__main__":
    TABLE.write_text(table_source(), encoding="utf-8")
