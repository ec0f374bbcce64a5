"""`fedfrozen verify --repair`: rebuild damaged files from intact ones where possible.

Nothing is deleted: a damaged file that cannot be rebuilt stays, or is renamed to NAME.damaged.
"""

import json
import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedfrozen_app.config import compose_run
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.files import checkpoint, lease, status
from fedfrozen_app.files import folder_manifest as manifest
from fedfrozen_app.files.disk import remove_file, replace_file, whole_file
from fedfrozen_app.files.integrity import Finding, check_folder, write_manifest_again
from fedfrozen_app.files.readers import MISSING
from fedfrozen_app.files.rows import Row, whole_rows
from fedfrozen_app.report.console import headline
from fedfrozen_app.report.curves import write_curves
from fedfrozen_app.report.data_section import brief, read_data
from fedfrozen_app.report.run_page import write_report
from fedfrozen_app.report.summary import stored_summary, summarise

# Left in place when damaged: other files are useless without them, and a backup may restore them.
KEPT = ("model.safetensors", "best.safetensors", "metrics.jsonl")
STATES = {"completed": "complete", "stopped early": "complete", "failed": "failed"}
Repair = Callable[[Path], str]  # returns what was done, as a sentence


def repair_run(folder: Path) -> list[str]:
    """Repair a run. Returns a sentence per repair."""
    status.check_unowned(folder)
    with lease.held(folder):
        done = []
        if sentence := write_manifest_again(folder):
            done.append(sentence)
        bad = {found.name: found for found in check_folder(folder) if found.is_bad}
        for name, repair in REPAIRS.items():
            if name in bad and (sentence := repair(folder)):
                done.append(sentence)
        bad = {found.name: found for found in check_folder(folder) if found.is_bad}
        done += set_aside(folder, list(bad.values()))
        if done or not (folder / "report.html").exists():  # a full disk may have stopped an earlier one
            done += redraw(folder)
    return done


def repair_model(folder: Path) -> str:
    """Restore the model from the checkpoint whose file has the recorded digest."""
    known = manifest.read(folder)
    entry = None if known is None else known.files.get("model.safetensors")
    for number in reversed(checkpoint.numbers(folder / "checkpoints")):
        source = folder / "checkpoints" / str(number) / "model.safetensors"
        if entry is not None and source.is_file() and manifest.file_digest(source) == entry.sha256:
            with whole_file(folder / "model.safetensors") as part:
                shutil.copyfile(source, part)
            return f"model.safetensors was restored from checkpoints/{number}."
    return ""


def repair_summary(folder: Path) -> str:
    """Rebuild the summary from the rows and the newest intact checkpoint, without what only the run knew."""
    found, state = whole_rows(folder), checkpoint.newest_state(folder)
    if found.damage or not found.rows or state is None:
        return ""
    known = status.read(folder)
    summary = summarise(
        found.rows,
        config=state["config"],
        status=_summary_state(known, found.rows, state),
        seconds=sum(row.get("seconds", {}).get("total", 0.0) for row in found.rows),
        device="",
        command=shlex.join(["fedfrozen", *state["overrides"]]),
        selected_round=state["hooks"]["best"]["round"],
    )
    if (data := read_data(folder)) is not None:
        summary["data"] = brief(data)
    # They may belong to another machine.
    summary |= {"device": None, "machine": None, "versions": {}, "git_commit": None, "rebuilt": True}
    replace_file(folder / "summary.json", json.dumps(summary, indent=2))
    return "summary.json was rebuilt from the rows; device, versions and personal metrics are not in it."


def _summary_state(known: status.Status | None, rows: Sequence[Row], state: dict[str, Any]) -> str:
    if known is not None and known.state in ("failed", "interrupted"):
        return known.state
    whole = rows[-1]["round"] >= state["config"]["num_rounds"]
    if known is not None and known.state == "complete":
        return "completed" if whole else "stopped early"
    return "completed" if whole else "interrupted"


def repair_status(folder: Path) -> str:
    known, state = manifest.read(folder), checkpoint.newest_state(folder)
    header = {} if known is None else known.header
    overrides = header.get("overrides") or (state or {}).get("overrides") or []
    digest = header.get("digest") or (status.digest_of(compose_run(overrides).resolved) if overrides else "")
    if not digest:
        return ""
    try:
        summary = stored_summary(folder) or {}
    except UserError:
        summary = {}
    new = STATES.get(str(summary.get("status")), "interrupted")
    status.write(folder, status.Status(digest, overrides, new, ended=status.now()))
    return f"status.json was rebuilt: the run is {new}."


def set_aside(folder: Path, bad: Sequence[Finding]) -> list[str]:
    """Rename damaged files that other files do not need, and record missing ones as missing."""
    done = []
    for found in bad:
        path = folder / found.name
        if found.name in KEPT or "/" in found.name or found.name in REPAIRS:
            continue
        if found.state == MISSING:
            manifest.note_gone(path)
            done.append(f"{found.name} is missing, and is no longer expected.")
            continue
        if not path.is_file():
            continue
        shutil.copyfile(path, path.with_name(f"{found.name}.damaged"))
        remove_file(path)
        done.append(f"{found.name} was set aside as {found.name}.damaged.")
    return done


def redraw(folder: Path) -> list[str]:
    """Redraw curves.png and report.html from intact files."""
    try:
        found, summary = whole_rows(folder), stored_summary(folder)
        if found.damage or summary is None:
            return []
        write_curves(found.rows, folder / "curves.png", title=headline(summary))
        write_report(folder)
    except UserError:
        return []
    return ["curves.png and report.html were drawn again."]


REPAIRS: dict[str, Repair] = {
    "status.json": repair_status,
    "model.safetensors": repair_model,
    "summary.json": repair_summary,
}
