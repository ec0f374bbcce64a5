"""Files, functions and classes of the core stay small enough to be read at once.

Limits: 350 lines a file, 60 a function, a dozen fields a class. A class's fields are those that its body
declares and those that its own methods set on `self`; constants of the class are none. Records whose fields
are the keys of something that people or programs write have one field for each key: they are named below.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "fedfrozen_app"
FILE_LINES, FUNCTION_LINES, FIELDS = 350, 60, 12

# Class: why it has more fields. One that no longer needs its line here fails as well.
MORE_FIELDS = {
    "config/schema/client_section.py ClientConfig": "a field for each key of `client`",
    "config/schema/dataset_section.py DatasetConfig": "a field for each key of `dataset`",
    "config/schema/privacy_section.py PrivacyConfig": "a field for each key of `privacy`",
    "config/schema/run_config.py Config": "a field for each top-level key",
    "config/schema/runtime_section.py RuntimeConfig": "a field for each key of `runtime`",
    "config/schema/secure_section.py SecureAggregationConfig": "a field for each key of `secure_aggregation`",
    "data/sources/raw_rows.py DatasetSpec": "the keys of `dataset` that say how to read it",
    "data/table.py Corpus": "what is known of a data set once it is read; it has no behaviour",
    "files/status.py Status": "a field for each key of status.json",
    "privacy/audit_record.py AuditTotals": "a field for each key of an audited round's file",
    "sites/policy.py Policy": "a field for each key of policy.yaml",
    "sites/views.py View": "a field for each key of a view in views.yaml",
    "theory/problem.py Setting": "a field for each option of `fedfrozen theory`",
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def fields_of(node: ast.ClassDef) -> set[str]:
    """The names of a class's own fields."""
    decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
    declared = {
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign)
        and isinstance(item.target, ast.Name)
        and not ast.unparse(item.annotation).startswith("ClassVar")
        and ("dataclass" in decorators or item.value is None)
    }
    stored = {
        part.attr
        for method in node.body
        if isinstance(method, FUNCTIONS)
        for part in ast.walk(method)
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)
        if isinstance(part.value, ast.Name) and part.value.id == "self"
    }
    return declared | stored


def too_large(path: Path, root: Path) -> Iterator[tuple[str, int]]:
    """What in this file is over a limit, with its size."""
    place, text = path.relative_to(root).as_posix(), path.read_text("utf-8")
    if (lines := len(text.splitlines())) > FILE_LINES:
        yield place, lines
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, FUNCTIONS) and (lines := node.end_lineno - node.lineno + 1) > FUNCTION_LINES:
            yield f"{place} {node.name}()", lines
        if isinstance(node, ast.ClassDef) and (count := len(fields_of(node))) > FIELDS:
            yield f"{place} {node.name}", count


def test_nothing_is_over_a_limit_but_what_is_named():
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 300
    found = dict(item for path in files for item in too_large(path, PACKAGE))
    assert {place: size for place, size in found.items() if place not in MORE_FIELDS} == {}
    assert set(MORE_FIELDS) - set(found) == set(), "these need no exception any more"


def test_the_check_sees_what_it_looks_for(tmp_path):
    stored = "\n".join(f"        self.f{number} = {number}" for number in range(8))
    declared = "\n".join(f"    d{number}: int = 0" for number in range(5))
    long = "def long():\n" + "    print()\n" * FUNCTION_LINES
    text = (
        f"@dataclass\nclass Many:\n    c: ClassVar[int] = 0\n{declared}\n    def set(self):\n{stored}\n{long}"
    )
    path = tmp_path / "planted.py"
    path.write_text(text + "\n" * FILE_LINES)
    assert [place for place, _ in too_large(path, tmp_path)] == [
        "planted.py",
        "planted.py Many",
        "planted.py long()",
    ]
    path.write_text(text.replace("    d4: int = 0\n", "").replace("    print()\n", "", 1))
    assert list(too_large(path, tmp_path)) == []
