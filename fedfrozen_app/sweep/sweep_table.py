"""The outcomes of a sweep's runs, collected from their folders."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.files import status
from fedfrozen_app.files.integrity import quick_look
from fedfrozen_app.files.kinds import SWEEPS
from fedfrozen_app.files.rows import HEADLINES
from fedfrozen_app.report.console import human_bytes, human_seconds
from fedfrozen_app.report.summary import stored_summary

ASKED = SWEEPS


@dataclass(frozen=True)
class Member:
    folder: Path
    status: status.Status
    summary: dict[str, Any]  # empty if there is none yet
    damage: str = ""  # the damaged files


def members(sweep: Path, token: str | None = None) -> list[Member]:
    """The runs in a sweep's folder; with a token, only those that this sweep requested."""
    if token is None:
        folders = [path.parent for path in sweep.glob(f"*/{status.FILE}")]
    else:
        folders = [sweep / name for name in _asked(sweep, token)]
    found = []
    for folder in folders:
        known = status.read(folder)
        if known is not None:
            found.append(Member(folder, known, *summary_or_damage(folder)))
    return sorted(found, key=lambda one: (len(one.folder.name), one.folder.name))


def _asked(sweep: Path, token: str) -> set[str]:
    try:
        return set((sweep / ASKED / token).read_text("utf-8").split())
    except FileNotFoundError:
        return set()


def summary_or_damage(folder: Path) -> tuple[dict[str, Any], str]:
    """For tables of many runs: the summary, and the damage to the run's files ("" for none)."""
    try:
        return read_summary(folder), quick_look(folder)
    except UserError as error:
        return {}, quick_look(folder) or str(error).partition(": ")[0].removeprefix(f"{folder}/")


def read_summary(folder: Path) -> dict[str, Any]:
    """The summary of a run, which a run in progress does not have. Raises `Damaged`."""
    return stored_summary(folder) or {}


def state_of(known: status.Status) -> str:
    """In words: "complete", "kept", or why it is neither."""
    if known.state == "complete":
        return "kept" if known.kept else "complete"
    if known.state == "running":
        return (
            "running" if known.alive else "died: its process ended without a word (killed, or out of memory?)"
        )
    return f"{known.state}: {known.reason}" if known.reason else known.state


def shown_state(one: Member) -> str:
    return f"{state_of(one.status)}; {one.damage}" if one.damage else state_of(one.status)


def sweep_table(folder: Path, found: list[Member]) -> Table:
    swept = [word for one in found for word in one.status.overrides]
    everywhere = {word for word in swept if swept.count(word) == len(found)}
    table = Table(title=Text(f"Sweep {folder}"), title_justify="left")
    for title in ("run", "settings", "final test", "sent up", "time", "state"):
        table.add_column(
            title, overflow="fold", justify="right" if title in ("final test", "sent up") else "left"
        )
    for one in found:
        settings = " ".join(word for word in one.status.overrides if word not in everywhere)
        table.add_row(*map(Text, (one.folder.name, settings, *result_cells(one.summary), shown_state(one))))
    return table


def result_cells(summary: dict[str, Any]) -> tuple[str, str, str]:
    """Final test metric, bytes up, time."""
    final = next((summary[key] for name in HEADLINES if (key := f"final_test_{name}") in summary), None)
    sent, seconds = summary.get("total_bytes_up"), summary.get("seconds")
    return (
        "" if final is None else f"{final:.4f}",
        "" if sent is None else human_bytes(sent),
        "" if seconds is None else human_seconds(seconds),
    )
