"""`flower/presence.json`: the state of a deployed run's sites, for other processes.

The run's process writes it while it waits; `time` is the time of writing.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fedfrozen_app.core.errors import DAMAGED

FILE = Path("flower") / "presence.json"
# there: waits for work; late: busy for longer than usual; asleep: outside its opening hours; waiting: for a
# person's approval; mute: connected, and does not answer; silent: not connected.
STATES = ("there", "busy", "late", "asleep", "waiting", "refused", "mute", "silent")


@dataclass(frozen=True)
class SiteState:
    name: str
    state: str
    since: str  # when it entered this state
    last: str = ""  # its last action: "answered round 3"
    sentence: str = ""  # more details, if any


@dataclass(frozen=True)
class Presence:
    time: str
    round: int = 0  # the last one started
    proposal: str = ""  # hash, for `site approve`
    version: str = ""  # of the server
    sites: Sequence[SiteState] = field(default_factory=tuple)


def write_presence(folder: Path, found: Presence) -> None:
    """Write without syncing: the next one follows within seconds."""
    path = folder / FILE
    part = path.with_suffix(".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    part.write_text(json.dumps(asdict(found)), "utf-8")
    part.replace(path)


def read_presence(folder: Path) -> Presence | None:
    """Read it; None if missing or damaged."""
    try:
        found = json.loads((folder / FILE).read_text("utf-8"))
        sites = tuple(SiteState(**{key: str(value) for key, value in one.items()}) for one in found["sites"])
        text = {key: str(found[key]) for key in ("time", "proposal", "version")}
        if any(one.state not in STATES for one in sites):
            return None
        return Presence(round=int(found["round"]), sites=sites, **text)
    except DAMAGED:
        return None
