"""Put on the path of a site's executor: it is killed in the states of a request that KILLED names, once each.

KILLED is a JSON object: `states`, by round the state in which the executor is killed; `victim`, `executor` or
`supernode`; `marks`, a folder, in which a copy of the kit is left as it was at that moment. Beside them lie
the updates of all rounds before noise was added to them, where noise is added to the update: no file of the
site may hold them.
"""

import importlib.abc
import importlib.util
import json
import os
import shutil
import signal
import sys
from pathlib import Path

PLAN = json.loads(os.environ.get("KILLED", "{}"))
STATES, STORE = "fedfrozen_app.sites.request_states", "fedfrozen_app.sites.store"
KIT = Path.cwd()  # the kit's scripts go there first


def die(number: str, state: str) -> None:
    """Here, if this is the place."""
    copy = Path(PLAN["marks"]) / f"{number}-{state}"
    if PLAN["states"].get(number) != state or copy.exists():
        return
    # Sockets cannot be copied; data are the site's own and many.
    shutil.copytree(KIT, copy, ignore=shutil.ignore_patterns("data", "*.sock"))
    victim = os.getpid()
    if PLAN["victim"] == "supernode":
        victim = json.loads((KIT / "run" / "supernode.json").read_text())["pid"]
    os.kill(victim, signal.SIGKILL)


def keep_secret(progress, number: str) -> None:
    """The update as it was trained, where its noise comes after that."""
    from safetensors.torch import save_file

    from fedfrozen_app.secure.work import noised

    if progress.checked.price is not None and noised(progress.checked.request):
        path = Path(PLAN["marks"]) / f"{number}.secret"
        save_file(progress.known_outcome.reply.arrays, path)


def watch_states(module) -> None:
    advance = module.advance

    def watched(table, progress) -> None:
        number = progress.incoming.message.metadata.group_id
        if progress.state is module.State.RECEIVED:
            die(number, "received")
        advance(table, progress)
        if progress.state is module.State.TRAINED:
            keep_secret(progress, number)
        die(number, str(progress.state))

    module.advance = watched


def watch_store(module) -> None:
    """Between the charge of the round and the reply that it paid for."""
    write = module.RunStore.write

    def watched(self, proposal, server_round, reply, private) -> None:
        die(str(server_round), "storing")
        write(self, proposal, server_round, reply, private)

    module.RunStore.write = watched


class Watching(importlib.abc.MetaPathFinder):
    """Wraps what the modules define once they are loaded."""

    def __init__(self) -> None:
        self.wanted = {STATES: watch_states, STORE: watch_store}

    def find_spec(self, name, path, target=None):
        watch = self.wanted.pop(name, None)
        if watch is None:
            return None
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def loaded(module) -> None:
            load(module)
            watch(module)

        spec.loader.exec_module = loaded
        return spec


if PLAN and "exec" in sys.orig_argv and "--unguarded" in sys.orig_argv:
    sys.meta_path.insert(0, Watching())
