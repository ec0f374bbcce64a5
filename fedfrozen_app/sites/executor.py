"""The resident executor: one process that answers every message of a site, in place of `flower-superexec`.

Flower would start a process for each message and run the code that came with it. This one keeps torch, the
model and the data loaded, runs the ClientApp of the package installed here, never the bundle's, and asks the
site's policy before anything runs. Names marked internal are no public API of Flower's.
"""

import fcntl
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import httpx
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MessageType
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode, SubStatus  # internal
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

from fedfrozen_app import client_app
from fedfrozen_app.arguments import Arguments
from fedfrozen_app.bundles import bundle_digest
from fedfrozen_app.digests import digest
from fedfrozen_app.errors import UserError
from fedfrozen_app.exchange.arrays import to_record, to_tensors
from fedfrozen_app.exchange.messages import read_reply, read_train, train_reply
from fedfrozen_app.exchange.order import Order
from fedfrozen_app.local.resident import resident_for
from fedfrozen_app.sites.audit_log import AuditLog
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.policy import Policy, Run, read_run
from fedfrozen_app.sites.store import Budget, RunStore
from fedfrozen_app.words import counted

log = logging.getLogger(__name__)
POLL = 0.25  # seconds between two looks for a message, on this machine alone
PATIENCE = 2.0  # seconds, where its SuperNode is not there yet
ACQUIRE = "/flwr.proto.Runtime/AcquireTask"


class Executor:
    """Answers messages for one site. What it refuses, it refuses before the message's arrays are read."""

    def __init__(self, kit: Kit, app: ClientApp | None = None) -> None:
        self.kit = kit
        self.app = app if app is not None else client_app.app
        self.audit = AuditLog(kit.audit)
        self.budget = Budget(kit.var / "state" / "budget.json")
        Policy.read(kit.policy)  # a bad policy is better said at the start

    def answer(self, message: Message, context: Context, bundle: str) -> Message:
        """The reply; whatever goes wrong here stays here, and the server gets a fixed sentence."""
        details = {"message": message.metadata.message_type, "flower_run": context.run_id, "bundle": bundle}
        try:
            policy = Policy.read(self.kit.policy)
            run = read_run(str(context.run_config.get("overrides", "")), context.run_id, bundle)
            refused = run if isinstance(run, str) else policy.problem_of_run(run, self.kit.data_kind)
            if isinstance(run, str) or refused:
                return self._refuse(message, str(refused), details)
            details["run"] = run.id
            # One privacy record a run, so that each keeps to its own epsilon; the budget adds them up.
            records = str(self._store(run).folder / "privacy")
            context.node_config = self.kit.node_config() | {"executor": True, "privacy-dir": records}
            if message.metadata.message_type == MessageType.QUERY:
                return self._hello(message, context, run, details)
            if message.metadata.message_type == MessageType.TRAIN:
                return self._train(message, context, run, policy, details)
            return self._refuse(message, f"it knows no {message.metadata.message_type} messages", details)
        except Exception as error:
            # Its text may hold a path or a value of the site's.
            log.exception("A message could not be answered.")
            try:
                self.audit.write("failed", **details, error=type(error).__name__)
            except OSError:  # nothing was sent, so there is nothing that must be on record
                log.exception("The audit log could not be written.")
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, client_app.FAILED), reply_to=message)

    def _hello(self, message: Message, context: Context, run: Run, details: dict) -> Message:
        reply = self.app(message, context)
        self._store(run).keep_card(str(cast(ConfigRecord, context.state["card"])["json"]))
        self.audit.write("hello", **details, strategy=run.config.strategy["name"], overrides=run.overrides)
        return reply

    def _train(self, message: Message, context: Context, run: Run, policy: Policy, details: dict) -> Message:
        order, _ = read_train(message)
        details |= {"round": order.round, "order": order.digest}
        store = self._store(run)
        if "card" not in context.state:  # the SuperNode was started again and has forgotten
            card = store.card()
            if card is None:
                return self._refuse(message, "it has had no hello of this run", details)
            context.state["card"] = ConfigRecord({"json": card})
        resident = resident_for(context)
        examples = len(resident.rows(self.kit.name).train)
        if problem := policy.problem_of_order(order, run, resident.roles, examples):
            return self._refuse(message, problem, details)
        reply = None if order.judge else store.reply_to(order.round, order.digest)
        again = reply is not None and self.audit.has_sent(run.id, order.digest)
        if problem := self._used_up(order, run, policy, again):
            return self._refuse(message, problem, details)
        if reply is None:
            answer = self._carry_out(message, context, order, store)
            reply = read_reply(answer)
            if reply.lacks:
                self.audit.write("lacks", **details, names=len(reply.lacks))
                return answer
            if reply.declined:
                self.audit.write("declined", **details, reason=reply.declined)
                return answer
        if run.epsilon is not None:
            self.budget.charge(run.id, run.epsilon, run.overrides, order.round, order.digest)
        self.audit.write(
            "sent",
            **details,
            again=again,
            asked={"trained": len(order.plan.trained), "private": len(order.plan.private)},
            arrays={name: digest(tensor) for name, tensor in reply.arrays.items()},
            bytes=sum(tensor.numel() * tensor.element_size() for tensor in reply.arrays.values()),
            examples=reply.examples,
            metrics=reply.metrics,
            epsilon=run.epsilon,
            epsilon_all_runs=self.budget.spent(),
        )
        return train_reply(message, reply, local=False)

    def _used_up(self, order: Order, run: Run, policy: Policy, again: bool) -> str | None:
        """Why the site has given all it gives; sending the same update again costs nothing."""
        if not again and self.audit.sent_today() >= policy.rounds_per_day:
            given = counted(policy.rounds_per_day, "update")
            return f"it has sent {given} in 24 hours, and that is all it gives"
        if run.epsilon is not None:
            return self.budget.problem(
                run.id, run.epsilon, run.overrides, policy.max_epsilon
            ) or self.budget.problem_of_round(run.id, order.round, order.digest)
        return None

    def _carry_out(self, message: Message, context: Context, order: Order, store: RunStore) -> Message:
        """Run the ClientApp on what this site's disk says it kept, and keep what comes out."""
        context.state.pop("private", None)
        has_state = order.plan.private or order.method.stays
        if has_state and (kept := store.private_before(order.round)) is not None:
            context.state["private"] = to_record(kept, local=False)
        answer = self.app(message, context)
        private = context.state.pop("private", None)  # not for the SuperNode, which would hold it in memory
        reply = read_reply(answer)
        if not (reply.lacks or reply.declined or order.judge):
            store.write(order.round, reply, to_tensors(cast(ArrayRecord, private)) if private else {})
        return answer

    def _store(self, run: Run) -> RunStore:
        return RunStore(self.kit.var / "state" / run.id, keep=max(run.config.checkpoint.every, 1) + 1)

    def _refuse(self, message: Message, reason: str, details: dict) -> Message:
        log.warning("Refused: %s.", reason)
        self.audit.write("refused", **details, reason=reason)
        text = f"the site {self.kit.name} refused, because {reason}"
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, text), reply_to=message)


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
    return bundle_digest(fab.content)


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
