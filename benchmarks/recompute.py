"""Recompute every published figure from the rows in benchmarks/results, and compare it with the pages.

    python benchmarks/recompute.py            exit 1, and the lines that differ, unless all pages agree
    python benchmarks/recompute.py --write    write the pages, their appendices and their pictures

docs/results and its appendices are rendered from the templates in benchmarks/pages; parts of README.md and of
some pages of docs too, between two marks (`SECTIONS`). Edit a template, never the page. A template holds no
result as a literal: each is a call of benchmarks/evidence.py. A picture carries the digest of what it shows.
"""

import argparse
import difflib
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from cells import into_page
from evidence import RESULTS, Evidence
from pictures import PICTURES
from PIL import Image, PngImagePlugin

ROOT = Path(__file__).parents[1]
PAGES = Path(__file__).parent / "pages"
SECTIONS = {  # a template, and the two marks of a page between which its text goes
    "claim.md": ("README.md", "claim"),
    "readme.md": ("README.md", "results"),
    "methods.md": ("docs/methods.md", "accuracy"),
    "speed.md": ("docs/methods.md", "speed"),
    "sum-epsilon.md": ("docs/privacy-results.md", "sum epsilon"),
    "sum-scores.md": ("docs/privacy-results.md", "sum scores"),
    "text.md": ("docs/data-text.md", "text figures"),
    "link.md": ("docs/codecs.md", "link"),
    "capsules.md": ("docs/capsule.md", "capsules"),
    "alerts.md": ("docs/monitoring.md", "alerts"),
}
STAMP = "fedfrozen-rows"  # the text chunk of a picture
# What a template must not hold as a literal: an interval, a signed decimal, a decimal in percent or points.
# Calls, code, links, and what is quoted as it was written before the runs.
NOT_PROSE = r"\{% raw %\}.*?\{% endraw %\}|\{\{.*?\}\}|\{%.*?%\}|```.*?```|\]\([^)]*\)"
LITERAL = re.compile(r"±|(?<![\w.])[+\-−]\d+\.\d|\d\.\d+ (?:%|points)|\bp = 0")


def environment(evidence: Evidence) -> jinja2.Environment:
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PAGES),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        autoescape=False,
        finalize=shown,
    )
    found.globals.update(evidence.names())
    return found


def shown(value: Any) -> Any:
    if value is None:
        raise ValueError("a template asks for a comparison that no row has")
    return value


def rendered(evidence: Evidence) -> dict[str, str]:
    """The pages that are wholly generated, by their path."""
    templates = environment(evidence)
    names = sorted(str(path.relative_to(PAGES)) for path in (PAGES / "results").rglob("*.md"))
    return {f"docs/{name}": templates.get_template(name).render().strip() + "\n" for name in names}


def sections(evidence: Evidence) -> dict[tuple[str, str], str]:
    """Parts of pages, by the page's path and the name of the marks."""
    templates = environment(evidence)
    return {
        place: templates.get_template(f"sections/{name}").render().strip() for name, place in SECTIONS.items()
    }


def between(text: str, mark: str) -> str | None:
    found = re.search(f"<!-- {mark}: begin -->\n(.*?)\n<!-- {mark}: end -->", text, re.DOTALL)
    return found[1].strip() if found else None


def digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def stamp(path: Path, value: str) -> None:
    """Write the digest of what a picture shows into the picture."""
    info = PngImagePlugin.PngInfo()
    info.add_text(STAMP, value)
    with Image.open(path) as picture:
        picture.load()
        picture.save(path, pnginfo=info)


def stamped(path: Path) -> str | None:
    if not path.exists():
        return None
    with Image.open(path) as picture:
        picture.load()
        return picture.info.get(STAMP)


def literals() -> Iterator[str]:
    """Results that are typed into a template."""
    for path in sorted(PAGES.rglob("*.md")):
        text = re.sub(NOT_PROSE, "", path.read_text(), flags=re.DOTALL)
        for line in text.splitlines():
            if found := LITERAL.search(line):
                name = path.relative_to(PAGES)
                yield f"benchmarks/pages/{name}: '{found[0]}' is typed, not computed: {line.strip()}"


def differences(name: str, page: str, computed: str) -> Iterator[str]:
    for line in difflib.unified_diff(page.splitlines(), computed.splitlines(), n=0, lineterm=""):
        if line[:1] in "+-" and not line.startswith(("+++", "---")):
            said = "page" if line[0] == "-" else "rows"
            yield f"{name}: the {said} say{'s' * (said == 'page')}: {line[1:]}"


@dataclass(frozen=True)
class Computed:
    """All that is published, from the rows alone."""

    pages: dict[str, str]  # by path
    parts: dict[tuple[str, str], str]  # by path and marks
    pictures: dict[str, Any]  # what each shows

    @classmethod
    def of(cls, results: Path = RESULTS) -> "Computed":
        evidence = Evidence(results)
        pictures = {name: picture.data(evidence) for name, picture in PICTURES.items()}
        return cls(rendered(evidence), sections(evidence), pictures)


def check(computed: Computed, root: Path = ROOT) -> list[str]:
    """What differs: one sentence each."""
    found = list(literals())
    for name, text in computed.pages.items():
        path = root / name
        found += differences(name, path.read_text() if path.exists() else "", text)
    there = {str(path.relative_to(root)) for path in (root / "docs" / "results").rglob("*.md")}
    found += [f"{name}: no template makes this page" for name in sorted(there - computed.pages.keys())]
    for (name, mark), text in computed.parts.items():
        page = between((root / name).read_text(), mark)
        found += (
            [f"{name}: the marks '{mark}' are missing"] if page is None else differences(name, page, text)
        )
    for name, data in computed.pictures.items():
        if stamped(root / "docs" / "figures" / name) != digest(data):
            found.append(f"docs/figures/{name}: the picture shows other figures than the rows hold")
    return found


def write(computed: Computed, root: Path = ROOT) -> None:
    for name, text in computed.pages.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for (name, mark), text in computed.parts.items():
        into_page(root / name, mark, text)
    for name, data in computed.pictures.items():
        path = root / "docs" / "figures" / name
        if stamped(path) != digest(data):
            path.parent.mkdir(parents=True, exist_ok=True)
            PICTURES[name].draw(data, path)
            stamp(path, digest(data))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write pages and pictures, then compare")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the rows")
    parser.add_argument("--root", type=Path, default=ROOT, help="the folder with README.md and docs")
    options = parser.parse_args()
    computed = Computed.of(options.results)
    if options.write:
        write(computed, options.root)
    found = check(computed, options.root)
    for line in found:
        print(line)
    if found:
        sys.exit(1)
    print("Every published figure agrees with its rows.")


if __name__ == "__main__":
    main()
