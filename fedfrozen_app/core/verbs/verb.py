"""What a verb declares: its purpose, its arguments, examples."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Declared = tuple[tuple[str, ...], Mapping[str, Any]]  # the arguments of `add_argument`


@dataclass(frozen=True)
class Verb:
    summary: str  # one sentence: what it is for
    words: tuple[Declared, ...] = ()
    examples: tuple[str, ...] = ()
    more: str = ""  # a second paragraph


def word(*names: str, **options: Any) -> Declared:
    return names, options


RUN = word("run", metavar="RUN", help="the folder of a run's results")
TRUST = "--trust-folder"
TRUSTED = word(
    TRUST,
    action="store_true",
    help="use a database, the hub, a server or a package that only this folder names",
)
JSON = word("--json", action="store_true", help="for scripts")
