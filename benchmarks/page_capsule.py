"""A results page as a capsule: its runs, its rows, its template and the code that computes its figures.

    python benchmarks/page_capsule.py write conformal RUNS --out conformal.zip
    python benchmarks/page_capsule.py check conformal.zip --digest HEX

RUNS is the folder that the benchmark trained in. `write` notes file, digest and commit in
benchmarks/results/capsules.json; the file itself goes to the release. `check` exits with 1 and names what
differs: a file that was changed, a figure of the page that its rows do not give, a row that belongs to no run
of the capsule. `fedfrozen reproduce conformal.zip` runs the cells again.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cells import read
from common import RESULTS
from conformal_results import NAME, Conformal
from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from provenance import require_commit
from recompute import PAGES, ROOT, differences, shown

from fedfrozen_app.capsule.crate import About
from fedfrozen_app.capsule.opened import Capsule, open_capsule
from fedfrozen_app.capsule.tampering import inner_problems
from fedfrozen_app.capsule.write import today, write_capsule
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import printable
from fedfrozen_app.files.readers import read_object

LIST = "capsules.json"
CODE = Path(__file__).parent
TEMPLATE, PAGE, ROWS, SCRIPTS = "page/template.md", "page/page.md", "page/rows", "page/code"


@dataclass(frozen=True)
class Page:
    """What a page is computed from."""

    title: str
    path: str  # below docs, and of its template below benchmarks/pages
    rows: tuple[str, ...]  # files of benchmarks/results
    scripts: tuple[str, ...]  # of benchmarks
    names: Callable[[Path], dict[str, Any]]  # what the template calls, from a folder of rows
    strays: Callable[[Path, Mapping[str, dict[str, Any]]], list[str]]  # rows that are of none of these runs


def strays_of_conformal(rows: Path, summaries: Mapping[str, dict[str, Any]]) -> list[str]:
    """A row names the accuracy of the run whose rows it dealt."""
    return [
        f"{NAME}: split {row['split']} of {row['data']} belongs to no run of the capsule"
        for row in read(rows / NAME)
        if summaries.get(row["data"], {}).get("final_test_accuracy") != row["accuracy"]
    ]


STUDIES = {
    "conformal": Page(
        "Coverage of prediction sets",
        "results/appendix/conformal.md",
        (NAME,),
        ("conformal.py", "conformal_results.py", "cells.py", "recompute.py"),
        lambda folder: {"conformal": Conformal(folder)},
        strays_of_conformal,
    )
}


def rendered(page: Page, template: str, rows: Path) -> str:
    """The template may be somebody else's: it calls what the page needs, and reaches nothing beyond."""
    sandbox = ImmutableSandboxedEnvironment(
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        autoescape=False,
        finalize=shown,
    )
    return sandbox.from_string(template).render(page.names(rows)).strip() + "\n"


def files_of(page: Page, root: Path, results: Path) -> dict[str, bytes]:
    """What the capsule holds beside the runs."""
    found = {
        TEMPLATE: (PAGES / page.path).read_bytes(),
        PAGE: (root / "docs" / page.path).read_bytes(),
    }
    found |= {f"{ROWS}/{name}": (results / name).read_bytes() for name in page.rows}
    return found | {f"{SCRIPTS}/{name}": (CODE / name).read_bytes() for name in page.scripts}


def problems_of(capsule: Capsule, page: Page) -> list[str]:
    """Where page, rows and runs of the capsule disagree."""
    rows = capsule.folder / ROWS
    lacking = [name for name in (TEMPLATE, PAGE) if not (capsule.folder / name).is_file()]
    lacking += [f"{ROWS}/{name}" for name in page.rows if not (rows / name).is_file()]
    if lacking:
        return [f"{name} is missing" for name in lacking]
    try:
        computed = rendered(page, (capsule.folder / TEMPLATE).read_text("utf-8"), rows)
    except (TemplateError, ValueError, KeyError, TypeError) as error:
        return [f"{TEMPLATE} cannot be computed from its rows ({printable(str(error))})"]
    found = list(differences(PAGE, (capsule.folder / PAGE).read_text("utf-8"), computed))
    return found + page.strays(rows, {cell: summary_of(capsule, cell) for cell in capsule.cells})


def summary_of(capsule: Capsule, cell: str) -> dict[str, Any]:
    return read_object(capsule.run(cell) / "summary.json") or {}


def other_here(capsule: Capsule, page: Page, root: Path, results: Path) -> list[str]:
    """The files that this checkout has otherwise: a later page, or later rows. No problem by itself."""
    here = files_of(page, root, results)
    return [name for name, content in here.items() if (capsule.folder / name).read_bytes() != content]


def write(name: str, runs: Path, out: Path, root: Path = ROOT, results: Path = RESULTS) -> str:
    """The capsule's digest. Refused where the page does not follow from its rows and these runs."""
    page, commit = STUDIES[name], require_commit()
    about = About(f"fedfrozen: {page.title}", "The fedfrozen authors", "Apache-2.0", today())
    digest = write_capsule(runs, out, about, more=files_of(page, root, results), trusted=True)
    with tempfile.TemporaryDirectory() as work:
        if found := problems_of(open_capsule(out, Path(work)), page):
            out.unlink()
            raise UserError(f"No capsule was written: {found[0]}.")
    known = read_object(results / LIST) or {}
    about_it = {"title": page.title, "page": page.path, "file": out.name}
    known[name] = {**about_it, "digest": digest, "commit": commit}
    (results / LIST).write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    return digest


def check(path: Path, digest: str | None = None, root: Path = ROOT, results: Path = RESULTS) -> int:
    with tempfile.TemporaryDirectory() as work:
        capsule = open_capsule(path, Path(work), digest)
        page = next((one for one in STUDIES.values() if one.title in capsule.record["title"]), None)
        if page is None:
            raise UserError(f"{path} is the capsule of no results page: use fedfrozen reproduce.")
        found = capsule.problems or inner_problems(capsule) or problems_of(capsule, page)
        for line in found:
            print(f"changed: {line}")
        if found:
            return 1
        for name in other_here(capsule, page, root, results):
            print(f"Other in this checkout: {name}")
    print(f"{path}: every figure of the page follows from its rows, and every row is of a run that it holds.")
    print(f"Run them again: fedfrozen reproduce {path} --digest {capsule.digest}")
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("write")
    verb.add_argument("name", choices=STUDIES)
    verb.add_argument("runs", type=Path)
    verb.add_argument("--out", type=Path, required=True)
    verb = verbs.add_parser("check")
    verb.add_argument("file", type=Path)
    verb.add_argument("--digest")
    given = parser.parse_args()
    try:
        if given.verb == "write":
            print(f"Wrote {given.out}, digest {write(given.name, given.runs.resolve(), given.out.resolve())}")
            return
        code = check(given.file, given.digest)
    except UserError as error:
        sys.exit(str(error))
    sys.exit(code)


if __name__ == "__main__":
    main()
