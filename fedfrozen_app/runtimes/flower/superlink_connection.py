"""A connection to a SuperLink: runs are submitted to it, followed to their end, and stopped."""

import hashlib
import json
import logging
import math
import os
import queue
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import httpx

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.flower_internals import (
    ControlHttpClient,
    Fab,
    ListNodesRequest,
    ListRunsRequest,
    StartRunRequest,
    StopRunRequest,
    StreamLogsRequest,
    build_fab_from_disk,
    fab_to_proto,
    parse_config_args,
    user_config_to_proto,
)
from fedfrozen_app.core.formatting import clock_time
from fedfrozen_app.runtimes.flower.processes import (
    ANSI_COLOUR,
    Children,
    SimulationFailed,
    executable,
    flower_environment,
    no_proxy_for_loopback,
    tail,
)
from fedfrozen_app.runtimes.flower.run_log import RunEnd

log = logging.getLogger(__name__)

Scalar = str | int | float | bool

CONNECTION = "own"  # the SuperLink's name in the config.toml that we write for `flwr run`
RECONNECTS = 120  # one per second while nothing arrives
OUTAGE = 2.0  # seconds without an answer: on a busy machine a broken stream recovers at once
# Status codes of the proxy itself: certificate rejected, or no server behind it.
PROXY_STATUS = (403, 502, 503, 504)


def toml_scalars(values: Mapping[str, Scalar]) -> str:
    """Flat TOML. A JSON string is a TOML string, but for a raw DEL and for surrogate pairs."""

    def text(value: str) -> str:
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

    def scalar(value: Scalar) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        return text(value) if isinstance(value, str) else repr(value)

    return "".join(f"{text(key)} = {scalar(value)}\n" for key, value in values.items())


def control_client(address: str, tls: ssl.SSLContext | None = None) -> closing[ControlHttpClient]:
    """A client of the SuperLink at this address; without `tls` it speaks plain HTTP."""
    os.environ.update(no_proxy_for_loopback())  # read when the client is made; it has no option for it
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it reports every request at INFO
    if tls is None:
        return closing(ControlHttpClient(f"http://{address}"))
    return closing(ControlHttpClient(f"https://{address}", verify=tls))


def stop(client: ControlHttpClient, run_id: int) -> None:
    try:
        client.StopRun(StopRunRequest(run_id=run_id))
    except httpx.HTTPError as error:  # the run has ended, or the SuperLink is down
        log.debug("run %s could not be stopped: %s", run_id, error)


class SuperLinkLost(SimulationFailed):
    """The SuperLink has not answered for minutes."""


class Outage:
    """Warns the operator once that the SuperLink does not answer, and once that it answers again."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._began: float | None = None
        self._warned = False

    def lasts(self) -> None:
        self._began = self._began or time.monotonic()
        waited = time.monotonic() - self._began
        if not self._warned and waited >= OUTAGE:
            self._warned = True
            log.warning(
                "The SuperLink at %s has not answered since %s. Start it again if it was killed: the run and "
                "the sites wait for it, and this command tries again for %d s.",
                *(self.address, clock_time(-waited), RECONNECTS),
            )

    def over(self) -> None:
        if self._warned and self._began is not None:
            log.warning("The SuperLink answers again, after %.0f s.", time.monotonic() - self._began)
        self._began, self._warned = None, False


class Connection:
    """A connection to a running SuperLink: submits runs and follows them to their end."""

    def __init__(self, address: str, home: Path, tls: ssl.SSLContext | None = None) -> None:
        """With `tls` the SuperLink is a federation's, behind a proxy that asks for a certificate."""
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
        """Submit the app with `flwr run` and return the run's id."""
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
        """Submit the app as `flwr run` does, which cannot show a certificate."""
        content = build_fab_from_disk(app_dir)
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        settings = user_config_to_proto(parse_config_args([str(run_config)]))
        with self._asking() as client:
            try:
                answer = client.StartRun(StartRunRequest(fab=fab_to_proto(fab), override_config=settings))
            except httpx.HTTPStatusError as error:
                if error.response.status_code in PROXY_STATUS:
                    raise
                why = error.response.text or error
                raise SimulationFailed(f"The server refused the app: {why}") from error
        if not answer.HasField("run_id"):
            raise SimulationFailed("The server refused the app, and does not say why: see its log.")
        return int(answer.run_id)

    @contextmanager
    def _asking(self) -> Iterator[ControlHttpClient]:
        """A client; an error in one sentence where the proxy refuses us, or where nothing answers."""
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
        """The registered nodes: id -> the name that the server has for it."""
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
        check: Callable[[], None] = lambda: None,
    ) -> RunEnd:
        """Wait for the end of the run, passing its log to `on_line`; stop the run on Ctrl-C.

        `check` is called while no line arrives, and may raise.

        The SuperLink stores the ServerApp's output (in simulation also that of clients) and does not write
        it to its log file. Flower closes the stream of it when the run has finished.
        """
        chunks: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read_log, args=(run_id, chunks), daemon=True).start()
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        lines: list[str] = []
        with control_client(self.address, self._tls) as client:
            try:
                for line in self._lines(chunks, deadline, check):
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
                raise SuperLinkLost(
                    f"The SuperLink was lost before the run ended: {error}\n{self.children.last_words()}"
                ) from error
        return RunEnd(status.sub_status or status.status, status.details, lines)

    def _read_log(self, run_id: int, chunks: "queue.Queue[str | None]") -> None:
        """Put the run's log into the queue, and None at its end.

        The stream breaks on a busy machine and when the SuperLink restarts: it continues from there.
        """
        seen, tries, outage = 0.0, RECONNECTS, Outage(self.address)
        while tries:
            tries -= 1
            try:
                with control_client(self.address, self._tls) as client:
                    request = StreamLogsRequest(run_id=run_id, after_timestamp=seen)
                    for piece in client.StreamLogs(request):
                        outage.over()
                        chunks.put(piece.log_output)
                        seen, tries = piece.latest_timestamp, RECONNECTS
                    state = client.ListRuns(ListRunsRequest(run_id=run_id)).run_dict[run_id].status
                    outage.over()
                    if state.sub_status:
                        break
            except httpx.HTTPError as error:  # if it is gone for good, `follow` finds out why
                log.debug("the log stream of run %s broke: %s", run_id, error)
                outage.lasts()
            time.sleep(1)
        chunks.put(None)

    def is_going(self, run_id: int) -> bool:
        """Whether the SuperLink has this run, and it has not ended."""
        with self._asking() as client:
            try:
                found = client.ListRuns(ListRunsRequest(run_id=run_id)).run_dict
            except httpx.HTTPStatusError as error:
                if error.response.status_code in PROXY_STATUS:
                    raise
                return False  # it knows no such run
            return run_id in found and not found[run_id].status.sub_status

    def end_run(self, run_id: int, patience: float) -> bool:
        """Wait `patience` seconds for the run to end, then stop it; returns whether it ended by itself."""
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

    def _lines(
        self, chunks: "queue.Queue[str | None]", deadline: float, check: Callable[[], None]
    ) -> Iterator[str]:
        """The lines of a log that arrives in pieces and ends with None."""
        partial = ""
        while time.monotonic() < deadline:
            try:
                chunk = chunks.get(timeout=0.5)
            except queue.Empty:
                self.children.check()
                check()
                continue
            if chunk is None:
                if partial:
                    yield ANSI_COLOUR.sub("", partial)
                return
            *whole, partial = (partial + chunk).split("\n")
            yield from (ANSI_COLOUR.sub("", line) for line in whole)
        raise TimeoutError
