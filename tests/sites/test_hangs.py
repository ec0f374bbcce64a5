"""Nothing at a site hangs for good: messages whose run has ended, executors that stop, work that stands."""

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import zlib
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import yaml
from flwr.app import Array, ArrayRecord, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.proto.fleet_pb2 import PullMessagesRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode import fleet_http_connection, start_client_internal

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.sites import executor, fleet_client, guard, inbox, process_check
from fedfrozen_app.sites import supernode as supernodes
from fedfrozen_app.sites.federation_plan import read_federation
from fedfrozen_app.sites.fleet_client import SiteFleetClient
from fedfrozen_app.sites.inbox import InboxFactory
from fedfrozen_app.sites.kit import Kit, Limits
from fedfrozen_app.sites.kit_writer import write_kits
from fedfrozen_app.sites.link import Contact, Patience, credentials
from fedfrozen_app.sites.sign import Idleness, Note, last_sign
from tests.sites.processes import PLAN, kit_in, supernode, wait_until

TASKS = AcquireTaskRequest(supported_task_types=["CLIENT_APP"])
VERSION = [RuntimeVersionHttpInterceptor(component_name="SuperExec")]


class Link:
    """A SuperLink as Flower's loop in the SuperNode sees it: messages out, replies in."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.replies: list[Message] = []
        self.ended: set[int] = set()  # runs
        self.withheld = False  # arrays are announced and never come
        self.at_confirm = lambda: None

    def order(self, run: int, number: int) -> Message:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run, 0, 1
        content = RecordDict({"arrays": ArrayRecord({"x": Array(np.full(3, number))})})
        message = Message(content, dst_node_id=7, message_type=MessageType.TRAIN, ttl=600)
        message.metadata.__dict__["_message_id"] = message.object_id
        self.messages.append(message)
        return message

    def receive(self):
        return (self.messages[0], get_object_tree(self.messages[0])) if self.messages else None

    def pull_object(self, run: int, number: str) -> bytes:
        if run in self.ended:
            raise RunNotRunningException
        return get_all_nested_objects(self.messages[0])[number].deflate()

    def confirm(self, run: int, number: str) -> None:
        self.at_confirm()
        if run in self.ended:
            raise RunNotRunningException

    def send(self, message, tree, seconds):
        if message.metadata.run_id in self.ended:
            raise RunNotRunningException
        self.replies.append(message)
        return set(), "session"


class Node:
    """Flower's own loop of a SuperNode, one pass at a time."""

    def __init__(self, link: Link, states: InboxFactory) -> None:
        self.link, self.state, self.store = link, states.inbox, states.objectstore_factory.store()
        self.state.set_node_id(7)

    def fetch(self, *, known: bool = True) -> int | None:
        self.state.abandon()  # as the client does before it asks
        if known and self.link.messages:
            self.state.run_store[self.link.messages[0].metadata.run_id] = RUN
        run = start_client_internal._pull_and_store_message(
            state=self.state,
            object_store=self.store,
            node_config={},
            receive=self.link.receive,
            get_run=lambda run: RUN,
            get_fab=lambda digest, run: None,
            pull_object=self.link.pull_object,
            confirm_message_received=self.link.confirm,
            trusted_entities=None,
        )
        self.link.messages[:1] = []
        return run

    def answer(self) -> threading.Thread:
        """Waits for the reply and sends it; a thread, because Flower's waits for ever."""
        arguments = (self.state, self.store, self.link.send, lambda *given: None)
        thread = threading.Thread(target=start_client_internal._push_messages, args=arguments, daemon=True)
        thread.start()
        return thread

    # What an executor does over its socket -----------------------------------------------------------

    def claim(self) -> tuple[int, str]:
        (task,) = self.state.get_tasks(statuses=["pending"])
        token = self.state.claim_task(task.task_id)
        assert token is not None and self.state.activate_task(task.task_id)
        return task.task_id, token

    def take(self) -> Message:
        (message,) = self.state.get_messages_legacy(is_reply=False, limit=1)
        self.state.record_message_processing_start(message.metadata.message_id)
        return message

    def reply(self, message: Message, *, whole: bool = True) -> Message:
        TaskIdentity.node_id = 7
        content = RecordDict({"arrays": ArrayRecord({"y": Array(np.arange(4))})})
        reply = Message(content, reply_to=message)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        self.state.record_message_processing_end(message.metadata.message_id)
        session = self.state.start_session(message.metadata.run_id)
        self.state.store_message_and_object_tree(reply, get_object_tree(reply), session)
        parts = list(get_all_nested_objects(reply).items())
        for number, part in parts if whole else parts[:1]:
            self.store.put(number, part.deflate())
        return reply


class RUN:
    fab_hash, series_id, primary_task_type = "f" * 64, 1, ""


@pytest.fixture
def node(monkeypatch) -> Node:
    monkeypatch.setattr(inbox, "ASK", 0.2)
    return Node(Link(), InboxFactory())


def ends(thread: threading.Thread) -> None:
    thread.join(10)
    assert not thread.is_alive(), "the SuperNode waits for an answer that never comes"


def crashed(message: Message) -> bool:
    return message.has_error() and message.error.code == ErrorCode.CLIENT_APP_CRASHED


def test_an_answer_is_that_of_the_message_it_waits_for(node):
    first = node.link.order(run=1, number=1)
    assert node.fetch() == 1
    node.claim()
    waiting = node.answer()
    reply = node.reply(node.take())
    ends(waiting)
    assert [m.metadata.message_id for m in node.link.replies] == [reply.metadata.message_id]
    assert reply.metadata.reply_to_message_id == first.metadata.message_id


def test_a_run_that_ends_while_its_message_travels_leaves_nothing_for_the_next(node):
    """Somebody stops it just then: the executor has the message already, and its answer comes late."""
    node.link.order(run=1, number=1)

    def stop():
        node.link.ended.add(1)
        node.claim()
        node.late = node.take()

    node.link.at_confirm = stop
    assert node.fetch() is None
    node.link.at_confirm = lambda: None
    node.reply(node.late)  # of the dead run
    for number in (2, 3):  # and nothing is one behind
        node.link.order(run=2, number=number)
        assert node.fetch() == 2
        waiting = node.answer()
        node.claim()
        expected = node.reply(node.take())
        ends(waiting)
        assert node.link.replies[-1].metadata.message_id == expected.metadata.message_id
    assert {reply.metadata.run_id for reply in node.link.replies} == {2}


def test_what_a_dead_run_announced_is_not_waited_for(node):
    """The executor has begun to fetch arrays that the SuperNode will never get."""
    message = node.link.order(run=1, number=1)
    node.link.ended.add(1)
    task = []
    node.link.pull_object, given = (
        lambda run, number: (task or task.append(node.claim()), given(run, number))[1],
        node.link.pull_object,
    )
    assert node.fetch() is None
    assert node.store.get(message.metadata.message_id) == b""  # announced
    node.state.abandon()
    assert node.store.get(message.metadata.message_id) is None  # "not found": the executor lets go
    assert node.state.get_task_by_token(task[0][1]) is None
    assert not node.state.get_tasks(statuses=["pending"])


@pytest.mark.parametrize("moment", ["before the message", "with the message", "half an answer"])
def test_an_executor_that_dies_is_answered_for(node, moment):
    node.link.order(run=1, number=1)
    assert node.fetch() == 1
    node.claim()
    if moment != "before the message":
        message = node.take()
    if moment == "half an answer":
        node.reply(message, whole=False)
    waiting = node.answer()
    time.sleep(0.7)
    assert waiting.is_alive() and not node.link.replies
    node.state.executor_began()  # the next one is there; without one its heartbeat would lapse
    ends(waiting)
    assert [crashed(reply) for reply in node.link.replies] == [True]


def test_an_executor_that_is_quicker_than_its_message_is_answered_for(node, monkeypatch):
    """Flower offers a task before its message is there; who takes it at once finds nothing."""
    given = node.store.preregister

    def preregister(run, tree):
        if node.state.get_tasks(statuses=["pending"]):
            task, _ = node.claim()
            assert not node.state.get_messages_legacy(is_reply=False)
            node.state.finish_task(task, "failed", "no message")
        return given(run, tree)

    monkeypatch.setattr(node.store, "preregister", preregister)
    node.link.order(run=1, number=1)
    assert node.fetch() == 1
    ends(node.answer())
    assert [crashed(reply) for reply in node.link.replies] == [True]


def test_a_whole_answer_counts_even_if_its_executor_dies_right_after(node):
    node.link.order(run=1, number=1)
    node.fetch()
    node.claim()
    reply = node.reply(node.take())
    node.state.executor_began()
    ends(node.answer())
    assert [found.metadata.message_id for found in node.link.replies] == [reply.metadata.message_id]


def test_nobody_works_for_a_run_that_has_ended(node):
    node.link.order(run=1, number=1)
    node.fetch()
    _, token = node.claim()
    waiting = node.answer()
    node.take()
    node.state.run_is_over = lambda run: run in node.link.ended
    time.sleep(1)
    assert waiting.is_alive()
    node.link.ended.add(1)
    ends(waiting)
    assert node.state.get_task_by_token(token) is None and not node.link.replies
    node.link.order(run=2, number=2)
    assert node.fetch() == 2


def test_a_message_is_not_kept_for_longer_than_its_sender_waits(node):
    node.link.order(run=1, number=1).metadata.__dict__["_ttl"] = 0.5
    node.fetch()
    ends(node.answer())  # nobody had claimed it: there is no executor


# The executor ----------------------------------------------------------------------------------------------


def quick(kit: Kit, **limits: float) -> Kit:
    return replace(kit, limits=Limits(**({"transfer": 1, "idle": 1, "training": 60} | limits)))


class Handler:
    """Answers as the site's request handler does, after `work`."""

    def __init__(self, work=lambda: None) -> None:
        self.work, self.seen = work, []

    def traced(self, name, message, began):
        return nullcontext()

    def handle(self, message, context, bundle):
        self.seen.append(message)
        self.work()
        return Message(RecordDict(), reply_to=message)


def test_a_hung_pull_is_given_up_and_the_next_message_done(tmp_path, monkeypatch):
    kit, states, link = quick(kit_in(tmp_path)), InboxFactory(), Link()
    kit.var.mkdir()
    monkeypatch.setattr(executor, "bundle_of", lambda fab: "")
    fake_task_input(monkeypatch)
    node, handler, ended = Node(link, states), Handler(), threading.Event()
    given = node.store.put
    with supernode(kit, states=states):
        serving = threading.Thread(
            target=executor.serve,
            args=(kit, handler),
            kwargs={"forever": lambda: not ended.is_set()},
            daemon=True,
        )
        pieces = set(get_all_nested_objects(link.order(run=1, number=1)))
        # They are announced, and never there.
        monkeypatch.setattr(node.store, "put", lambda n, piece: None if n in pieces else given(n, piece))
        assert node.fetch() == 1
        began, waiting = time.monotonic(), node.answer()
        serving.start()
        wait_until(lambda: len(link.replies) == 1, 30)
        assert time.monotonic() - began < 20 and crashed(link.replies[0])
        ends(waiting)
        monkeypatch.setattr(node.store, "put", given)
        link.order(run=1, number=2)
        assert node.fetch() == 1
        ends(node.answer())
        assert not crashed(link.replies[1]) and len(handler.seen) == 1
        ended.set()
        serving.join()


def test_a_clock_that_is_an_hour_ahead_spoils_no_answer(tmp_path, monkeypatch):
    kit, states, link = quick(kit_in(tmp_path)), InboxFactory(), Link()
    kit.var.mkdir()
    monkeypatch.setattr(executor, "bundle_of", lambda fab: "")
    fake_task_input(monkeypatch)

    class Ahead(Handler):
        def handle(self, message, context, bundle):
            reply = super().handle(message, context, bundle)
            reply.metadata.created_at += 3600  # as Flower dates it there
            reply.metadata.ttl -= 3600
            return reply

    node, ended = Node(link, states), threading.Event()
    with supernode(kit, states=states):
        serving = threading.Thread(
            target=executor.serve,
            args=(kit, Ahead()),
            kwargs={"forever": lambda: not ended.is_set()},
            daemon=True,
        )
        order = link.order(run=1, number=1)
        assert node.fetch() == 1
        waiting = node.answer()
        serving.start()
        wait_until(lambda: len(link.replies) == 1, 30)
        ends(waiting)
        ended.set()
        serving.join()
    found, asked = link.replies[0].metadata, order.metadata
    assert not crashed(link.replies[0])
    assert (found.created_at, found.ttl) == (asked.created_at, asked.ttl)


def fake_task_input(monkeypatch) -> None:
    """Without a bundle: the run's own is not what this is about."""
    from flwr.supernode.servicer.runtime import runtime_handlers

    def pull_task_input(request, state, task):
        from flwr.app import Context
        from flwr.common.serde import context_to_proto
        from flwr.proto.runtime_pb2 import PullTaskInputResponse

        assert state.activate_task(task_id=task.task_id)
        context = Context(run_id=task.run_id, node_id=7, node_config={}, state=RecordDict(), run_config={})
        answer = PullTaskInputResponse(context=context_to_proto(context), task_id=task.task_id)
        answer.run.run_id = task.run_id
        return answer

    monkeypatch.setattr(runtime_handlers, "pull_task_input", pull_task_input)


def test_the_heart_stops_where_the_work_hangs(tmp_path):
    kit = quick(kit_in(tmp_path))
    kit.meeting.mkdir(mode=0o700)
    beats = []

    class Client:
        def SendTaskHeartbeat(self, request):
            beats.append(time.monotonic())
            return type("Answer", (), {"success": True})

    note = Note(kit.meeting, executor.NAME)
    pulse = executor.Pulse(Client(), note)
    note.write("working", 60, idle=0.5, now=True)
    busy_until = time.monotonic() + 1.2
    while time.monotonic() < busy_until:  # computes: it beats
        pulse.beat()
    assert beats and time.monotonic() - beats[-1] < 0.3
    before = len(beats)
    time.sleep(0.7)  # stands still
    pulse.beat()
    assert len(beats) == before
    note.write("pushing", 0.1, now=True)
    time.sleep(0.2)  # longer than it may take
    pulse.beat()
    assert len(beats) == before
    note.write("pushing", 60, now=True)
    pulse.beat()
    assert len(beats) == before + 1 and not pulse.dropped


def test_who_waits_for_room_says_so_and_does_not_count_as_hung(tmp_path, monkeypatch, caplog):
    kit = quick(kit_in(tmp_path), idle=0.2, training=0.8)
    kit.meeting.mkdir(mode=0o700)
    kit.var.mkdir(exist_ok=True)
    monkeypatch.setattr(executor, "PATIENCE", 0.3)
    free = [0, 0, 10 * executor.SPARE]
    monkeypatch.setattr(executor.shutil, "disk_usage", lambda path: type("Usage", (), {"free": free.pop(0)}))
    beats = []

    class Client:
        def SendTaskHeartbeat(self, request):
            beats.append(note.state)
            return type("Answer", (), {"success": True})

    note = Note(kit.meeting, executor.NAME)
    pulse = executor.Pulse(Client(), note)
    said = []

    def sleep(seconds):
        said.append((last_sign(kit.meeting, executor.NAME).state, seconds))
        pulse.beat()
        real_sleep(seconds)
        with pytest.raises(UserError, match="is full: make room there"):
            process_check.check_executor(kit)

    real_sleep = time.sleep
    monkeypatch.setattr("fedfrozen_app.sites.process_check.running", lambda path: True)
    monkeypatch.setattr(executor.time, "sleep", sleep)
    rest = executor.Rest(kit, note, pulse)
    rest.before_work()
    assert not free and said == [("without room", 0.3)] * 2
    pulse.beat()  # 0.6 s without computing, but at work only now
    assert beats == ["without room", "without room", "working"]
    assert caplog.text.count("make room there") == 1
    assert not rest()  # for longer than work on one message may take
    later = executor.Rest(kit, note, pulse)
    pulse.dropped = True
    assert not later()


@pytest.mark.parametrize("how", ["says no", "knows it no more"])
def test_an_answer_that_nobody_wants_is_not_handed_in(tmp_path, how):
    kit = kit_in(tmp_path)
    kit.meeting.mkdir(mode=0o700)

    class Client:
        def SendTaskHeartbeat(self, request):
            if how == "says no":
                return type("Answer", (), {"success": False})
            request = httpx.Request("POST", "https://supernode")
            raise httpx.HTTPStatusError("", request=request, response=httpx.Response(401, request=request))

    note = Note(kit.meeting, executor.NAME)
    note.write("working", 60, now=True)
    pulse = executor.Pulse(Client(), note)
    pulse.beat()
    assert pulse.dropped


def test_pieces_that_come_keep_a_transfer_alive():
    from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse

    patience = Patience(0.3)
    missing = PullObjectResponse(object_found=True)
    for _ in range(3):
        time.sleep(0.2)
        patience.check(PullObjectRequest(), missing)
        patience.check(PullObjectRequest(), PullObjectResponse(object_found=True, object_available=True))
    time.sleep(0.4)
    with pytest.raises(Exception, match=r"no piece of its message came for 0\.3 s"):
        patience.check(PullObjectRequest(object_id="x"), missing)


def test_a_message_of_many_large_pieces_is_given_up(monkeypatch):
    """Each is within the limit of one; together they would fill the site's memory."""
    from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse

    monkeypatch.setattr(fleet_client, "LARGEST", 1000)
    monkeypatch.setattr(fleet_client, "SPARE", 0)
    size, piece = fleet_client.MessageSize(), PullObjectResponse(object_content=bytes(400))
    for _ in range(3):  # messages
        size.begin()
        for _ in range(2):
            assert size.add(PullObjectRequest(object_id="x"), piece) is piece
    with pytest.raises(Exception, match="its message is larger than any can be"):
        size.add(PullObjectRequest(object_id="x"), piece)


# The SuperNode's line to the server ------------------------------------------------------------------------


def test_a_compressed_answer_is_not_inflated(monkeypatch):
    """A hundred kilobytes would become a hundred megabytes, or any number of them."""
    bomb, read = zlib.compress(bytes(10**8)), []

    def content():
        read.append(1)
        yield bomb

    answer = httpx.Response(200, headers={"content-encoding": "deflate"}, content=content())
    with pytest.raises(httpx.DecodingError, match="the server's answer is compressed"):
        answered_with(answer, monkeypatch)
    assert not read


def answered_with(answer: httpx.Response, monkeypatch) -> httpx.Response:
    """What the SuperNode's client makes of this answer of its server."""
    monkeypatch.setattr(
        SiteFleetClient, "connection", SimpleNamespace(kit=None, contact=Contact()), raising=False
    )
    monkeypatch.setattr(fleet_client, "server_context", lambda kit: False)
    with SiteFleetClient.from_server_address("127.0.0.1:1", False, None, []) as client:
        client._client._transport = httpx.MockTransport(lambda request: answer)
        return client._client.post("https://127.0.0.1:1/v1/fleet/pull-messages")


def test_an_answer_without_an_end_is_not_read_on(monkeypatch):
    """A server that sends and sends: the site's memory would be its own."""
    monkeypatch.setattr(fleet_client, "LARGEST", 10**6)
    read = []

    def content():
        while True:
            read.append(1)
            yield bytes(10**5)

    with pytest.raises(httpx.ReadError, match="larger than any message can be"):
        answered_with(httpx.Response(200, content=content()), monkeypatch)
    assert len(read) == 11
    whole = httpx.Response(200, content=iter([bytes(10**5)] * 10))
    assert len(answered_with(whole, monkeypatch).content) == 10**6


def test_a_link_that_is_cut_in_a_handshake_is_tried_again_and_a_stranger_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(fleet_http_connection, "FleetHttpClient", None)
    (tmp_path / "federation.yaml").write_text(yaml.safe_dump(PLAN))
    write_kits(read_federation(tmp_path / "federation.yaml"), tmp_path / "kits")
    kit = Kit.read(tmp_path / "kits" / "north")
    kit.meeting.mkdir(mode=0o700)
    supernodes.use_client_of(kit, Contact(), InboxFactory().inbox)
    question = PullMessagesRequest()
    fatal = ("certificate", "ssl", "tls")  # words at which Flower ends a SuperNode

    def answered(how) -> str:
        """What the client says of a server that does so with a connection."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=how, args=(listener,), daemon=True)
            thread.start()
            client = fleet_http_connection.FleetHttpClient.from_server_address(
                f"127.0.0.1:{listener.getsockname()[1]}", False, None, []
            )
            with client, pytest.raises(httpx.TransportError) as error:
                client.PullMessages(question)
            thread.join(10)
        return str(error.value).lower()

    def cut(listener):
        connection = listener.accept()[0]
        connection.recv(10)
        connection.shutdown(socket.SHUT_WR)  # an end, and no reset
        connection.recv(10_000)
        connection.close()

    def stranger(listener):
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(credentials(kit))
        with contextlib.suppress(OSError), listener.accept()[0] as raw:
            tls.wrap_socket(raw, server_side=True)

    assert not any(word in answered(cut) for word in fatal)
    assert any(word in answered(stranger) for word in fatal)


# The watchdog ----------------------------------------------------------------------------------------------

CHILD = """
import sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from types import SimpleNamespace
from fedfrozen_app.sites.sign import Note
place = Path({place!r})
note = Note(place, "executor")
with (place / "starts").open("a") as file:
    file.write("x")
times = len((place / "starts").read_text())
{body}
"""


def child(place: Path, body: str) -> list[str]:
    root = str(Path(guard.__file__).parents[2])
    (place / "child.py").write_text(CHILD.format(root=root, place=str(place), body=body))
    return [sys.executable, str(place / "child.py")]


def keep(place: Path, body: str) -> int:
    return guard.keep(child(place, body), place, "executor")


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(guard, "LOOK", 0.1)
    monkeypatch.setattr(guard, "PAUSE", 0.1)
    return tmp_path


HANGS = {
    "silent": 'note.write("waiting", 0.5)\nif times < 3: time.sleep(60)\nsys.exit(2)',
    "stopped": 'import os, signal\nnote.write("waiting", 0.5)\n'
    "if times < 3: os.kill(os.getpid(), signal.SIGSTOP)\nsys.exit(2)",
    "idle": 'note.write("working", 60, idle=0.5)\nif times < 3: time.sleep(60)\nsys.exit(2)',
}


@pytest.mark.parametrize("how", HANGS)
def test_what_hangs_is_started_again(place, caplog, how):
    began = time.monotonic()
    assert keep(place, HANGS[how]) == 2
    assert (place / "starts").read_text() == "xxx" and time.monotonic() - began < 30
    assert caplog.text.count("it was ended and is started again") == 2


@pytest.mark.slow
def test_who_computes_or_says_something_is_left_alone(place):
    body = """
for _ in range(30):
    note.write("waiting", 0.8)
    time.sleep(0.05)
note.write("working", 60, idle=0.8, now=True)
until = time.monotonic() + 2
while time.monotonic() < until: pass
sys.exit(2)
"""
    assert keep(place, body) == 2
    assert (place / "starts").read_text() == "x"


def test_who_is_killed_or_fails_is_started_again_and_who_says_why_is_not(place):
    body = "import os, signal\nif times == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
    assert keep(place, body + "sys.exit([0, 0, 1, 0, 2][times])") == 2
    assert (place / "starts").read_text() == "xxxx"


def test_the_watchdog_ends_with_its_process_and_its_process_with_it(place):
    body = "import signal\nsignal.signal(signal.SIGTERM, lambda *a: sys.exit(7))\n"
    body += 'note.write("waiting", 60)\ntime.sleep(60)'
    code = f"""
import sys; sys.path.insert(0, {str(Path(guard.__file__).parents[2])!r})
from pathlib import Path
from types import SimpleNamespace
from fedfrozen_app.sites import guard
sys.exit(guard.keep({child(place, body)!r}, Path({str(place)!r}), "executor"))
"""
    for number, expected in ((signal.SIGTERM, 7), (signal.SIGKILL, -9)):
        (place / "executor.json").unlink(missing_ok=True)
        watching = subprocess.Popen([sys.executable, "-c", code])
        wait_until(lambda: (place / "executor.json").exists(), 30)
        inner = json.loads((place / "executor.json").read_text())["pid"]
        assert inner != watching.pid
        watching.send_signal(number)
        assert watching.wait(30) == expected
        wait_until(lambda inner=inner: not alive(inner), 10)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_idleness_is_a_share_of_a_processor(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("fedfrozen_app.sites.sign.time.monotonic", lambda: clock[0])
    idle, used = Idleness(), 5.0
    assert idle.look("working", used) == 0
    for second in range(1, 101):  # a heartbeat now and then is no work
        clock[0] = second
        used += 0.01 if second % 20 == 0 else 0.0
        found = idle.look("working", used)
    assert found == 100
    clock[0], used = 101.0, used + 3
    assert idle.look("working", used) == 0
    clock[0] = 900.0
    assert idle.look("without room", used) == 0  # what it was before does not count


# Limits and questions --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "limits", ["{transfer: 0}", "{transfer: soon}", "{patience: 3}", "300", "{idle: true}"]
)
def test_bad_limits_end_with_a_sentence(tmp_path, limits):
    kit = kit_in(tmp_path)
    path = kit.folder / "site.yaml"
    path.write_text(path.read_text().replace("folder: var", f"folder: var, limits: {limits}"))
    with pytest.raises(UserError, match="limits"):
        Kit.read(kit.folder)
    path.write_text(path.read_text().replace(f"limits: {limits}", "limits: {transfer: 5}"))
    assert Kit.read(kit.folder).limits == Limits(transfer=5)


@pytest.mark.slow
def test_a_check_asks_the_executor_and_times_its_answer(tmp_path, monkeypatch):
    kit, ended = kit_in(tmp_path), threading.Event()
    monkeypatch.setattr(process_check, "PATIENCE", 3.0)
    with executor.alone(kit):
        with supernode(kit):
            serving = threading.Thread(
                target=executor.serve,
                args=(kit, Handler()),
                kwargs={"forever": lambda: not ended.is_set()},
                daemon=True,
            )
            serving.start()
            wait_until(lambda: (sign := last_sign(kit.meeting, "executor")) and sign.state == "waiting")
            assert "waits for messages, and answers, after" in process_check.check_executor(kit)
            ended.set()
            serving.join()
        with pytest.raises(UserError, match="did not answer within 3 s"):
            process_check.check_executor(kit)
    assert not list(kit.meeting.glob("*.question")) and os.getpid()
