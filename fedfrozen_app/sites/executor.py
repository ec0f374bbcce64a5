"""The resident executor: one process that answers every message of a site, in place of `flower-superexec`.

Flower would start a process for each message and run the code that came with it. This one keeps torch, the
model and the data loaded, runs the ClientApp of the package installed here, never the bundle's, and leaves
every answer to the site's desk. Names marked internal are no public API of Flower's.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from flwr.common.constant import SubStatus  # internal
from flwr.proto.runtime_pb2 import (  # internal
    AcquireTaskRequest,
    AcquireTaskResponse,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import TaskType  # internal
from flwr.supercore.fab import Fab  # internal
from flwr.supercore.heartbeat import HeartbeatSender  # internal
from flwr.supercore.interceptors import (  # internal
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
)
from flwr.supercore.run import RunNotRunningException  # internal
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output  # internal

from fedfrozen_app.arguments import Arguments
from fedfrozen_app.bundles import bundle_digest
from fedfrozen_app.errors import UserError
from fedfrozen_app.sites import manifest
from fedfrozen_app.sites.desk import Executor
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.link import SuperNodeClient, is_stranger, only_one

log = logging.getLogger(__name__)
POLL = 0.25  # seconds between two looks for a message, on this machine alone
PATIENCE = 2.0  # seconds, where its SuperNode is not there yet
SIGN_OF_LIFE = 2.0  # seconds between two notes of what the executor is doing


def serve(kit: Kit, executor: Executor, *, forever: Callable[[], bool] = lambda: True) -> None:
    """Take tasks from the site's SuperNode, one at a time, for as long as the process lives."""
    note = Note(kit)
    log.info("The executor of %s waits for work at %s.", kit.name, kit.meeting)
    while forever():
        try:
            # Without Flower's retries, which would end the process.
            with SuperNodeClient(kit, [RuntimeVersionHttpInterceptor(component_name="SuperExec")]) as desk:
                while forever():
                    note.write("waiting")
                    task = _next_task(desk)
                    if task is None:
                        time.sleep(POLL)
                        continue
                    note.write("working", now=True)
                    handle(kit, executor, task.token)
                    note.write("waiting", now=True)
        except httpx.TransportError as error:
            why = "No SuperNode answers in %s (%s): trying again."
            if is_stranger(error):
                why = (
                    "Whoever listens in %s is not the SuperNode of this kit (%s): it was told nothing, and "
                    "nothing it says is done."
                )
            if note.state != "alone":  # once, not every two seconds
                log.warning(why, kit.meeting, error)
            note.write("alone")
            time.sleep(PATIENCE)


def _next_task(desk: SuperNodeClient) -> AcquireTaskResponse | None:
    task = desk.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
    return task if task.HasField("task") and task.token else None


def handle(kit: Kit, executor: Executor, token: str) -> None:
    """One task: its message in, our answer out. If the SuperNode goes meanwhile, its next one asks again."""
    interceptors = (
        RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"),
        RuntimeTokenHttpInterceptor(token),
    )
    # Without Flower's retries, which end the process when a task has lapsed: this one stays for the next.
    with SuperNodeClient(kit, interceptors) as client:

        def beat() -> bool:
            try:
                client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
            except httpx.HTTPError as error:
                log.debug("no heartbeat: %s", error)
            return True

        heartbeat = HeartbeatSender(beat)
        heartbeat.start()
        try:
            message, context, _, fab = pull_task_input(client)
            reply = executor.answer(message, context, bundle_of(fab))
            push_message(client, reply, context)
            push_task_output(client, context, SubStatus.COMPLETED, "")
        except (httpx.HTTPError, RunNotRunningException) as error:
            log.warning("A message could not be finished (%s): its SuperNode or its run is gone.", error)
        finally:
            heartbeat.stop()


def bundle_of(fab: Fab) -> str:
    """Of its content: the digest that travels with it is only the sender's word."""
    return bundle_digest(fab.content)


@dataclass(frozen=True)
class Sign:
    """What an executor said of itself, and when: a loop that hangs says nothing more."""

    pid: int
    state: str  # waiting | working | alone (no SuperNode answers it)
    since: float
    seen: float


class Note:
    """Keeps `executor.json` in the meeting folder. The loop itself writes it: a thread would not hang."""

    def __init__(self, kit: Kit) -> None:
        self._path = kit.meeting / "executor.json"
        self._last = Sign(os.getpid(), "", 0.0, 0.0)

    @property
    def state(self) -> str:
        return self._last.state

    def write(self, state: str, *, now: bool = False) -> None:
        moment = time.time()
        if not now and state == self._last.state and moment - self._last.seen < SIGN_OF_LIFE:
            return
        since = self._last.since if state == self._last.state else moment
        self._last = Sign(os.getpid(), state, since, moment)
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self._last)))
        part.replace(self._path)


def last_sign(kit: Kit) -> Sign | None:
    """The last note of this kit's executor, None where none has run yet."""
    try:
        return Sign(**json.loads((kit.meeting / "executor.json").read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{kit.meeting}/executor.json cannot be read ({error}): delete it.") from error


@contextmanager
def alone(kit: Kit) -> Iterator[None]:
    """One executor a kit: two would each go on from their own last line of the audit log, and break it."""
    kit.var.mkdir(parents=True, exist_ok=True)
    with only_one(kit.var / "executor.lock", f"An executor of {kit.folder} is running already"):
        yield


def main(arguments: list[str]) -> None:
    """The verb."""
    parser = Arguments("fedfrozen site exec", description="The resident executor of a site.")
    parser.add_argument("kit", type=Path, nargs="?", default=Path(), help="the site's kit (default: here)")
    kit = Kit.read(parser.parse_args(arguments).kit)
    os.umask(0o077)  # also where it is started without executor.sh: what it keeps is made of the site's rows
    try:
        manifest.check(kit.folder)
        with alone(kit):
            serve(kit, Executor(kit))
    except FileNotFoundError as error:
        raise UserError(f"{error.filename} is missing: this kit is not whole.") from error
