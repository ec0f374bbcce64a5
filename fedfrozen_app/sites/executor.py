"""The resident executor: one process that answers every message of a site, in place of `flower-superexec`.

Flower would start a process for each message and run the code that came with it. This one keeps torch, the
model and the data loaded, runs the ClientApp of the package installed here, never the bundle's, and leaves
every answer to the site's desk. Names marked internal are no public API of Flower's.
"""

import fcntl
import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from flwr.common.constant import SubStatus  # internal
from flwr.proto.runtime_pb2 import AcquireTaskRequest, SendTaskHeartbeatRequest  # internal
from flwr.supercore.constant import TaskType  # internal
from flwr.supercore.fab import Fab  # internal
from flwr.supercore.heartbeat import HeartbeatSender  # internal
from flwr.supercore.interceptors import (  # internal
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.run import RunNotRunningException  # internal
from flwr.supercore.runtime import RuntimeHttpClient  # internal
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output  # internal

from fedfrozen_app.arguments import Arguments
from fedfrozen_app.errors import UserError
from fedfrozen_app.sites.desk import Executor
from fedfrozen_app.sites.kit import Kit

log = logging.getLogger(__name__)
POLL = 0.25  # seconds between two looks for a message, on this machine alone
PATIENCE = 2.0  # seconds, where its SuperNode is not there yet
ACQUIRE = "/flwr.proto.Runtime/AcquireTask"


def serve(kit: Kit, executor: Executor, *, forever: Callable[[], bool] = lambda: True) -> None:
    """Take tasks from the site's SuperNode, one at a time, for as long as the process lives."""
    secret = (kit.folder / "executor.secret").read_bytes()
    version = RuntimeVersionHttpInterceptor(component_name="SuperExec")
    guard = SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods={ACQUIRE})
    # Without Flower's retries, which end the process without a word where the secret is another.
    with RuntimeHttpClient.from_server_address(kit.address, True, None, [version, guard]) as desk:
        log.info("The executor of %s waits for work at %s.", kit.name, kit.address)
        while forever():
            try:
                task = desk.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
            except httpx.TransportError as error:
                log.warning("No SuperNode answers at %s (%s): trying again.", kit.address, error)
                time.sleep(PATIENCE)
                continue
            except httpx.HTTPStatusError as error:
                if error.response.status_code != httpx.codes.UNAUTHORIZED:
                    raise
                raise UserError(
                    f"The SuperNode at {kit.address} has another executor.secret than {kit.folder}: start "
                    "both from the same kit."
                ) from error
            if task.HasField("task") and task.token:
                handle(kit, executor, task.token)
            else:
                time.sleep(POLL)


def handle(kit: Kit, executor: Executor, token: str) -> None:
    """One task: its message in, our answer out. If the SuperNode goes meanwhile, its next one asks again."""
    interceptors = (
        RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"),
        RuntimeTokenHttpInterceptor(token),
    )
    # Without Flower's retries, which end the process when a task has lapsed: this one stays for the next.
    with RuntimeHttpClient.from_server_address(kit.address, True, None, interceptors) as client:

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
    return hashlib.sha256(fab.content).hexdigest()


@contextmanager
def alone(kit: Kit) -> Iterator[None]:
    """One executor a kit: two would each go on from their own last line of the audit log, and break it."""
    kit.var.mkdir(parents=True, exist_ok=True)
    with (kit.var / "executor.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"An executor of {kit.folder} is running already: end it first.") from error
        yield


def main(arguments: list[str]) -> None:
    """`fedfrozen site exec [KIT]`."""
    parser = Arguments("fedfrozen site exec", description="The resident executor of a site.")
    parser.add_argument("kit", type=Path, nargs="?", default=Path(), help="the site's kit (default: here)")
    kit = Kit.read(parser.parse_args(arguments).kit)
    try:
        with alone(kit):
            serve(kit, Executor(kit))
    except FileNotFoundError as error:
        raise UserError(f"{error.filename} is missing: this kit is not whole.") from error
