"""The executor: one process that answers every message of a site, in place of `flower-superexec`.

Flower would start a process per message and run the code that came with it. This process keeps torch, model
and data loaded, runs the package that is installed here and never the bundle's code, and leaves every reply
to the site's request handler.
"""

import logging
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx

from fedfrozen_app.core.bundles import bundle_digest
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.flower_internals import (
    AcquireTaskRequest,
    AcquireTaskResponse,
    Fab,
    HeartbeatSender,
    ObjectPullError,
    ObjectPushError,
    PullObjectRequest,
    PullObjectResponse,
    PushObjectRequest,
    PushObjectResponse,
    RunNotRunningException,
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SendTaskHeartbeatRequest,
    SubStatus,
    TaskType,
    pull_task_input,
    push_message,
    push_task_output,
)
from fedfrozen_app.core.logs import hide, logs_of, prepare_logging
from fedfrozen_app.core.tracing import add_span, span, start_tracing
from fedfrozen_app.core.verb_table import parse
from fedfrozen_app.files.disk import waiting_for_room
from fedfrozen_app.sites import manifest
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.link import Patience, SuperNodeClient, in_time_of, is_stranger, only_one
from fedfrozen_app.sites.request_handler import RequestHandler, subject_of
from fedfrozen_app.sites.sign import Idleness, Note

log = logging.getLogger(__name__)
POLL = 0.25  # seconds between two requests for a message, on this machine
PATIENCE = 2.0  # seconds between retries, if the SuperNode is not running or the disk is full
SPARE = 1_000_000  # bytes of free disk space that work needs
NAME = "executor"


def serve(kit: Kit, handler: RequestHandler, *, forever: Callable[[], bool] = lambda: True) -> None:
    """Take tasks from the site's SuperNode, one at a time, until the process ends."""
    note, began = Note(kit.meeting, NAME), False
    note.write("waiting", kit.limits.transfer)
    log.info("The executor of %s waits for work at %s.", kit.name, kit.meeting)
    while forever():
        try:
            # Without Flower's retries, which would end the process.
            with SuperNodeClient(kit, [RuntimeVersionHttpInterceptor(component_name="SuperExec")]) as client:
                while forever():
                    if not began:
                        client.begin()
                        began = True
                    task = _next_task(client)
                    note.write("waiting", kit.limits.transfer)
                    if task is None:
                        time.sleep(POLL)
                        continue
                    handle_task(kit, handler, task.token, note)
        except httpx.HTTPError as error:
            why = "No SuperNode answers in %s (%s): trying again."
            if is_stranger(error):
                why = (
                    "The process that listens in %s is not the SuperNode of this kit (%s): nothing was sent "
                    "to it, and nothing that it sends is used."
                )
            if note.state != "alone":  # once, not every two seconds
                log.warning(why, kit.meeting, error)
            note.write("alone", kit.limits.transfer)
            time.sleep(PATIENCE)


def _next_task(client: SuperNodeClient) -> AcquireTaskResponse | None:
    task = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
    return task if task.HasField("task") and task.token else None


class TaskClient(SuperNodeClient):
    """For one task: records when the last piece of a message was received or sent."""

    def __init__(self, kit: Kit, token: str, note: Note) -> None:
        # Without Flower's retries, which end the process when a task has expired.
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
    """The heartbeat of a task: it stops if the work hangs, and learns when the task was dropped."""

    def __init__(self, client: SuperNodeClient, note: Note) -> None:
        self._client, self._note, self._idleness = client, note, Idleness()
        self.dropped = False

    def beat(self) -> bool:
        """Always true: Flower would only repeat a failed one sooner."""
        sign, idle = self._note.last, self._idleness.look(self._note.state, time.process_time())
        if time.monotonic() > sign.until or idle > (sign.idle or float("inf")):
            log.warning("The work on a message hangs (%s): no more heartbeats are sent.", sign.state)
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
    """Waits while the disk is full: a lost reply would cost the round."""

    def __init__(self, kit: Kit, note: Note, pulse: Pulse) -> None:
        self._kit, self._note, self._pulse = kit, note, pulse
        self._began: float | None = None

    def before_work(self) -> None:
        """Wait before the work starts, because not every small write is retried."""
        while shutil.disk_usage(self._kit.var).free < SPARE and self():
            pass

    def __call__(self) -> bool:
        """Pause before a retry; False if the task was dropped or takes too long."""
        limits = self._kit.limits
        if self._began is None:
            self._began = time.monotonic()
            log.warning("The disk of %s is full: make room there. The work waits for it.", self._kit.var)
        self._note.write("without room", limits.transfer, now=True)
        time.sleep(PATIENCE)
        self._note.write("working", limits.training, idle=limits.idle, now=True)
        return not self._pulse.dropped and time.monotonic() - self._began < limits.training


def handle_task(kit: Kit, handler: RequestHandler, token: str, note: Note) -> None:
    """One task: receive its message, send the reply. A SuperNode that restarts asks again."""
    limits, began = kit.limits, time.time_ns()
    note.write("pulling", limits.transfer, now=True)
    with TaskClient(kit, token, note) as client:
        pulse = Pulse(client, note)
        heartbeat = HeartbeatSender(pulse.beat)
        heartbeat.start()
        try:
            try:
                message, context, _, fab = pull_task_input(client)
            except (ObjectPullError, RuntimeError) as error:  # Flower's error for a task without a message
                log.warning("A message did not arrive completely (%s): it was dropped.", error)
                push_task_output(client, None, SubStatus.FAILED, "The message did not come whole.")
                return
            logs_of(**subject_of(message))  # for the other threads too
            with handler.traced("task", message, began):
                add_span("receive", began)
                note.write("working", limits.training, idle=limits.idle, now=True)
                rest = Rest(kit, note, pulse)
                rest.before_work()
                with waiting_for_room(rest):
                    reply = handler.handle(message, context, bundle_of(fab))
                in_time_of(message, reply)
                note.write("pushing", limits.transfer, now=True)
                if pulse.dropped:
                    log.warning("A reply was dropped: the server no longer waits for it.")
                    return
                with span("send"):
                    push_message(client, reply, context)
                    push_task_output(client, context, SubStatus.COMPLETED, "")
        except (httpx.HTTPError, ObjectPushError, RunNotRunningException) as error:
            log.warning("A message could not be finished (%s): its SuperNode or its run is gone.", error)
        finally:
            heartbeat.stop()
            logs_of(run=None, round=None)
            note.write("waiting", limits.transfer, now=True)


def bundle_of(fab: Fab) -> str:
    """The digest of its content, not the one that the sender claims."""
    return bundle_digest(fab.content)


@contextmanager
def alone(kit: Kit) -> Iterator[None]:
    """One executor per kit: two would break the chain of the audit log."""
    kit.var.mkdir(parents=True, exist_ok=True)
    with only_one(kit.var / "executor.lock", f"An executor of {kit.folder} is running already"):
        yield


def keep_to_itself() -> None:
    """Keep this process's files and memory private. Its files derive from the site's rows, and its memory
    holds updates before noise: no other account reads either, and no crash dumps the memory. Also if started
    without executor.sh."""
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(arguments: list[str]) -> None:
    """The verb."""
    kit = Kit.read(parse("site exec", arguments).kit)
    keep_to_itself()
    prepare_logging()  # again: Flower has added its own handlers
    logs_of(site=kit.name)
    hide(kit.match_key)
    start_tracing("site")
    try:
        manifest.check(kit.folder)
        with alone(kit):
            serve(kit, RequestHandler(kit))
    except FileNotFoundError as error:
        raise UserError(f"{error.filename} is missing: this kit is not whole.") from error
