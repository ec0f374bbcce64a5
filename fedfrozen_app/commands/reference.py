"""docs/commands.md, from the table of verbs: `python -m fedfrozen_app.commands.reference`."""

import os

from fedfrozen_app.core.conf_files import conf_dir
from fedfrozen_app.core.verb_table import GROUPS, VERBS, parser

PAGE = conf_dir().parent / "docs" / "commands.md"
HEAD = """# Commands

`fedfrozen [KEY=VALUE ...]` trains; `fedfrozen -m KEY=A,B` is a sweep; every other use begins with a verb.
This page is the output of `fedfrozen VERB --help` (written by `python -m fedfrozen_app.commands.reference`).
"""


def page() -> str:
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"  # argparse wraps at this width
    try:
        return HEAD + "".join(_group(group, verbs) for group, verbs in GROUPS.items())
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


def _group(group: str, verbs: tuple[str, ...]) -> str:
    listed = [name for verb in verbs for name in VERBS if name == verb or name.startswith(f"{verb} ")]
    return f"\n## {group.capitalize()}\n" + "".join(
        f"\n### {name}\n\n```text\n{parser(name).format_help().rstrip()}\n```\n" for name in listed
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
