"""`fedfrozen try-sites`: what it refuses, its example data, its door; slow: real processes, and none left."""

import contextlib
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.commands.try_sites import command as trial
from fedfrozen_app.commands.try_sites.door import Door
from fedfrozen_app.commands.try_sites.examples import ROWS_OF_A_SITE, TEST_ROWS, write_examples
from fedfrozen_app.commands.try_sites.shown import Shell, explain
from fedfrozen_app.core.errors import RunFailed, UserError
from fedfrozen_app.runtimes.flower.processes import free_port
from fedfrozen_app.sites.audit_log import read_audit
from fedfrozen_app.sites.federation_plan import read_federation
from fedfrozen_app.sites.kit_writer import write_kits

# Refused before anything starts --------------------------------------------------------------------------


def refused(capsys, *words: str) -> str:
    assert command(["try-sites", *words]) == 2
    return capsys.readouterr().err


def test_a_folder_that_holds_something_is_refused(tmp_path, capsys):
    (tmp_path / "mine").touch()
    assert "is not empty: give a new folder" in refused(capsys, str(tmp_path), "--yes")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_port_in_use_is_refused(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused(capsys, str(tmp_path / "new"), "--yes", "--port", str(port))
    assert f"Port {port} cannot be used (Address already in use): give another" in said
    assert not (tmp_path / "new").exists()
    assert "Port 99999 cannot be used" in refused(capsys, "--yes", "--port", "99999")


def test_without_a_person_yes_is_needed(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: PTH123, SIM115
    assert "nobody is here to ask: add --yes" in refused(capsys)


def test_without_the_command_on_the_path_it_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(trial, "flower_environment", lambda home: {"PATH": str(tmp_path)})
    assert "fedfrozen is not on the PATH" in refused(capsys, "--yes")


def test_a_misspelt_verb_is_named(capsys):
    assert command(["try-site"]) == 2
    assert "did you mean try-sites?" in capsys.readouterr().err


# Parts ---------------------------------------------------------------------------------------------------


def test_the_temporary_folder_is_kept_only_when_something_failed(capsys):
    def folder_after(error: type[BaseException] | None) -> Path:
        with contextlib.suppress(BaseException), trial._place(None) as folder:
            if error is not None:
                raise error
        return folder

    assert not folder_after(None).exists()
    assert not folder_after(KeyboardInterrupt).exists()
    kept = folder_after(RunFailed)
    assert kept.is_dir() and f"The logs are in {kept}/logs." in capsys.readouterr().out
    shutil.rmtree(kept)


def test_example_data_differ_between_sites_and_share_no_picture(tmp_path):
    write_examples(tmp_path, trial.SITES)
    names = {who: [p.name for p in tmp_path.glob(f"{who}/*/*.png")] for who in (*trial.SITES, "test")}
    assert [len(found) for found in names.values()] == [ROWS_OF_A_SITE, ROWS_OF_A_SITE, TEST_ROWS]
    assert len({name for found in names.values() for name in found}) == 2 * ROWS_OF_A_SITE + TEST_ROWS
    low = {who: sum(len(list(tmp_path.glob(f"{who}/{digit}/*"))) for digit in range(5)) for who in names}
    assert low["north"] > 0.7 * ROWS_OF_A_SITE and low["south"] < 0.3 * ROWS_OF_A_SITE


def test_a_path_is_shown_whole(capsys):
    path = f"/{'a-long-name/' * 20}trial"
    explain(f"Everything is in {path}.")
    assert f"{path}." in capsys.readouterr().out.split()


def test_commands_end_with_the_block(tmp_path):
    with contextlib.suppress(KeyboardInterrupt), Shell(tmp_path) as shell:
        process = shell.start("sh -c 'sleep 600 & sleep 600'", tmp_path / "log", shown=False)
        raise KeyboardInterrupt
    assert process.poll() is not None
    nothing_left(tmp_path)


def test_a_command_that_fails_is_named(tmp_path, capsys):
    with (
        Shell(tmp_path) as shell,
        pytest.raises(RunFailed, match="`sh -c 'echo no; exit 3'` ended with exit"),
    ):
        shell.run("sh -c 'echo no; exit 3'")
    assert capsys.readouterr().out == "\n$ sh -c 'echo no; exit 3'\n    no\n"
    with (
        Shell(tmp_path) as shell,
        pytest.raises(RunFailed, match="`fedfrozen site pending x` ended with exit"),
    ):
        shell.run("fedfrozen site pending x")
    said = capsys.readouterr().out
    assert f"    fedfrozen: {tmp_path}/x is no site's kit" in said and Path.cwd() != tmp_path


# The door ------------------------------------------------------------------------------------------------


@pytest.fixture
def door(tmp_path):
    """A server's kit with a door; behind it something that answers in capitals."""
    plan = {"server": {"address": "127.0.0.1", "port": free_port(), "internal_port": free_port()}}
    (tmp_path / "federation.yaml").write_text(yaml.safe_dump(plan | {"sites": ["north"]}))
    write_kits(read_federation(tmp_path / "federation.yaml"), tmp_path / "kits")
    kit, ports = tmp_path / "kits" / "server", plan["server"]
    (kit / "run").mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(kit / "run" / "superlink.sock"))
        bound.listen()

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    one = bound.accept()[0]
                    with one:
                        one.sendall(one.recv(100).upper())

        threading.Thread(target=serve, daemon=True).start()
        with Door(kit, ports["port"], ports["internal_port"]):
            yield tmp_path / "kits", ports["port"], ports["internal_port"]


def said_through(kits: Path, port: int, party: str | None) -> bytes:
    tls = ssl.create_default_context(cafile=kits / "north" / "ca.crt")
    if party is not None:
        tls.load_cert_chain(kits / party / "node.crt", kits / party / "node.key")
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as raw,
        tls.wrap_socket(raw, server_hostname="127.0.0.1") as wrapped,
    ):
        wrapped.sendall(b"hello")
        return wrapped.recv(100)


def test_the_door_lets_in_whom_the_server_admitted(door):
    kits, port, internal = door
    assert said_through(kits, port, "north") == b"HELLO"
    assert said_through(kits, internal, None) == b"HELLO"
    with pytest.raises(OSError):
        assert said_through(kits, port, None) == b"" or None
        raise ConnectionError  # closed without a word is as good
    (kits / "server" / "admitted" / "north.crt").unlink()
    assert said_through(kits, port, "north") == b""


def test_a_door_whose_port_is_taken_says_so(door):
    kits, port, _ = door
    with pytest.raises(UserError, match="cannot be opened"), Door(kits / "server", port, free_port()):
        pass


# Real processes ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def started(*words: str):
    line = [sys.executable, "-m", "fedfrozen_app", "try-sites", *words]
    process = subprocess.Popen(
        line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def lines_until(process: subprocess.Popen, text: str) -> list[str]:
    seen = []
    for line in process.stdout:
        seen.append(line)
        if text in line:
            return seen
    raise AssertionError("".join(seen))


def of_trial(folder: Path) -> dict[int, str]:
    """The processes whose command or environment names the folder."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (place / "cmdline").read_bytes() + (place / "environ").read_bytes()
            if str(folder).encode() in words and int(place.name) != os.getpid():
                found[int(place.name)] = words.split(b"\0\0")[0].replace(b"\0", b" ").decode(errors="replace")
    return found


def nothing_left(folder: Path) -> None:
    deadline = time.monotonic() + 20
    while of_trial(folder) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert of_trial(folder) == {}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_trial_from_kits_to_the_logs(tmp_path):
    folder = tmp_path / "trial"
    with started(str(folder), "--yes") as process:
        said = process.communicate()[0]
        assert process.returncode == 0, said
    nothing_left(folder)
    for text in (
        "$ fedfrozen provision federation.yaml -o kits\n",
        "$ fedfrozen server admit kits/server\n",
        "leaves    updates of the parameters: ",
        "--yes: approved at north and south.",
        "$ fedfrozen site audit kits/south\n",
    ):
        assert text in said, text
    assert ("nginx is not installed" in said) == (shutil.which("nginx") is None)
    (hash_shown,) = set(re.findall(r"hash      (\w{64})", said))
    for name in trial.SITES:
        log = read_audit(folder / "kits" / name / "var" / "audit.jsonl")
        assert [entry["event"] for entry in log] == ["pending", "hello", *["sent"] * trial.ROUNDS]
        assert log[1]["proposal"] == hash_shown and log[1]["approved_by"] not in ("", "the policy")
    assert (folder / "run" / "report.html").exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ctrl_c_leaves_no_process_and_no_folder(tmp_path):
    with started("--yes") as process:
        head = lines_until(process, "Lines that begin")
        folder = Path(re.search(r"in\s+(/\S+)\.\s", "".join(head))[1])
        lines_until(process, "== 3.")
        assert len(of_trial(folder)) >= 3
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=120)[0]
        assert process.returncode == 130, said
    nothing_left(folder)
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_site_that_fails_is_named(tmp_path):
    folder = tmp_path / "trial"
    with started(str(folder), "--yes") as process:
        lines_until(process, "$ sh kits/south/start.sh")
        (leader,) = [
            pid
            for pid, words in of_trial(folder).items()
            if words.startswith(f"sh {folder}/kits/south/start.sh")
        ]
        os.killpg(leader, signal.SIGKILL)
        said = process.communicate(timeout=600)[0]
        assert process.returncode == 1, said
    assert "fedfrozen: the run failed. south-start ended before the run did" in said
    nothing_left(folder)
