"""`fedfrozen verify RUN|SWEEP [--repair]`: which files are intact, and which can be rebuilt."""

from pathlib import Path

from fedfrozen_app.commands.repair import repair_run
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import counted
from fedfrozen_app.core.streams import print_text
from fedfrozen_app.core.verb_table import parse
from fedfrozen_app.files import checkpoint
from fedfrozen_app.files import folder_manifest as manifest
from fedfrozen_app.files.folders import run_folders
from fedfrozen_app.files.integrity import UNCHECKED, WHOLE, Finding, check_folder
from fedfrozen_app.files.kinds import SWEEP, kind_of
from fedfrozen_app.files.readable import folders_with
from fedfrozen_app.files.readers import Damaged
from fedfrozen_app.report.compare.collect import collect
from fedfrozen_app.report.compare.command import write_all


def verify(arguments: list[str]) -> int:
    """Returns 1 if something is damaged or missing."""
    given = parse("verify", arguments)
    folder = Path(given.folder).expanduser().resolve()
    if not folder.is_dir():
        raise UserError(f"There is no run folder {given.folder}: give the folder of a run, or of a sweep.")
    runs = run_folders([folder])
    sweep = kind_of(folder) == SWEEP
    if not runs and not sweep:
        raise UserError(f"{folder} holds no run: give the folder of a run, or of a sweep.")
    done = {run: repair_run(run) if given.repair else [] for run in runs}
    hidden = [Path(error.filename) for error in folders_with(folder, ())[1]]  # run_folders has named them
    bad = sum(not any(path.is_relative_to(run) for run in runs) for path in hidden)
    for run in runs:
        bad += show(run, check_folder(run), done[run])
    if sweep:
        found = check_folder(folder)
        mended = repair_sweep(folder, runs, found) if given.repair else []
        bad += show(folder, check_folder(folder) if mended else found, mended)
    return int(bad > 0)


def show(folder: Path, found: list[Finding], done: list[str]) -> int:
    """Print what was found, and return how much of it is damaged or missing."""
    whole = [one for one in found if one.state == WHOLE]
    unchecked = [one for one in found if one.state == UNCHECKED]
    bad = [one for one in found if one.is_bad]
    words = [counted(len(whole), "file") + " whole"]
    words += [f"{len(bad)} damaged or missing"] if bad else []
    words += [f"{len(unchecked)} unchecked"] if unchecked else []
    print_text(f"{folder}: {', '.join(words)}")
    for sentence in done:
        print_text(f"  repaired: {sentence}")
    for one in bad:
        print_text(f"  {one.state}: {one.name}{f' ({one.why})' if one.why else ''}; {_advice(folder, one)}")
    if unchecked:
        names = ", ".join(one.name for one in unchecked)
        print_text(
            f"  unchecked: {names} (nothing is recorded of them; --repair records them as they are now)"
        )
    return len(bad)


def _advice(folder: Path, one: Finding) -> str:
    """What can still be done about a damaged file."""
    if one.name in ("checkpoints", "uploads"):
        return "ask its owner for permission"
    if one.name.startswith("checkpoints/"):
        others = [n for n in checkpoint.numbers(folder / "checkpoints") if f"checkpoints/{n}" != one.name]
        return f"resume goes on from round {max(others)}" if others else "the run cannot be resumed from it"
    if one.name.startswith("uploads/"):
        return "remove this folder, and audit leaves the round out"
    return str(Damaged(folder / one.name, one.why or one.state)).partition("): ")[2].rstrip(".") or (
        str(Damaged(folder / one.name, "missing")).partition("missing: ")[2].rstrip(".")
    )


def repair_sweep(folder: Path, runs: list[Path], found: list[Finding]) -> list[str]:
    """Rewrite the comparison of the runs, and record it in the manifest."""
    known = manifest.read(folder)
    if known is None or known.damage:
        manifest.rewrite(folder, manifest.Manifest({"is": manifest.SWEEP}))
    elif not any(one.is_bad for one in found):
        return []
    try:
        write_all(collect(runs), folder)
    except UserError as error:
        return [f"the comparison cannot be written: {error}"]
    names = ", ".join(one.name for one in found if one.is_bad) or manifest.FILE
    return [f"the comparison was written again ({names})."]
