"""`fedfrozen list [DIR...]` and `fedfrozen show RUN`: the existing runs, and one run in detail."""

import shlex
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import counted, flatten
from fedfrozen_app.core.terminal import Console
from fedfrozen_app.files import status
from fedfrozen_app.files.folders import run_folders
from fedfrozen_app.files.integrity import quick_look
from fedfrozen_app.files.kinds import check_is_run
from fedfrozen_app.files.rows import read_rows
from fedfrozen_app.report.console import human_bytes, show_end
from fedfrozen_app.sweep.sweep_table import read_summary, result_cells, state_of, summary_or_damage

USUAL = Path("outputs")


def list_runs(arguments: list[str]) -> None:
    """List the runs below these folders, by default below outputs/."""
    folders = [Path(word) for word in arguments] or [USUAL]
    if not arguments and not USUAL.is_dir():
        raise UserError(
            "There is no outputs/ here: give the folder that holds your runs, fedfrozen list DIR."
        )
    found = run_folders(folders)
    if not found:
        raise UserError(f"There is no run below {', '.join(map(str, folders))}: give another folder.")
    console = Console()
    for parent in dict.fromkeys(folder.parent for folder in found):
        console.print(runs_table(parent, [folder for folder in found if folder.parent == parent]))


def runs_table(parent: Path, folders: list[Path]) -> Table:
    """Runs side by side: those of a day, or of a sweep."""
    table = Table(title=Text(_relative_path(parent)), title_justify="left")
    for title in ("run", "strategy", "data", "seed", "final test", "sent up", "time", "status"):
        right = title in ("seed", "final test", "sent up")
        table.add_column(title, justify="right" if right else "left", overflow="fold")
    for folder in folders:
        summary, damage = summary_or_damage(folder)
        config = summary.get("config") or _configuration(folder)
        names = [str((config.get(group) or {}).get("name", "")) for group in ("strategy", "dataset")]
        state = run_state(folder, summary).partition(":")[0]  # `show` prints the reason
        state = f"{state}; {damage}" if damage else state
        cells = (folder.name, *names, str(config.get("seed", "")), *result_cells(summary), state)
        table.add_row(*map(Text, cells))
    return table


def show_run(arguments: list[str]) -> None:
    """A run's metrics, its state, the command to repeat it, and the settings that are not the defaults."""
    if len(arguments) != 1:
        raise UserError("Say which run: fedfrozen show RUN, where RUN is the folder of its results.")
    folder = Path(arguments[0]).expanduser()
    if not folder.is_dir():
        raise UserError(f"There is no run folder {arguments[0]}: `fedfrozen list` names those there are.")
    check_is_run(folder.resolve())
    summary = read_summary(folder)
    if (damage := status.damage(folder)) is not None:
        raise damage
    if not summary and status.read(folder) is None:
        raise UserError(f"{folder} holds no run: give a folder with summary.json or status.json.")
    console = Console()
    if summary:
        show_end(summary, folder, console)
    else:
        rows = read_rows(folder) if (folder / "metrics.jsonl").is_file() else []
        sent = human_bytes(sum(row.get("bytes_up") or 0 for row in rows))
        done = counted(rows[-1]["round"] if rows else 0, "round")
        console.print(f"{folder}: {done} done, {sent} sent up.", highlight=False, markup=False)
    details: dict[str, Any] = {"Status": run_state(folder, summary), "Command": _command(folder, summary)}
    if summary:
        details |= {"Device": summary.get("device"), "Commit": summary.get("git_commit")}
        versions = summary.get("versions") or {}
        details["Versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    if changed_files := quick_look(folder):
        details["Files"] = f"{changed_files}: see fedfrozen verify {shlex.quote(str(folder))}"
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, value in details.items():
        if value is not None:  # a bundle has no commit
            table.add_row(label, Text(str(value)))
    for key, value in changed(summary.get("config") or _configuration(folder)).items():
        table.add_row(Text(key), Text(str(value)))
    console.print(table)


def run_state(folder: Path, summary: dict[str, Any]) -> str:
    """The state from its status file; a run started by Flower has only its summary."""
    known = status.read(folder)
    if known is not None:
        stopped = known.state == "complete" and summary.get("status") == "stopped early"
        return "stopped early" if stopped else state_of(known)
    return str(summary.get("status") or "not finished")


def changed(config: dict[str, Any]) -> dict[str, Any]:
    """The settings that differ from the defaults of `fedfrozen`."""
    from fedfrozen_app.config import compose_run

    usual = flatten(compose_run([]).resolved)
    return {key: value for key, value in flatten(config).items() if usual.get(key, "absent") != value}


def _configuration(folder: Path) -> dict[str, Any]:
    """The configuration; without a summary, composed from the run's overrides."""
    known = status.read(folder)
    if known is None:
        return {}
    from fedfrozen_app.config import compose_run  # imports Hydra, which lists of finished runs do not need
    from fedfrozen_app.run.plain_overrides import plain_overrides

    try:
        return compose_run(plain_overrides(folder, known.overrides, {})).resolved
    except UserError:  # the overrides may have been the error that ended the run
        return {}


def _command(folder: Path, summary: dict[str, Any]) -> str:
    known = status.read(folder)
    return str(summary.get("command") or shlex.join(["fedfrozen", *(known.overrides if known else [])]))


def _relative_path(folder: Path) -> str:
    """The path relative to the working directory."""
    here = Path.cwd()
    return str(folder.relative_to(here) if folder.is_relative_to(here) else folder)
