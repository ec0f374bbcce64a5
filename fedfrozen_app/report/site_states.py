"""The sites of a deployed run on its live page: each site's state, since when, and what to do."""

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedfrozen_app.core.formatting import resume_command
from fedfrozen_app.files import lease, status
from fedfrozen_app.files.presence import Presence, SiteState, read_presence
from fedfrozen_app.files.rows import Row

OLD = 60.0  # seconds after which a run's report about its sites is outdated
SHORT = 12  # characters of a hash that are shown; people compare all of it
WORDS = {
    "there": "there",
    "busy": "busy",
    "late": "busy for longer than usual",
    "asleep": "outside its opening hours",
    "waiting": "waiting for approval",
    "refused": "refuses",
    "mute": "does not answer",
    "silent": "silent",
}
GOOD = ("there", "busy", "asleep")
TO_DO = {
    "late": "Ask the site for `fedfrozen site check`: it trains unusually long, or its executor, disk or "
    "network fails. The round goes on without it after runtime.round_timeout.",
    "waiting": "Tell the site's data steward the hash by telephone. There: `fedfrozen site desk`, or "
    "`fedfrozen site approve {hash}`.",
    "refused": "Its own log says why: ask its data steward. Often its policy names another version; this is "
    "{version}.",
    "mute": "Ask the site for `fedfrozen site check`: its executor does not run, or hangs.",
    "silent": "Ask the site: are its machine, its network and its SuperNode up? It takes part again when it "
    "is back.",
}


def site_section(run_dir: Path, rows: Sequence[Row]) -> dict[str, Any] | None:
    """The section; None for a run without sites, and for a finished run."""
    found, known = read_presence(run_dir), status.read(run_dir)
    if found is None or (known is not None and known.state != "running"):
        return None
    return {
        "problems": [*_problems_of_run(run_dir, found), *_problems_of_round(rows)],
        "lines": [_line(site, found) for site in found.sites],
        "round": found.round,
        "hash": found.proposal,
    }


def version_of(run_dir: Path) -> str:
    """Changes when the section does; the file itself is rewritten every few seconds."""
    found = read_presence(run_dir)
    if found is None:
        return ""
    return f"{found.round} {found.sites} {_is_old(found)} {lease.lost(run_dir) is not None}"


def _line(site: SiteState, found: Presence) -> dict[str, str]:
    do = TO_DO.get(site.state, "").format(hash=found.proposal[:SHORT], version=found.version or "not known")
    if site.state == "asleep":  # its sentence has the opening time
        do = site.sentence
    return {
        "name": site.name,
        "state": WORDS[site.state],
        "good": "good" if site.state in GOOD else "warn",
        "since": clock(site.since),
        "last": site.last,
        "do": do,
    }


def _problems_of_run(run_dir: Path, found: Presence) -> list[str]:
    if (owner := lease.lost(run_dir)) is not None:
        again = resume_command(run_dir)
        return [f"The run's process ({owner.pid}) was killed. Go on after the last whole round: {again}"]
    if _is_old(found):
        return [
            f"Nothing new since {clock(found.time)}: the server evaluates a model, or does not answer. See "
            "the log of its SuperExec."
        ]
    return []


def _problems_of_round(rows: Sequence[Row]) -> list[str]:
    """Problems of the last round; the page lists all under Failures."""
    if not rows:
        return []
    problems = [f"Round {rows[-1]['round']}: {why}" for why in rows[-1].get("failures") or []]
    if "discarded" in rows[-1]:
        problems.append(f"Round {rows[-1]['round']} changed nothing: {rows[-1]['discarded']}.")
    return problems


def _is_old(found: Presence) -> bool:
    try:
        written = datetime.datetime.fromisoformat(found.time)
        return (datetime.datetime.now(datetime.UTC) - written).total_seconds() > OLD
    except (ValueError, TypeError):  # not a time, or without a zone
        return True


def clock(moment: str) -> str:
    """Format a time of the file for people."""
    return f"{moment[11:19]} UTC" if len(moment) > 19 else moment
