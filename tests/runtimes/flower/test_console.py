"""What the operator of a deployed run reads while its server app or its SuperLink fails."""

import json
import queue
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict

import httpx
import pytest

from fedfrozen_app.files import lease, status
from fedfrozen_app.runtimes.flower import server_app_watch, superlink_connection
from fedfrozen_app.runtimes.flower.run_log import kept
from fedfrozen_app.runtimes.flower.server_app_watch import ServerAppLost, ServerAppWatch
from fedfrozen_app.runtimes.flower.superlink_connection import Connection


@pytest.fixture
def process():
    """A server app: it has taken the run, and writes into its folder."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield child
    child.kill()
    child.wait()


def take(folder, pid: int) -> None:
    owner = lease.Owner.of(pid)
    status.write(folder, status.new_status({}, [], owner=owner))
    (folder / lease.FILE).write_text(json.dumps(asdict(owner)))


def test_a_lost_server_app_is_told_within_seconds(tmp_path, process, monkeypatch):
    assert server_app_watch.CERTAIN + 0.5 < 15  # the command looks twice a second
    monkeypatch.setattr(server_app_watch, "CERTAIN", 0.2)
    watch = ServerAppWatch(tmp_path)
    watch.check()  # none has begun
    take(tmp_path, process.pid)
    watch.check()
    process.kill()
    process.wait()
    watch.check()  # its last lines may still come
    time.sleep(0.25)
    with pytest.raises(
        ServerAppLost, match=rf"server app \(process {process.pid}\) was killed at about \d\d:"
    ):
        watch.check()


def test_an_earlier_attempt_and_another_machine_are_not_taken_for_a_lost_one(tmp_path, process, monkeypatch):
    monkeypatch.setattr(server_app_watch, "CERTAIN", 0.0)
    watch = ServerAppWatch(tmp_path)
    take(tmp_path, process.pid)
    process.kill()
    process.wait()
    status.write(tmp_path, status.new_status({}, []))  # resumed, and the next server app has not begun
    watch.check()
    owner = status.replace(lease.Owner.of(process.pid), host="another", began=7)
    (tmp_path / lease.FILE).write_text(json.dumps(asdict(owner)))
    status.write(tmp_path, status.new_status({}, [], owner=owner))
    watch.check()


def test_a_run_that_nobody_takes_up_is_told_once(tmp_path, caplog):
    watch = ServerAppWatch(tmp_path)
    watch.check()
    assert not caplog.records
    watch._began -= server_app_watch.BEGINS
    watch.check()
    watch.check()
    assert [
        record.getMessage().endswith("does the server's SuperExec (superexec.sh) run?")
        for record in caplog.records
    ] == [True]


class Client:
    """Answers as the SuperLink does at the end of a run."""

    class _Run:
        class status:
            sub_status = "completed"

    def StreamLogs(self, request):
        return []

    def ListRuns(self, request):
        return type("Answer", (), {"run_dict": {request.run_id: self._Run}})


def test_an_outage_of_the_superlink_is_told_with_its_end(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(superlink_connection, "OUTAGE", 0.02)
    monkeypatch.setattr(superlink_connection.time, "sleep", lambda seconds, sleep=time.sleep: sleep(0.01))
    down = 6

    @contextmanager
    def client(address, tls=None):
        nonlocal down
        down -= 1
        if down >= 0:
            raise httpx.ConnectError("refused")
        yield Client()

    monkeypatch.setattr(superlink_connection, "control_client", client)
    connection, chunks = Connection("127.0.0.1:9", tmp_path), queue.Queue()
    connection._read_log(7, chunks)
    assert chunks.get_nowait() is None
    began, ended = [record.getMessage() for record in caplog.records]
    assert (
        began.startswith("The SuperLink at 127.0.0.1:9 has not answered since ") and "Start it again" in began
    )
    assert ended == "The SuperLink answers again, after 0 s."


def test_a_full_disk_is_told_with_the_file_that_had_no_room(tmp_path):
    log = tmp_path / "run.log"
    log.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as raised, kept(log, print) as keep:
        keep("a line")
    assert raised.value.filename == str(log)
