"""`flower/presence.json`: how a deployed run sees its sites now, for those who watch it from outside.

The run's process writes it while it waits. What it says is as old as its `time`.
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
    since: str  # when it came into this state
    last: str = ""  # what it last did: "answered round 3"
    sentence: str = ""  # why, where there is more to say


@dataclass(frozen=True)
class Presence:
    time: str
    round: int = 0  # the last that was begun
    proposal: str = ""  # hash, as `site approve` takes it
    version: str = ""  # of the server
    sites: Sequence[SiteState] = field(default_factory=tuple)


def write_presence(folder: Path, found: Presence) -> None:
    """Without waiting for the disk: the next one follows within seconds."""
    path = folder / FILE
    part = path.with_suffix(".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    part.write_text(json.dumps(asdict(found)), "utf-8")
    part.replace(path)


def read_presence(folder: Path) -> Presence | None:
    """None where the run has written none, or no whole one."""
    try:
        found = json.loads((folder / FILE).read_text("utf-8"))
        sites = tuple(SiteState(**{key: str(value) for key, value in one.items()}) for one in found["sites"])
        text = {key: str(found[key]) for key in ("time", "proposal", "version")}
        if any(one.state not in STATES for one in sites):
            return None
        return Presence(round=int(found["round"]), sites=sites, **text)
    except DAMAGED:
        return None
