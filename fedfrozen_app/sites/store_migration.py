"""Move what earlier versions stored of runs to the proposals that it belongs to.

Earlier versions kept all of a run in `STATE/RUN/ROUND`, and its replies there as `reply.json` and
`reply.safetensors`: before noise, and without the proposal that they belong to. Such replies are deleted when
the site starts. Private arrays are kept where the audit log identifies their proposal.
"""

import logging
import shutil
from pathlib import Path

from safetensors import SafetensorError

from fedfrozen_app.core.errors import DAMAGED
from fedfrozen_app.core.formatting import counted
from fedfrozen_app.exchange.proposal import HASH
from fedfrozen_app.files.disk import flush, replace_file
from fedfrozen_app.files.seal import sealed, unsealed
from fedfrozen_app.sites.audit_log import AuditLog
from fedfrozen_app.sites.site_budget import SiteBudget
from fedfrozen_app.sites.store import RunStore

log = logging.getLogger(__name__)


def migrate_state(state: Path, audit: AuditLog, budget: SiteBudget) -> None:
    """Called once at the start; writes nothing if everything is in place already."""
    deleted = moved = 0
    for folder in sorted(state.iterdir()) if state.is_dir() else ():
        if not folder.is_dir():
            continue
        accepted = _accepted(folder)
        for old in sorted(path for path in folder.iterdir() if path.is_dir() and path.name.isdigit()):
            deleted += (old / "reply.json").exists() or (old / "reply.safetensors").exists()
            moved += _move_round(folder, old, accepted, audit)
        if (folder / "privacy").is_dir():
            _move_privacy(folder, budget.proposal_of(folder.name) or accepted)
    if deleted or moved:
        log.warning(
            "Kept replies of an earlier version might hold updates without noise: deleted those of %s. The "
            "private state of %s is kept.",
            *(counted(deleted, "round"), counted(moved, "round")),
        )


def _accepted(folder: Path) -> str | None:
    try:
        proposal = RunStore(folder, keep=1).proposal()
    except DAMAGED:
        return None
    return None if proposal is None else proposal.hash


def _move_round(folder: Path, old: Path, accepted: str | None, audit: AuditLog) -> bool:
    """Put a round under its proposal; delete its old reply, or all of it if it has no owner."""
    owner = _owner(folder, old, accepted, audit)
    for path in old.glob("reply.*"):
        path.unlink()
    if owner is None or not any(old.iterdir()) or (target := folder / owner / old.name).exists():
        shutil.rmtree(old)
        return False
    if not (old / f"{owner}.json").exists():  # only private arrays: sealed unchanged
        record = {"order": "", "names": [], "examples": 0, "metrics": {}}
        replace_file(old / f"{owner}.json", sealed(record, *sorted(old.iterdir())))
    target.parent.mkdir(exist_ok=True)
    old.rename(target)
    flush(folder)
    return True


def _owner(folder: Path, old: Path, accepted: str | None, audit: AuditLog) -> str | None:
    """The hash of the proposal that a round belongs to. A `reply.json` does not say: it is the accepted
    proposal's if the site has sent an update for the same request under it."""
    named = [path for path in old.glob("*.json") if path.stem == "reply" or HASH.fullmatch(path.stem)]
    if len(named) != 1:
        return None
    if named[0].stem != "reply":
        return named[0].stem
    try:
        record = unsealed(named[0])
        sent = accepted is not None and audit.has_sent(folder.name, accepted, record["order"])
    except (SafetensorError, *DAMAGED):
        return None
    return accepted if sent else None


def _move_privacy(folder: Path, owner: str | None) -> None:
    """The client's record of a private run, which belongs to the proposal that was charged."""
    if owner is None or (target := folder / owner / "privacy").exists():
        return
    target.parent.mkdir(exist_ok=True)
    (folder / "privacy").rename(target)
    flush(folder)
