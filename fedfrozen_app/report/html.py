"""The pieces that the pages are put together from, and the file that needs nothing else.

Names, paths and failure messages come from users and sites, so all text is escaped, and a content
security policy lets only our own script and style run: a slip in the escaping would still be inert.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from fedfrozen_app.files.disk import replace_file
from fedfrozen_app.report.page_files import CSS, LIVE, SCRIPT

Chart = dict[str, Any]


def document(title: str, header: str, main: str, charts: Sequence[Chart], *, version: str = "") -> str:
    """A whole page. With `version` it is a live one, which asks its server for anything newer."""
    script = SCRIPT + LIVE if version else SCRIPT
    policy = f"default-src 'none'; img-src data:; style-src '{_digest(CSS)}'; script-src '{_digest(script)}'"
    if version:
        policy += "; connect-src 'self'"
    # A browser asks a server for an icon, and would complain that there is none.
    icon = '<link rel="icon" href="data:,">\n' if version else ""
    body = f'<body data-version="{escape(version)}">' if version else "<body>"
    badge = '<p class="live">Live: this page follows the run.</p>\n' if version else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
{icon}<title>{escape(title)}</title>
<style>{CSS}</style>
</head>
{body}
{badge}<header>
{header}
</header>
<main>
{main}
</main>
<script id="data" type="application/json">{_embed({"charts": charts})}</script>
<script>{script}</script>
</body>
</html>
"""


def save(html: str, path: Path) -> None:
    replace_file(path, html)


def figures(charts: Sequence[Chart], more: str = "") -> str:
    """The places that the script draws the charts into."""
    drawn = "".join(_figure(index, chart) for index, chart in enumerate(charts))
    warning = '<p class="warn">The charts need JavaScript; their values are in the tables.</p>'
    return f'<noscript>{warning}</noscript>\n<div class="charts">\n{drawn}{more}\n</div>'


def _figure(index: int, chart: Chart) -> str:
    unit = f" <small>{escape(chart['unit'])}</small>" if chart["unit"] else ""
    # Without a series the script leaves the figure alone, so the note is written here.
    drawn = chart.get("series") or chart.get("views")
    note = "" if drawn else f'<p class="note">{escape(chart["note"])}</p>'
    caption = f"<figcaption>{escape(chart['title'])}{unit}</figcaption>"
    wide = ' class="wide"' if chart.get("wide") else ""
    return f'<figure id="chart-{index}"{wide}>{caption}{note}</figure>\n'


def cards(pairs: Iterable[tuple[str, str]]) -> str:
    """The few figures at the top of a page: value, label."""
    made = (
        f'<div class="card"><b>{escape(value)}</b><span>{escape(label)}</span></div>'
        for value, label in pairs
    )
    return f'<div class="cards">{"".join(made)}</div>'


def pairs(rows: Iterable[tuple[str, str]], kind: str = "pairs") -> str:
    lines = (f"<tr><th>{escape(key)}</th><td>{escape(value)}</td></tr>" for key, value in rows)
    return f'<table class="{kind}">{"".join(lines)}</table>'


def table(head: Sequence[str], body: Sequence[Sequence[str]], *, ruled: bool = False) -> str:
    """Numbers, after a first column of text; `ruled`: with a rule where that column changes."""
    return raw_table(head, [[escape(cell) for cell in line] for line in body], ruled=ruled)


def raw_table(head: Sequence[str], body: Sequence[Sequence[str]], *, ruled: bool = False) -> str:
    """The same of cells that are HTML already."""
    top = '<tr><th class="text">' + "</th><th>".join(map(escape, head)) + "</th></tr>"
    texts, before = [], ""
    for first, *rest in body:
        begins = ' class="begins"' if ruled and before not in ("", first) else ""
        cells = "".join(f"<td>{cell}</td>" for cell in rest)
        texts.append(f'<tr{begins}><td class="text">{first}</td>{cells}</tr>')
        before = first
    lines = "".join(texts)
    return f'<table class="numbers"><thead>{top}</thead><tbody>{lines}</tbody></table>'


def box(content: str) -> str:
    return f'<div class="box scroll">{content}</div>'


def fold(label: str, content: str, *, unfolded: bool = False) -> str:
    return (
        f"<details{' open' if unfolded else ''}><summary>{escape(label)}</summary>"
        f'<div class="scroll">{content}</div></details>'
    )


def command(text: str) -> str:
    return f'<div class="box"><pre>{escape(text)}</pre></div>'


def flat(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as dotted keys, which is how they are overridden."""
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


def _embed(data: object) -> str:
    """JSON that no text in it can end early: "<" only ever stands inside JSON strings."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
