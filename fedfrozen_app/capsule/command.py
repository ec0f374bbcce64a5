"""`fedfrozen capsule SWEEP --out FILE` and `fedfrozen reproduce FILE`."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

from fedfrozen_app.capsule import environment
from fedfrozen_app.capsule.crate import About
from fedfrozen_app.capsule.opened import Capsule, open_capsule
from fedfrozen_app.capsule.rerun import HOLDS, Verdict, configured, run_cell, sampled
from fedfrozen_app.capsule.tampering import find_places, inner_problems
from fedfrozen_app.capsule.write import LOCK, today, write_capsule
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import counted
from fedfrozen_app.core.streams import print_text
from fedfrozen_app.core.verb_table import parse
from fedfrozen_app.files.disk import replace_file


def capsule(arguments: list[str]) -> None:
    given = parse("capsule", arguments)
    folder = Path(given.folder).expanduser().resolve()
    if not folder.is_dir():
        raise UserError(f"There is no run folder {given.folder}: give the folder of a run, or of a sweep.")
    out = given.out.expanduser().resolve()
    if out.exists() or not out.parent.is_dir():
        why = "exists already" if out.exists() else "is in no folder that exists"
        raise UserError(f"--out {given.out} {why}: give another file.")
    about = About(given.title or folder.name, given.author, given.license, today(), given.url)
    digest = write_capsule(folder, out, about, trusted=given.trust_folder)
    print_text(f"Wrote {out} ({out.stat().st_size:,} bytes). Publish its digest beside it: {digest}")


def reproduce(arguments: list[str]) -> int:
    """Returns 1 if a file was changed, or a claim does not hold."""
    given = parse("reproduce", arguments)
    path = given.file.expanduser()
    if not path.is_file():
        raise UserError(f"There is no file {path}: give a capsule.")
    if given.cells is not None and given.cells < 0:
        raise UserError(f"--cells {given.cells} is less than none: give 0 to check digests alone, or more.")
    out = (given.out or Path(f"{path.with_suffix('')}-reproduced")).expanduser().resolve()
    shutil.rmtree(out / "capsule", ignore_errors=True)
    found = open_capsule(path, out / "capsule", given.digest)
    problems = found.problems or inner_problems(found)
    for sentence in problems:
        print_text(f"changed: {sentence}")
    if problems:
        print_text("The capsule is not as it was written: nothing was run.")
        return 1
    print_text(f"{path}: {counted(len(found.record['files']), 'file')} as written, digest {found.digest}")
    tell_environment(found, out)
    chosen = sampled(found, given.cells)
    places, problems = find_places(found, chosen, given.data)
    for sentence in problems:
        print_text(f"changed: {sentence}")
    if problems:
        return 1
    for cell in chosen:  # check all of them before the first one runs
        configured(found, cell, places, out / "runs" / cell, given.trust_folder)
    seconds = sum(found.cells[cell]["seconds"] for cell in chosen)
    listed = f" ({', '.join(chosen)})" if len(chosen) < len(found.cells) else ""
    print_text(
        f"Running {len(chosen)} of {counted(len(found.cells), 'cell')}{listed}: {seconds:,.0f} s there."
    )
    verdicts = []
    for cell in chosen:
        runs = out / "runs" / cell
        verdicts.append(run_cell(found, cell, places, runs, trusted=given.trust_folder))
        print_text(verdicts[-1].sentence)
    return conclude(found, verdicts, out)


def tell_environment(found: Capsule, out: Path) -> None:
    """Report differences between environments: they may explain differing bits, but are no failure."""
    here = environment.lock_differences((found.folder / LOCK).read_text("utf-8"))
    if environment.sources(out / "work") != found.record["code"]["sources"]:
        here.insert(0, "the code of fedfrozen")
    if not here:
        print_text("The environment is the capsule's: the same code and the same versions of all packages.")
        return
    more = f", and {len(here) - 8} more" if len(here) > 8 else ""
    print_text(
        f"Other here than in the capsule: {', '.join(here[:8])}{more}. For the same environment: pip install "
        f"-r {found.folder / LOCK} {found.folder / found.record['code']['wheel']}"
    )


def conclude(found: Capsule, verdicts: list[Verdict], out: Path) -> int:
    bad = [one for one in verdicts if one.result not in HOLDS]
    record = {"capsule": found.digest, "cells": [asdict(one) for one in verdicts], "holds": not bad}
    replace_file(out / "reproduction.json", json.dumps(record, indent=1) + "\n")
    if not verdicts:
        print_text("No cell was run again: only digests and tables were checked.")
    elif bad:
        print_text(f"{len(bad)} of {counted(len(verdicts), 'cell')} do not hold: see {out}/reproduction.json")
    else:
        print_text(f"{counted(len(verdicts), 'cell')} run again, all hold: see {out}/reproduction.json")
    return int(bool(bad))
