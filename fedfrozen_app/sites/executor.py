"""The resident executor: one process that answers every message of a site, in place of `flower-superexec`.

Flower would start a process for each message and run the code that came with it. This one keeps torch, the
model and the data loaded, runs the ClientApp of the package installed here, never the bundle's, and leaves
every answer to the site's desk. Names marked internal are no public API of Flower's.
"""

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
from flwr.common.constant import SubStatus  # internal
from flwr.proto.message_pb2 import (  # internal
    PullObjectRequest,
    PullObjectResponse,
    PushObjectRequest,
    PushObjectResponse,
)
from flwr.proto.runtime_pb2 import (  # internal
    AcquireTaskRequest,
    AcquireTaskResponse,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import TaskType  # internal
from flwr.supercore.fab import Fab  # internal
from flwr.supercore.heartbeat import HeartbeatSender  # internal
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectPushError  # internal
from flwr.supercore.interceptors import (  # internal
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
)
from flwr.supercore.run import RunNotRunningException  # internal
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output  # internal

from fedfrozen_app.bundles import bundle_digest
from fedfrozen_app.errors import UserError
from fedfrozen_app.files.disk import waiting_for_room
from fedfrozen_app.sites import manifest
from fedfrozen_app.sites.desk import Executor
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.link import Patience, SuperNodeClient, in_time_of, is_stranger, only_one
from fedfrozen_app.sites.sign import Idleness, Note
from fedfrozen_app.verb_table import parse

log = logging.getLogger(__name__)
POLL = 0.25  # seconds between two looks for a message, on this machine alone
PATIENCE = 2.0  # seconds, where its SuperNode is not there yet, or its disk is full
SPARE = 1_000_000  # bytes, without which no work is begun
NAME = "executor"


def serve(kit: Kit, executor: Executor, *, forever: Callable[[], bool] = lambda: True) -> None:
    """Take tasks from the site's SuperNode, one at a time, for as long as the process lives."""
    note, began = Note(kit.meeting, NAME), False
    note.write("waiting", kit.limits.transfer)
    log.info("The executor of %s waits for work at %s.", kit.name, kit.meeting)
    while forever():
        try:
            # Without Flower's retries, which would end the process.
            with SuperNodeClient(kit, [RuntimeVersionHttpInterceptor(component_name="SuperExec")]) as desk:
                while forever():
                    if not began:
                        desk.begin()
                        began = True
                    task = _next_task(desk)
                    note.write("waiting", kit.limits.transfer)
                    if task is None:
                        time.sleep(POLL)
                        continue
                    handle(kit, executor, task.token, note)
        except httpx.HTTPError as error:
            why = "No SuperNode answers in %s (%s): trying again."
            if is_stranger(error):
                why = (
                    "Whoever listens in %s is not the SuperNode of this kit (%s): it was told nothing, and "
                    "nothing it says is done."
                )
            if note.state != "alone":  # once, not every two seconds
                log.warning(why, kit.meeting, error)
            note.write("alone", kit.limits.transfer)
            time.sleep(PATIENCE)


def _next_task(desk: SuperNodeClient) -> AcquireTaskResponse | None:
    task = desk.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
    return task if task.HasField("task") and task.token else None


class TaskClient(SuperNodeClient):
    """For one task: notes every piece of a message that comes or goes, and how long none has."""

    def __init__(self, kit: Kit, token: str, note: Note) -> None:
        # Without Flower's retries, which end the process when a task has lapsed: this one stays for the next.
        version = RuntimeVersionHttpInterceptor(component_name="flwr-clientapp")
        super().__init__(kit, [version, RuntimeTokenHttpInterceptor(token)])
        self._note, self._patience = note, Patience(kit.limits.transfer)

    def PullObject(self, request: PullObjectRequest) -> PullObjectResponse:
        answer = self._patience.check(request, super().PullObject(request))
        if answer.object_available:
            self._note.again()
        return answer

    def PushObject(self, request: PushObjectRequest) -> PushObjectResponse:
        answer = super().PushObject(request)
        self._note.again()
        return answer


class Pulse:
    """The heartbeat of a task: it stops where the work hangs, and hears when nobody wants it any more."""

    def __init__(self, client: SuperNodeClient, note: Note) -> None:
        self._client, self._note, self._idleness = client, note, Idleness()
        self.dropped = False

    def beat(self) -> bool:
        """Always true: a false one would only be sent again sooner."""
        sign, idle = self._note.last, self._idleness.look(self._note.state, time.process_time())
        if time.monotonic() > sign.until or idle > (sign.idle or float("inf")):
            log.warning("The work on a message hangs (%s): its heart beats no more.", sign.state)
            return True
        try:
            if not self._client.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success:
                self.dropped = True
        except httpx.HTTPStatusError as error:
            log.debug("no heartbeat: %s", error)
            self.dropped |= error.response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)
        except httpx.HTTPError as error:
            log.debug("no heartbeat: %s", error)
        return True


class Rest:
    """Waits for room on a full disk: an answer that is given up would cost the round, and a person's time."""

    def __init__(self, kit: Kit, note: Note, pulse: Pulse) -> None:
        self._kit, self._note, self._pulse = kit, note, pulse
        self._began: float | None = None

    def before_work(self) -> None:
        """Not every small write is tried again, and none has to be where there is room."""
        while shutil.disk_usage(self._kit.var).free < SPARE and self():
            pass

    def __call__(self) -> bool:
        """A pause, after which one may look again; False where nobody waits for the answer any more."""
        limits = self._kit.limits
        if self._began is None:
            self._began = time.monotonic()
            log.warning("The disk of %s is full: make room there. The work waits for it.", self._kit.var)
        self._note.write("without room", limits.transfer, now=True)
        time.sleep(PATIENCE)
        self._note.write("working", limits.training, idle=limits.idle, now=True)
        return not self._pulse.dropped and time.monotonic() - self._began < limits.training


def handle(kit: Kit, executor: Executor, token: str, note: Note) -> None:
    """One task: its message in, our answer out. If the SuperNode goes meanwhile, its next one asks again."""
    limits = kit.limits
    note.write("pulling", limits.transfer, now=True)
    with TaskClient(kit, token, note) as client:
        pulse = Pulse(client, note)
        heartbeat = HeartbeatSender(pulse.beat)
        heartbeat.start()
        try:
            try:
                message, context, _, fab = pull_task_input(client)
            except (ObjectPullError, RuntimeError) as error:  # Flower's word for a task without a message
                log.warning("A message did not come whole (%s): it is given up.", error)
                push_task_output(client, None, SubStatus.FAILED, "The message did not come whole.")
                return
            note.write("working", limits.training, idle=limits.idle, now=True)
            rest = Rest(kit, note, pulse)
            rest.before_work()
            with waiting_for_room(rest):
                reply = executor.answer(message, context, bundle_of(fab))
            in_time_of(message, reply)
            note.write("pushing", limits.transfer, now=True)
            if pulse.dropped:
                log.warning("An answer was dropped: nobody waits for it any more.")
                return
            push_message(client, reply, context)
            push_task_output(client, context, SubStatus.COMPLETED, "")
        except (httpx.HTTPError, ObjectPushError, RunNotRunningException) as error:
            log.warning("A message could not be finished (%s): its SuperNode or its run is gone.", error)
        finally:
            heartbeat.stop()
            note.write("waiting", limits.transfer, now=True)


def bundle_of(fab: Fab) -> str:
    """Of its content: the digest that travels with it is only the sender's word."""
    return bundle_digest(fab.content)


@contextmanager
def alone(kit: Kit) -> Iterator[None]:
    """One executor a kit: two would each go on from their own last line of the audit log, and break it."""
    kit.var.mkdir(parents=True, exist_ok=True)
    with only_one(kit.var / "executor.lock", f"An executor of {kit.folder} is running already"):
        yield


def main(arguments: list[str]) -> None:
    """The verb."""
    kit = Kit.read(parse("site exec", arguments).kit)
    os.umask(0o077)  # also where it is started without executor.sh: what it keeps is made of the site's rows
    try:
        manifest.check(kit.folder)
        with alone(kit):
            serve(kit, Executor(kit))
    except FileNotFoundError as error:
        raise UserError(f"{error.filename} is missing: this kit is not whole.") from error
