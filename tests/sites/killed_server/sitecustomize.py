"""Put on the path of a server's SuperExec: each ServerApp is killed in the phase that is named for it.

KILLED_SERVER is a JSON object: `kills`, by process a phase and at which of its passages in that process;
`marks`, a folder, in which each kill leaves a file NUMBER-PHASE with the process's id.
"""

import importlib.abc
import importlib.util
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path

PLAN = json.loads(os.environ.get("KILLED_SERVER", "{}"))
# By module: what is watched there, as NAME or CLASS.NAME, its phase, and whether that is before or after it.
PHASES = {
    "fedfrozen_app.server.base": [("close_round", "step", "before")],
    "fedfrozen_app.server.flights": [
        ("Flights.send", "request", "before"),
        ("Flights._push", "asked", "before"),  # who is asked is on the disk, and no request has left
        ("Flights._push", "sent", "after"),
        ("Flights._read", "reply", "before"),  # Flower has delivered it and keeps it no more
    ],
    "fedfrozen_app.server.live_round": [("LiveRound._sum_up", "sum", "before")],
    "fedfrozen_app.files.checkpoint": [("save_tensors", "tensors", "before"), ("flush", "flush", "before")],
    "fedfrozen_app.files.disk": [("replace_file", "file", "before")],
}
counts: Counter[str] = Counter()


def pass_by(phase: str) -> None:
    """Die here, if this is the place."""
    marks = Path(PLAN["marks"])
    number = len(list(marks.iterdir()))
    counts[phase] += 1
    if number < len(PLAN["kills"]) and PLAN["kills"][number] == [phase, counts[phase]]:
        (marks / f"{number}-{phase}").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)


def watch(module, where: str, phase: str, when: str) -> None:
    *owner, name = where.split(".")
    holder = getattr(module, owner[0]) if owner else module
    real = getattr(holder, name)

    def watched(*args, **keys):
        if when == "before":
            pass_by(phase)
        found = real(*args, **keys)
        if when == "after":
            pass_by(phase)
        return found

    setattr(holder, name, watched)


class Watching(importlib.abc.MetaPathFinder):
    """Wraps what the modules define once they are loaded."""

    def __init__(self) -> None:
        self.wanted = dict(PHASES)

    def find_spec(self, name, path, target=None):
        if (places := self.wanted.pop(name, None)) is None:
            return None
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def loaded(module) -> None:
            load(module)
            for place in places:
                watch(module, *place)

        spec.loader.exec_module = loaded
        return spec


if PLAN and any("flwr-serverapp" in word for word in sys.orig_argv):
    sys.meta_path.insert(0, Watching())
