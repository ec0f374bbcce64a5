"""Whether the SuperNode and the executor of a site run and answer."""

import time

import httpx

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.sites.executor import NAME as EXECUTOR
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.link import Contact, SuperNodeClient, is_stranger, running
from fedfrozen_app.sites.sign import ask, last_sign, processor_time

PATIENCE = 10.0  # seconds, for an answer on this machine
SILENCE = 60.0  # seconds without a response of the server, which is polled every three
LOOK = 2.0  # seconds, to see whether a process computes


def server_contact(kit: Kit) -> str:
    """When the server last answered the running SuperNode; a second one could not use the same key."""
    found = _contact(kit)
    if found.node is None or found.answered is None:
        raise UserError("the server has not let this site's SuperNode in yet: see its log, supernode.sh.")
    now = time.monotonic()
    silent = now - found.answered
    if silent > SILENCE:
        raise UserError(f"the server has not answered this site's SuperNode for {silent:.0f} s.")
    if found.beat is not None and now - found.beat > 2 * SILENCE:
        raise UserError(
            f"the server has taken no heartbeat of this site's SuperNode for {now - found.beat:.0f} s, and "
            "counts it as gone: see its log, supernode.sh."
        )
    return f"registered, as node {found.node}; the server answered {silent:.0f} s ago"


def _contact(kit: Kit) -> Contact:
    try:
        with SuperNodeClient(kit) as client:
            return client.contact(PATIENCE)
    except httpx.HTTPError as error:
        what = "is not of this kit" if is_stranger(error) else f"did not answer well within {PATIENCE:g} s"
        raise UserError(f"what listens in {kit.meeting} {what} ({error}): start it again.") from error


def check_supernode(kit: Kit) -> str:
    """Query the SuperNode over its socket, as the executor does: a running process may still not answer."""
    if not running(kit.meeting / "supernode.lock"):
        return "not started"
    began = time.perf_counter()
    _contact(kit)
    return f"answers, after {1000 * (time.perf_counter() - began):.0f} ms"


def check_executor(kit: Kit) -> str:
    """The executor's loop must answer; while it works on a message, its notes show what it does."""
    if not running(kit.var / "executor.lock"):
        return "not started"
    sign = last_sign(kit.meeting, EXECUTOR)
    if sign is None:
        return "starting"
    now = time.monotonic()
    silent, long = now - sign.seen, now - sign.since
    if sign.state == "alone":
        raise UserError(f"no SuperNode answers it, for {long:.0f} s: start supernode.sh, see its log.")
    if sign.state == "without room":
        raise UserError(f"its work waits, because the disk of {kit.var} is full: make room there.")
    if sign.state != "waiting":
        if now > sign.until:
            raise UserError(
                f"it is {sign.state} for {long:.0f} s, longer than limits in site.yaml allow: it hangs. Its "
                "watchdog starts it again; without one (--unguarded) do it yourself."
            )
        if sign.state == "working" and long > PATIENCE and not computes(sign.pid, LOOK):
            raise UserError(
                f"it is at one message for {long:.0f} s and did not compute in the last {LOOK:g} s: it waits "
                "for a disk, or hangs. Look again, and if it stays so start it again."
            )
        return f"at work on a message ({sign.state}), for {long:.0f} s"
    took = ask(kit.meeting, EXECUTOR, PATIENCE)
    if took is None:
        raise UserError(
            f"it did not answer within {PATIENCE:g} s, and has looked for no message for "
            f"{silent + PATIENCE:.0f} s: it hangs. Start it again."
        )
    return f"waits for messages, and answers, after {1000 * took:.0f} ms"


def computes(pid: int, seconds: float) -> bool:
    """Whether a process uses the processor within this many seconds."""
    try:
        before = processor_time(pid)
        time.sleep(seconds)
        return processor_time(pid) > before
    except OSError:  # it has ended
        return False
