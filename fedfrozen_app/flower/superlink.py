"""A SuperLink, of ours or somewhere else, and the runs that are handed in to it.

`ControlHttpClient`, the client behind `flwr list` and `flwr log`, is not public API of Flower 1.41. Used
in this file alone: a call through the command line takes a second of CPU, here milliseconds.
"""

import hashlib
import json
import logging
import math
import os
import queue
import re
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from flwr.cli.build import build_fab_from_disk
from flwr.common.config import parse_config_args
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    StartRunRequest,
    StopRunRequest,
    StreamLogsRequest,
)
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab

from fedfrozen_app.errors import RunFailed, UserError
from fedfrozen_app.flower.processes import (
    ANSI_COLOUR,
    Children,
    SimulationFailed,
    executable,
    flower_environment,
    free_port,
    no_proxy_for_loopback,
    tail,
)

log = logging.getLogger(__name__)

Scalar = str | int | float | bool

CONNECTION = "own"  # the SuperLink's name in the config.toml that we write for `flwr run`
RECONNECTS = 120  # a second each, without a word in between


@dataclass(frozen=True)
class RunEnd:
    """How a run ended: `completed`, `failed` or `stopped`, Flower's own words on it, its log."""

    status: str
    details: str
    log: list[str]


# What the proxy before a server says by itself: it lets nobody in, or finds nobody behind it.
PROXYS_OWN = (403, 502, 503, 504)


def toml_scalars(values: Mapping[str, Scalar]) -> str:
    """Flat TOML. A JSON string is a TOML string, but for a raw DEL and for surrogate pairs."""

    def text(value: str) -> str:
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

    def scalar(value: Scalar) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        return text(value) if isinstance(value, str) else repr(value)

    return "".join(f"{text(key)} = {scalar(value)}\n" for key, value in values.items())


# What Flower and Ray say of themselves; the whole log lies in the run's folder.
WORKER = r"\(\w+ pid=\d+(, ip=[^)]+)?\)"  # Ray names the machine where it is not this one
FLOWERS_OWN = re.compile(
    rf"^(INFO|WARNING|DEBUG) :|^Successfully installed |^({WORKER}|\(raylet(, ip=[^)]+)?\))"
    r"|FutureWarning|^  warnings\.warn|^\s*$"
)


def show(line: str) -> None:
    """Print a line of a run's log, unless it is Flower's own; a worker's name is cut off."""
    line = re.sub(rf"^{WORKER} (?=Worker \d+ trains on )", "", line)
    if not FLOWERS_OWN.search(line):
        print(line, flush=True)


def failure(end: RunEnd, more: str = "") -> Exception:
    """How a run failed: what our ServerApp says in a sentence, or else the end of the log, and `more`."""
    for kind in (UserError, RunFailed):
        head = f"{kind.__module__}.{kind.__name__}: "
        for line in end.log:
            said = line.removeprefix(head)
            if said != line and end.details.endswith(said):
                return kind(said)
    ending = f"The Flower run {end.status}" + (f": {end.details}" if end.details else "")
    return SimulationFailed("\n".join(part for part in (ending, tail(end.log), more) if part))


def control_client(address: str, tls: ssl.SSLContext | None = None) -> closing[ControlHttpClient]:
    """With TLS where its settings are given."""
    os.environ.update(no_proxy_for_loopback())  # read when the client is made; it takes no option
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it reports every request at INFO
    if tls is None:
        return closing(ControlHttpClient(f"http://{address}"))
    return closing(ControlHttpClient(f"https://{address}", verify=tls))


def stop(client: ControlHttpClient, run_id: int) -> None:
    try:
        client.StopRun(StopRunRequest(run_id=run_id))
    except httpx.HTTPError as error:  # it finished meanwhile, or the SuperLink is gone
        log.debug("run %s could not be stopped: %s", run_id, error)


class Connection:
    """A SuperLink that runs somewhere: runs are handed in to it and followed to their end."""

    def __init__(self, address: str, home: Path, tls: ssl.SSLContext | None = None) -> None:
        """With `tls` the SuperLink is somebody else's, behind a proxy that asks for a certificate."""
        self.address = address
        self.home = home
        self._tls = tls
        self.children = Children(home)  # none, unless we started the SuperLink ourselves
        home.mkdir(parents=True, exist_ok=True)
        (home / "config.toml").write_text(
            f'[superlink.{CONNECTION}]\naddress = "{address}"\ninsecure = true\n', "utf-8"
        )

    def submit(
        self, app_dir: Path, run_config: Mapping[str, Scalar], federation: Mapping[str, Scalar]
    ) -> int:
        """Hand the app in with `flwr run` and return the run's id."""
        config_file = self.home / "run_config.toml"
        try:
            config_file.write_text(toml_scalars(run_config), "utf-8")
        except UnicodeEncodeError as error:
            raise UserError(f"The run configuration is not valid Unicode: {error}.") from error
        if self._tls is not None:
            return self._start(app_dir, config_file)
        command = [executable("flwr"), "run", str(app_dir), CONNECTION, "--format", "json"]
        command += ["--run-config", str(config_file)]
        if federation:
            pairs = " ".join(f"{key}={value}" for key, value in federation.items())
            command += ["--federation-config", pairs]
        done = subprocess.run(
            command,
            env=flower_environment(self.home),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        try:
            answer = json.loads(done.stdout)
        except json.JSONDecodeError:
            answer = {}
        if not answer.get("success"):
            reason = answer.get("error-message") or f"{done.stdout}\n{done.stderr}"
            raise SimulationFailed(f"`flwr run` refused the app:\n{ANSI_COLOUR.sub('', reason).strip()}")
        return int(answer["run-id"])

    def _start(self, app_dir: Path, run_config: Path) -> int:
        """What `flwr run` does; it cannot show a certificate."""
        content = build_fab_from_disk(app_dir)
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        settings = user_config_to_proto(parse_config_args([str(run_config)]))
        with self._asking() as client:
            try:
                answer = client.StartRun(StartRunRequest(fab=fab_to_proto(fab), override_config=settings))
            except httpx.HTTPStatusError as error:
                if error.response.status_code in PROXYS_OWN:
                    raise
                why = error.response.text or error
                raise SimulationFailed(f"The server refused the app: {why}") from error
        if not answer.HasField("run_id"):
            raise SimulationFailed("The server refused the app, and does not say why: see its log.")
        return int(answer.run_id)

    @contextmanager
    def _asking(self) -> Iterator[ControlHttpClient]:
        """A client; a sentence where the proxy turns us away, or where nobody answers."""
        try:
            with control_client(self.address, self._tls) as client:
                yield client
        except httpx.HTTPStatusError as error:
            if error.response.status_code != httpx.codes.FORBIDDEN:
                raise UserError(f"The SuperLink behind {self.address} does not answer ({error}).") from error
            raise UserError(
                "The server has not admitted this operator's certificate: `fedfrozen server admit` there."
            ) from error
        except httpx.HTTPError as error:
            raise UserError(f"The server at {self.address} could not be asked ({error}).") from error

    def sites(self) -> dict[int, str]:
        """The nodes that are registered, by id, and what the server calls them."""
        with self._asking() as client:
            found = client.ListNodes(ListNodesRequest()).nodes_info
        return {node.node_id: node.name for node in found if node.name and node.status != "unregistered"}

    def follow(
        self,
        run_id: int,
        *,
        on_line: Callable[[str], None] | None = None,
        timeout: float | None = None,
        stop_on_interrupt: bool = True,
    ) -> RunEnd:
        """Wait for the end of the run, passing on its log line by line; stop the run on Ctrl-C.

        The ServerApp's output (in simulation also what clients print) goes to the SuperLink's store
        only, not to its log file. Flower closes the stream of it when the run has finished.
        """
        chunks: queue.Queue[str | None] = queue.Queue()

        def read() -> None:
            """The stream breaks on a busy machine and when the SuperLink restarts: go on from there."""
            seen, tries = 0.0, RECONNECTS
            while tries:
                tries -= 1
                try:
                    with control_client(self.address, self._tls) as client:
                        request = StreamLogsRequest(run_id=run_id, after_timestamp=seen)
                        for piece in client.StreamLogs(request):
                            chunks.put(piece.log_output)
                            seen, tries = piece.latest_timestamp, RECONNECTS
                        if client.ListRuns(ListRunsRequest(run_id=run_id)).run_dict[run_id].status.sub_status:
                            break
                except httpx.HTTPError as error:  # if it is gone for good, `follow` finds out why
                    log.debug("the log stream of run %s broke: %s", run_id, error)
                time.sleep(1)
            chunks.put(None)

        threading.Thread(target=read, daemon=True).start()
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        lines: list[str] = []
        with control_client(self.address, self._tls) as client:
            try:
                for line in self._lines(chunks, deadline):
                    lines.append(line)
                    if on_line is not None:
                        on_line(line)
            except KeyboardInterrupt:
                if stop_on_interrupt:
                    stop(client, run_id)
                raise
            except TimeoutError:
                stop(client, run_id)
                raise SimulationFailed(
                    f"The run was stopped: it had not finished after {timeout:.0f} s.\n"
                    f"{self.children.last_words()}\n--- run\n{tail(lines)}"
                ) from None
            try:
                status = client.ListRuns(ListRunsRequest(run_id=run_id)).run_dict[run_id].status
            except httpx.HTTPError as error:
                raise SimulationFailed(
                    f"The SuperLink was lost before the run ended: {error}\n{self.children.last_words()}"
                ) from error
        return RunEnd(status.sub_status or status.status, status.details, lines)

    def is_going(self, run_id: int) -> bool:
        """Whether the SuperLink has this run, and it has not ended."""
        with self._asking() as client:
            try:
                found = client.ListRuns(ListRunsRequest(run_id=run_id)).run_dict
            except httpx.HTTPStatusError as error:
                if error.response.status_code in PROXYS_OWN:
                    raise
                return False  # it knows no such run
            return run_id in found and not found[run_id].status.sub_status

    def end_run(self, run_id: int, patience: float) -> bool:
        """Give the run so long to end by itself, then stop it; whether it ended by itself."""
        deadline = time.monotonic() + patience
        try:
            while going := self.is_going(run_id):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.3)
        finally:  # also when a second Ctrl-C cuts the wait short
            with control_client(self.address, self._tls) as client:
                stop(client, run_id)
        return not going

    def _lines(self, chunks: "queue.Queue[str | None]", deadline: float) -> Iterator[str]:
        """The lines of a log that comes in pieces and ends with None."""
        partial = ""
        while time.monotonic() < deadline:
            try:
                chunk = chunks.get(timeout=0.5)
            except queue.Empty:
                self.children.check()
                continue
            if chunk is None:
                if partial:
                    yield ANSI_COLOUR.sub("", partial)
                return
            *whole, partial = (partial + chunk).split("\n")
            yield from (ANSI_COLOUR.sub("", line) for line in whole)
        raise TimeoutError


class SuperLink(Connection):
    """A SuperLink on loopback with the SuperExec that starts its ServerApps, as children."""

    def __init__(self, children: Children, home: Path, *, simulation: bool, timeout: float) -> None:
        """Return once both run and the SuperLink accepts connections."""
        host, port = "127.0.0.1", free_port()  # the only port it binds: every API is on it
        super().__init__(f"{host}:{port}", home)
        self.children = children
        superlink = ["flower-superlink", "--insecure", "--host", host, "--port", str(port)]
        superlink += ["--isolation", "process", "--disable-runtime-dependency-installation"]
        children.start("superlink", superlink + ["--simulation"] * simulation, home)
        self._wait_until_up(host, port, timeout)
        # Only now: it would lose seconds to growing pauses between its attempts to connect.
        superexec = ["flower-superexec", "--insecure", "--runtime-api-address", self.address]
        children.start("superexec", [*superexec, "--parent-pid", str(os.getpid())], home)

    def _wait_until_up(self, host: str, port: int, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while True:
            self.children.check()
            try:
                socket.create_connection((host, port), timeout=1).close()
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise SimulationFailed(
                        f"The SuperLink did not answer within {timeout:.0f} s.\n{self.children.last_words()}"
                    ) from None
            time.sleep(0.05)
