"""Pages from templates: all text is escaped, and a page is one self-contained file.

Names, paths and failure messages come from users and sites. Jinja escapes them, and a content security policy
allows only our own script and style: unescaped text would still be inert.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from markupsafe import Markup

from fedfrozen_app.files.disk import replace_file
from fedfrozen_app.report.chart_data import Chart
from fedfrozen_app.report.page_assets import page_assets

if TYPE_CHECKING:
    from jinja2 import Environment


class Table(NamedTuple):
    """A table of a page: column titles and rows. The first column is text."""

    head: Sequence[str]
    body: Sequence[Sequence[str]]


@cache
def _templates() -> "Environment":
    from jinja2 import DictLoader, Environment, StrictUndefined  # lazy: only needed when a page is written

    found = Environment(
        loader=DictLoader(page_assets()),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return found


def render_page(
    template: str, title: str, *, charts: Sequence[Chart] = (), version: str = "", **values: Any
) -> str:
    """A whole page. With `version` it is live: it polls its server for a newer version."""
    files = page_assets()
    style, script = files["page.css"], files["page.js"] + (files["live.js"] if version else "")
    policy = "default-src 'none'; img-src data:; "
    policy += f"style-src '{_digest(style)}'; script-src '{_digest(script)}'"
    if version:
        policy += "; connect-src 'self'"
    frame = {"title": title, "drawn": charts, "version": version, "style": style, "script": script}
    return _templates().get_template(template).render(**frame, policy=Markup(policy), **values)


def render_part(template: str, **values: Any) -> Markup:
    """A part of a page, for the page's template."""
    return Markup(_templates().get_template(template).render(**values))


def save(html: str, path: Path) -> None:
    replace_file(path, html)


def linked_cell(text: str, target: str | None) -> str:
    """A cell of a table: the text, linked if there is a target."""
    return text if target is None else Markup('<a href="{}">{}</a>').format(target, text)


def png_text(png: bytes) -> str:
    """A picture encoded for embedding in a page."""
    return base64.b64encode(png).decode()


def flat(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as dotted keys, as in overrides."""
    found = []
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            found += flat(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", text(value)))
    return found


def text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _digest(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
