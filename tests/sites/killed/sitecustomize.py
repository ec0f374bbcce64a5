"""Put on the path of a site's executor: it is killed in the states of a request that KILLED names, once each.

KILLED is a JSON object: `states`, by round the state in which the executor is killed, or a list, by the
site's own requests in their order; `victim`, `executor` or `supernode`; `marks`, a folder, in which a copy of
the kit is left as it was at that moment. Beside them lie the updates of all rounds before noise was added to
them, where noise is added to the update, and the last sum of gradients to which a private step has yet to add
its noise: no file of the site may hold them.

With a list no site begins a new request while one that had fewer comes back from a kill, for 150 s at most:
else two sites would take all steps of a server that does not wait for the third.
"""

import importlib.abc
import importlib.util
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

PLAN = json.loads(os.environ.get("KILLED", "{}"))
STATES, STORE = "fedfrozen_app.sites.request_states", "fedfrozen_app.sites.store"
NOISE = "fedfrozen_app.privacy.dpsgd"
KIT = Path.cwd()  # the kit's scripts go there first
MARKS = Path(PLAN.get("marks", "."))
IN_ORDER = isinstance(PLAN.get("states"), list)
LONGEST = 150.0  # seconds that a site waits for another
current = ""  # the round of the request at work


def requests(marks: Path) -> list[str]:
    """The rounds of that site's requests, in the order in which they came."""
    path = marks / "requests.json"
    return json.loads(path.read_text()) if path.exists() else []


def state_of(number: str) -> str | None:
    """The state in which this request is killed."""
    if not IN_ORDER:
        return PLAN["states"].get(number)
    place = requests(MARKS).index(number)
    return PLAN["states"][place] if place < len(PLAN["states"]) else None


def comes_back(marks: Path) -> bool:
    """Whether that site is between a kill and its reply."""
    killed = [path.name.partition("-")[0] for path in marks.glob("*-*") if path.is_dir()]
    return any(not (marks / f"{number}.answered").exists() for number in killed)


def begin(number: str) -> None:
    """Note the request; a new one waits for sites that had fewer and come back from a kill."""
    if not IN_ORDER:
        return
    known = requests(MARKS)
    if number in known:
        (MARKS / f"{number}.again").touch()
        return
    known.append(number)
    part = MARKS / "requests.part"
    part.write_text(json.dumps(known))
    part.replace(MARKS / "requests.json")
    deadline = time.monotonic() + LONGEST
    others = [marks for marks in MARKS.parent.iterdir() if marks != MARKS]
    while time.monotonic() < deadline and any(
        len(requests(marks)) < len(known) and comes_back(marks) for marks in others
    ):
        sum(range(10_000))  # a process that computes nothing would count as hanging
        time.sleep(0.1)


def die(number: str, state: str) -> None:
    """Here, if this is the place."""
    copy = MARKS / f"{number}-{state}"
    if state_of(number) != state or copy.exists():
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
        save_file(progress.known_outcome.reply.arrays, MARKS / f"{number}.secret")


def watch_states(module) -> None:
    advance = module.advance

    def watched(table, progress) -> None:
        global current
        current = number = progress.incoming.message.metadata.group_id
        if progress.state is module.State.RECEIVED:
            begin(number)
            die(number, "received")
        advance(table, progress)
        if progress.state is module.State.TRAINED:
            keep_secret(progress, number)
        die(number, str(progress.state))
        if progress.state is module.State.SENT and (MARKS / f"{number}.again").exists():
            (MARKS / f"{number}.answered").touch()

    module.advance = watched


def watch_store(module) -> None:
    """Between the charge of the round and the reply that it paid for."""
    write = module.RunStore.write

    def watched(self, proposal, server_round, reply, private) -> None:
        die(str(server_round), "storing")
        write(self, proposal, server_round, reply, private)

    module.RunStore.write = watched


def watch_noise(module) -> None:
    """A private step's sum, before its noise."""
    add = module.with_noise

    def watched(source, sums, std):
        largest = max(sums, key=lambda one: one.numel())
        piece = largest.flatten()[largest.numel() // 2 :]
        if std and (piece[:16] != 0).sum() >= 8:  # zeros are in every file
            from safetensors.torch import save_file

            save_file({"sum": largest.contiguous()}, MARKS / f"{current}.secret")
        return add(source, sums, std)

    module.with_noise = watched


class Watching(importlib.abc.MetaPathFinder):
    """Wraps what the modules define once they are loaded."""

    def __init__(self) -> None:
        self.wanted = {STATES: watch_states, STORE: watch_store, NOISE: watch_noise}

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
