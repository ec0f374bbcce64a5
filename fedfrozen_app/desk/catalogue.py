"""The texts of the page, in one file: a hospital translates `texts.yaml` and gives its own with --texts."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.sites.kit import read_yaml

ENGLISH = Path(__file__).parent / "texts.yaml"
PLACE = re.compile(r"\{([a-z_]+)\}")
COMMAND = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Texts:
    """Texts by key. Except for `commands`, a text is plain: the text and its values are escaped."""

    texts: Mapping[str, str]

    def __call__(self, key: str, **values: Any) -> Markup:
        text = COMMAND.sub(r"<code>\1</code>", str(escape(self.texts[key])))
        return Markup(PLACE.sub(lambda found: str(escape(values[found[1]])), text))

    def __contains__(self, key: str) -> bool:
        return key in self.texts


def read_texts(path: Path = ENGLISH) -> Texts:
    """Read a translation; `UserError` if it lacks a text, or a placeholder within one."""
    found = _plain(path)
    if path != ENGLISH:
        for key, text in _plain(ENGLISH).items():
            if key not in found:
                raise UserError(f"{path} lacks the text {key}: translate every text of {ENGLISH}.")
            if set(PLACE.findall(text)) != set(PLACE.findall(found[key])):
                raise UserError(f"{path}: {key} must hold the same words in braces as in {ENGLISH}.")
    return Texts(found)


def _plain(path: Path) -> dict[str, str]:
    found = {str(key): value for key, value in read_yaml(path).items()}
    if wrong := [key for key, value in found.items() if not isinstance(value, str)]:
        raise UserError(f"{path}: {wrong[0]} must be a text: put it in quotes.")
    return found
