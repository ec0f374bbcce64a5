"""Where SuperNode and executor meet: who is let to the socket, and who is told nothing."""

import json
import os
import re
import socket
import ssl
import subprocess
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

import httpx
import pytest
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.sites import executor, link, process_check
from fedfrozen_app.sites.sign import Note, Sign, last_sign
from tests.sites.processes import kit_in, supernode, wait_until

VERSION = [RuntimeVersionHttpInterceptor(component_name="SuperExec")]
ACQUIRE = AcquireTaskRequest(supported_task_types=["CLIENT_APP"])


@contextmanager
def rogue(kit, tls):
    """Somebody who was first at the socket; all that it is told after the handshake."""
    told: list[bytes] = []
    kit.meeting.mkdir(mode=0o700, exist_ok=True)
    folder = link.open_folder(kit.meeting)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(link.short(folder, link.NAME))
        listener.listen()

        def greet():
            while True:
                try:
                    raw = listener.accept()[0]
                except OSError:
                    return
                try:
                    with raw, tls.wrap_socket(raw, server_side=True) if tls else raw as wrapped:
                        told.append(wrapped.recv(4096) or b"")
                except OSError as error:  # a refused handshake
                    told.append(f"refused: {error}".encode())

        threading.Thread(target=greet, daemon=True).start()
        try:
            yield told
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            Path(link.short(folder, link.NAME)).unlink()
            os.close(folder)


def test_the_two_of_a_kit_meet_and_a_proxy_gets_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    kit = kit_in(tmp_path)
    with supernode(kit), link.SuperNodeClient(kit, VERSION) as client:
        assert client.contact(5) == link.Contact()
        assert not client.AcquireTask(ACQUIRE).HasField("task")
    secret = kit.folder / "link.pem"
    assert secret.stat().st_mode & 0o777 == 0o600 and kit.meeting.stat().st_mode & 0o777 == 0o700


def test_who_shows_no_certificate_or_another_kit_s_is_not_served(tmp_path):
    kit, other = kit_in(tmp_path / "a"), kit_in(tmp_path / "b")
    link.credentials(other)
    with supernode(kit):
        anybody = ssl.create_default_context()
        anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
        stranger = link.context(other, server=False)
        stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
        for tls in (anybody, stranger):
            folder = link.open_folder(kit.meeting)
            transport = httpx.HTTPTransport(verify=tls, uds=link.short(folder, link.NAME))
            with httpx.Client(transport=transport) as client, pytest.raises(httpx.TransportError):
                client.get("https://supernode/health")
            os.close(folder)


@pytest.mark.parametrize("how", ["another kit's certificate", "no TLS"])
def test_a_rogue_listener_is_told_nothing_and_not_obeyed(tmp_path, caplog, monkeypatch, how):
    """It grabbed the socket first. The executor stays, and works once its own SuperNode is there."""
    monkeypatch.setattr(executor, "PATIENCE", 0.05)
    kit, other = kit_in(tmp_path / "a"), kit_in(tmp_path / "b")
    tls = link.context(other, server=True) if how != "no TLS" else None
    if tls:
        tls.verify_mode = ssl.CERT_NONE  # it would take anybody
    ended = threading.Event()
    forever = {"forever": lambda: not ended.is_set()}
    thread = threading.Thread(target=executor.serve, args=(kit, None), kwargs=forever, daemon=True)
    with rogue(kit, tls) as told:
        thread.start()
        wait_until(lambda: len(told) >= 2)
        wait_until(lambda: last_sign(kit.meeting, "executor").state == "alone")
    if tls:
        assert all(piece.startswith(b"refused") for piece in told)
        assert "is not the SuperNode of this kit" in caplog.text
    else:  # a ClientHello, which names nothing but the word `supernode`
        assert all(piece[:1] == b"\x16" and b"POST" not in piece for piece in told)
    with supernode(kit):
        wait_until(lambda: last_sign(kit.meeting, "executor").state == "waiting")
        ended.set()
        thread.join()


def test_a_folder_that_others_can_enter_is_refused(tmp_path):
    kit = kit_in(tmp_path)
    kit.meeting.mkdir(mode=0o700)
    kit.meeting.chmod(0o755)
    with pytest.raises(UserError, match="Others can enter"):
        link.SuperNodeClient(kit)
    with pytest.raises(UserError, match="Others can enter"), link.listening(kit.meeting, link.NAME):
        pass
    kit.meeting.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    kit.meeting.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="cannot be entered"):
        link.SuperNodeClient(kit)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another account")
def test_another_account_reaches_nothing(tmp_path):
    kit = kit_in(tmp_path)
    for folder in (kit.folder.parent, *kit.folder.parents):
        if folder.is_relative_to(tmp_path.parents[1]):
            folder.chmod(0o755)
    kit.folder.chmod(0o755)  # even where the kit itself stands open

    def as_nobody(attempt) -> int:
        """0 where the attempt was forbidden."""
        if (child := os.fork()) == 0:
            try:
                os.chdir(kit.folder)
                os.setgroups([])
                os.setuid(65534)
                with socket.socket(socket.AF_UNIX) as there:
                    attempt(there, "run/supernode.sock")
            except PermissionError:
                os._exit(0)
            finally:
                os._exit(1)
        return os.waitpid(child, 0)[1]

    with supernode(kit):
        assert as_nobody(socket.socket.connect) == 0
        assert as_nobody(socket.socket.bind) == 0


def test_one_supernode_a_kit_and_two_kits_side_by_side(tmp_path):
    one, other = kit_in(tmp_path / "a"), kit_in(tmp_path / "b")
    with supernode(one), supernode(other):
        with pytest.raises(UserError, match="running already"), link.listening(one.meeting, link.NAME):
            pass
        for kit in (one, other):
            with link.SuperNodeClient(kit) as client:
                assert client.contact(5) == link.Contact()
    with supernode(one):  # and a socket that a killed one left is no hindrance
        pass


def leave_a_killed_one_s(path, tmp_path):
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))


def point_to_another_socket(path, tmp_path):
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "other.sock"))
    path.symlink_to(tmp_path / "other.sock")


def point_to_a_file(path, tmp_path):
    (tmp_path / "other.sock").write_text("not ours")
    path.symlink_to(tmp_path / "other.sock")


def point_nowhere(path, tmp_path):
    path.symlink_to(tmp_path / "missing")


PLANTED = (leave_a_killed_one_s, point_to_another_socket, point_to_a_file, point_nowhere)


@pytest.mark.parametrize("plant", PLANTED)
def test_what_lies_in_the_socket_s_place_is_replaced_and_nothing_behind_it(tmp_path, monkeypatch, plant):
    kit = kit_in(tmp_path)
    kit.meeting.mkdir(mode=0o700)
    monkeypatch.chdir(kit.meeting)  # a socket's path is short
    plant(Path("supernode.sock"), tmp_path)
    beside = tmp_path / "other.sock"
    before = beside.lstat() if beside.exists() else None
    with supernode(kit), link.SuperNodeClient(kit) as client:
        assert client.contact(5) == link.Contact()
    assert (beside.lstat() if beside.exists() else None) == before


def test_a_folder_in_the_socket_s_place_is_named(tmp_path):
    kit = kit_in(tmp_path)
    kit.meeting.mkdir(mode=0o700)
    (kit.meeting / "supernode.sock").mkdir()
    named = pytest.raises(UserError, match=r"supernode\.sock is no socket .*: remove it")
    with named, link.listening(kit.meeting, link.NAME):
        pass


def test_an_executor_does_not_follow_a_link_to_another_s_socket(tmp_path):
    """Where the link leads, somebody listens who has another certificate: the executor tells it nothing."""
    kit, other = kit_in(tmp_path / "a"), kit_in(tmp_path / "b")
    with supernode(other):
        link.credentials(kit)
        kit.meeting.mkdir(mode=0o700)
        (kit.meeting / "supernode.sock").symlink_to(other.meeting / "supernode.sock")
        with link.SuperNodeClient(kit) as client, pytest.raises(httpx.ConnectError) as refused:
            client.contact(5)
        assert link.is_stranger(refused.value)


@pytest.mark.parametrize(
    "said", [b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n"], ids=["nothing", "half", "plain"]
)
def test_many_connections_do_not_keep_the_executor_out(tmp_path, said):
    """Three hundred, which say nothing, begin a handshake and stop, or speak without TLS."""
    kit = kit_in(tmp_path)
    with supernode(kit), ExitStack() as stack:
        number = link.open_folder(kit.meeting)
        stack.callback(os.close, number)
        for _ in range(300):
            one = stack.enter_context(socket.socket(socket.AF_UNIX))
            one.settimeout(10)
            one.connect(link.short(number, link.NAME))
            one.sendall(said)
        with link.SuperNodeClient(kit, VERSION) as client:
            assert client.contact(20) == link.Contact()
            assert not client.AcquireTask(ACQUIRE).HasField("task")


def test_both_processes_make_the_same_credentials(tmp_path):
    kit = kit_in(tmp_path)
    barrier, found = threading.Barrier(8), []

    def make():
        barrier.wait()
        found.append(link.credentials(kit).read_bytes())

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (
        len(found) == 8
        and len(set(found)) == 1
        and [path.name for path in kit.folder.glob("*link*")] == ["link.pem"]
    )


# Questions -------------------------------------------------------------------------------------------------


def test_a_check_asks_the_supernode_and_times_it(tmp_path, monkeypatch):
    kit = kit_in(tmp_path)
    assert process_check.check_supernode(kit) == "not started"
    with supernode(kit):
        assert "answers, after" in process_check.check_supernode(kit)
        with pytest.raises(UserError, match="has not let this site's SuperNode in yet"):
            process_check.server_contact(kit)
    with supernode(kit, link.Contact(7, time.monotonic() - 5)):
        assert re.fullmatch(
            r"registered, as node 7; the server answered \d+ s ago", process_check.server_contact(kit)
        )
    silent = pytest.raises(UserError, match=r"has not answered this site's SuperNode for 5\d\d s")
    with supernode(kit, link.Contact(7, time.monotonic() - 500)), silent:
        process_check.server_contact(kit)
    # One that is there and answers nothing.
    monkeypatch.setattr(process_check, "PATIENCE", 0.5)
    with link.listening(kit.meeting, link.NAME) as bound:
        bound.listen()
        began = time.monotonic()
        with pytest.raises(UserError, match=r"did not answer well within 0\.5 s"):
            process_check.check_supernode(kit)
        assert time.monotonic() - began < 30


def test_a_check_tells_a_hung_executor_from_a_busy_one(tmp_path, monkeypatch):
    kit = kit_in(tmp_path)
    assert process_check.check_executor(kit) == "not started"
    with executor.alone(kit):
        assert process_check.check_executor(kit) == "starting"
        kit.meeting.mkdir(mode=0o700)
        Note(kit.meeting, "executor").write("waiting", 300)

        def said(state, ago, pid=1, limit=300):
            moment = time.monotonic() - ago
            sign = Sign(pid, state, moment, moment, moment + limit)
            (kit.meeting / "executor.json").write_text(json.dumps(asdict(sign)))

        monkeypatch.setattr(process_check, "PATIENCE", 1.0)
        said("waiting", 60)
        with pytest.raises(UserError, match="for no message for 61 s: it hangs"):
            process_check.check_executor(kit)
        said("pulling", 60, limit=50)
        with pytest.raises(UserError, match="it is pulling for 60 s, longer than limits"):
            process_check.check_executor(kit)
        monkeypatch.setattr(process_check, "PATIENCE", 10.0)
        monkeypatch.setattr(process_check, "LOOK", 0.3)
        said("working", 5, pid=0)  # not for long: nobody looks closer
        assert "at work on a message (working), for 5 s" in process_check.check_executor(kit)
        for command, hangs in ((["sleep", "60"], True), (["sh", "-c", "while :; do :; done"], False)):
            with subprocess.Popen(command) as process:
                said("working", 60, process.pid)
                try:
                    if hangs:
                        with pytest.raises(UserError, match="60 s and did not compute in the last"):
                            process_check.check_executor(kit)
                    else:
                        assert "at work on a message (working), for 60 s" in process_check.check_executor(kit)
                finally:
                    process.kill()
        said("alone", 5)
        with pytest.raises(UserError, match="no SuperNode answers it, for 5 s"):
            process_check.check_executor(kit)
    (kit.meeting / "executor.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        last_sign(kit.meeting, "executor")
