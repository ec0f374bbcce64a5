"""Run a Flower app in Flower's Ray simulation and wait for its true end.

`flwr run` returns 0 as soon as a run is submitted, whatever becomes of it, and the SuperLink that
it starts by itself is never stopped. Here a run gets a SuperLink of its own, its log is followed to
the last line, a failed run raises, and no process outlives the call.

Two things are not public API of Flower 1.41 and are used in this file alone: `ControlHttpClient`,
the client behind `flwr list` and `flwr log` (a second of CPU a call through the command line,
milliseconds here), and the environment variable that shortens the SuperExec's poll.
"""

import json
import logging
import math
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

import httpx
from flwr.proto.control_pb2 import ListRunsRequest, StopRunRequest, StreamLogsRequest
from flwr.supercore.control import ControlHttpClient

import fedfrozen_app
from fedfrozen_app.errors import RunFailed, UserError

log = logging.getLogger(__name__)

Scalar = str | int | float | bool

CONNECTION = "own"  # the SuperLink's name in the config.toml that we write for `flwr run`
TAIL_LINES = 40
RECONNECTS = 120  # a second each, without a word in between
NO_CLUSTER = "local"  # Ray's word for one of our own
CLUSTER_PATIENCE = 30  # seconds
ASK_CLUSTER = """
import json, ray
ray.init(log_to_driver=False, logging_level="ERROR")
print(json.dumps([node["Resources"] for node in ray.nodes() if node["Alive"]]))
"""
ANSI_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class SimulationFailed(RunFailed):
    """The run did not complete; the text says how it ended, and then its last log lines."""


@dataclass(frozen=True)
class RunEnd:
    """How a run ended: `completed`, `failed` or `stopped`, Flower's own words on it, its log."""

    status: str
    details: str
    log: list[str]


# --- the app folder ----------------------------------------------------------------------------


# The [tool.flwr.app] tables of the checkout's pyproject.toml, which a wheel does not carry.
APP_TABLES = """\
[tool.flwr.app]
publisher = "fedfrozen"
fab-include = [
    "fedfrozen_app/**/*.py",
    "strategies/**/*.py",
    "clients/**/*.py",
    "conf/**/*.yaml",
]

[tool.flwr.app.components]
serverapp = "fedfrozen_app.server_app:app"
clientapp = "fedfrozen_app.client_app:app"

[tool.flwr.app.config]
overrides = ""
server-overrides = ""
output-dir = ""
"""


def app_folder(work_dir: Path) -> Path:
    """The folder that Flower can bundle: the checkout, or one made from the installed wheel."""
    package = Path(fedfrozen_app.__file__).parent
    project = package.parent / "pyproject.toml"
    if project.exists():
        tool = tomllib.loads(project.read_text("utf-8")).get("tool", {})
        if "app" in tool.get("flwr", {}):
            return package.parent
    return assemble_app_folder(package, work_dir / "app")


def assemble_app_folder(package: Path, folder: Path) -> Path:
    """Lay the installed packages and their `conf` out as in a checkout, below a pyproject.toml."""
    sources = {"fedfrozen_app": package, "conf": package / "conf"}
    for name in ("strategies", "clients"):
        spec = find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise UserError(f"The package '{name}' is missing: install fedfrozen again.")
        sources[name] = Path(next(iter(spec.submodule_search_locations)))
    shutil.rmtree(folder, ignore_errors=True)
    for name, source in sources.items():
        # `conf` lies inside the package in a wheel and beside it in a bundle.
        ignore = shutil.ignore_patterns("__pycache__", "conf")
        shutil.copytree(source, folder / name, ignore=ignore)
    head = f'[project]\nname = "fedfrozen"\nversion = "{version("fedfrozen")}"\ndependencies = []\n'
    (folder / "pyproject.toml").write_text(f"{head}\n{APP_TABLES}", encoding="utf-8")
    return folder


# --- small pieces ------------------------------------------------------------------------------


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


def free_port() -> int:
    """A TCP port on loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def executable(name: str) -> str:
    """Flower's command `name`, of the environment that runs this code, else of the PATH."""
    path = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if path is None:
        raise UserError(f"The command '{name}' was not found: pip install 'flwr[simulation]'.")
    return path


def tail(lines: list[str]) -> str:
    return "\n".join(lines[-TAIL_LINES:])


def failure(end: RunEnd, more: str = "") -> Exception:
    """How a run failed: what our ServerApp says in a sentence, or else the end of the log, and `more`."""
    for kind in (UserError, RunFailed):
        head = f"{kind.__module__}.{kind.__name__}: "
        for line in end.log:
            said = line.removeprefix(head)
            if said != line and end.details.endswith(said):
                return kind(said)
    told = f"The Flower run {end.status}" + (f": {end.details}" if end.details else "")
    return SimulationFailed("\n".join(part for part in (told, tail(end.log), more) if part))


def check_resources(num_supernodes: int, cpus_per_client: float, gpus_per_client: float) -> None:
    """Ray would find out too, but only when all is up, and in its own words."""
    if num_supernodes < 1:
        raise UserError(f"A simulation needs at least one client, not {num_supernodes}.")
    if cpus_per_client <= 0 or gpus_per_client < 0:
        raise UserError(
            f"runtime.cpus_per_client={cpus_per_client:g} must be above 0, and "
            f"runtime.gpus_per_client={gpus_per_client:g} not below."
        )
    machines = [(node.get("CPU", 0), node.get("GPU", 0)) for node in ray_nodes()]
    if not any(cpus_per_client <= cpus and gpus_per_client <= gpus for cpus, gpus in machines):
        offered = "; ".join(f"{cpus:g} CPUs and {gpus:g} GPUs" for cpus, gpus in machines)
        raise UserError(
            f"No machine has room for a client with runtime.cpus_per_client={cpus_per_client:g} and "
            f"runtime.gpus_per_client={gpus_per_client:g}: there is one with {offered}. Lower them."
        )


def ray_nodes() -> list[dict[str, float]]:
    """What each machine of the Ray cluster at RAY_ADDRESS offers; without a cluster, what this one does."""
    address = os.environ.get("RAY_ADDRESS") or NO_CLUSTER
    if address == NO_CLUSTER:
        import torch  # takes seconds, and other verbs import this file

        return [{"CPU": os.cpu_count() or 1, "GPU": torch.cuda.device_count()}]
    # In a process of its own: Ray takes minutes to give an address up, and cannot be told to be quicker.
    command = [sys.executable, "-c", ASK_CLUSTER]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=CLUSTER_PATIENCE)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        raise UserError(
            f"No Ray cluster answers at RAY_ADDRESS={address}: run this on one of its machines, with the "
            "address that `ray start --head` has named, or unset RAY_ADDRESS."
        ) from error
    return json.loads(done.stdout.splitlines()[-1])


def flower_environment(home: Path) -> dict[str, str]:
    """The environment of every Flower child: a home of its own, nothing sent out, a fast start."""
    inherited = os.environ
    return {
        **inherited,
        **no_proxy_for_loopback(),
        # Flower starts its helpers by bare name.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{inherited.get('PATH', os.defpath)}",
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # seconds; Flower's default is 1
        # Left to itself Ray joins whatever cluster somebody has started on this machine.
        "RAY_ADDRESS": inherited.get("RAY_ADDRESS") or NO_CLUSTER,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",  # every worker says which device it uses, in almost the same words
        # Nobody looks at Ray's metrics, and the workers that it starts in advance are never used,
        # because they lack the environment that Flower asks for: seconds of CPU at every start.
        "RAY_enable_metrics_collection": "0",
        "RAY_prestart_worker_first_driver": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }


def no_proxy_for_loopback() -> dict[str, str]:
    """Flower talks HTTP to 127.0.0.1 and heeds HTTP_PROXY: a proxy must not get those requests."""
    current = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    hosts = dict.fromkeys([*filter(None, current.split(",")), "127.0.0.1", "localhost"])
    return dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(hosts))


def control_client(address: str, authority: Path | None = None) -> closing[ControlHttpClient]:
    """With TLS where a certificate authority is given."""
    os.environ.update(no_proxy_for_loopback())  # read when the client is made; it takes no option
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it reports every request at INFO
    if authority is None:
        return closing(ControlHttpClient(f"http://{address}"))
    return closing(ControlHttpClient.from_server_address(address, False, authority.read_bytes(), []))


def stop(client: ControlHttpClient, run_id: int) -> None:
    try:
        client.StopRun(StopRunRequest(run_id=run_id))
    except httpx.HTTPError as error:  # it finished meanwhile, or the SuperLink is gone
        log.debug("run %s could not be stopped: %s", run_id, error)


# --- processes ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Child:
    name: str
    process: subprocess.Popen[bytes]
    log_path: Path

    def last_words(self) -> str:
        text = self.log_path.read_text("utf-8", errors="replace")
        return f"--- {self.name}\n{tail(ANSI_COLOUR.sub('', text).splitlines())}"


class Children:
    """Processes that end with the block, together with all that they started.

    Each child leads a process group. Flower's and Ray's processes stay in the group of the child
    they come from, except that a SuperLink in its default isolation mode detaches its SuperExec:
    start it with `--isolation process`, and the SuperExec as one more child.
    """

    def __init__(self, work_dir: Path) -> None:
        self.work_dir = work_dir
        self._children: list[Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def start(self, name: str, command: list[str], home: Path) -> None:
        """Start `command`; its output goes to NAME.log in the working folder."""
        home.mkdir(parents=True, exist_ok=True)
        log_path = self.work_dir / f"{name}.log"
        with log_path.open("wb") as out:
            process = subprocess.Popen(
                [executable(command[0]), *command[1:]],
                env=flower_environment(home),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C in the terminal reaches us alone, and we end the group
            )
        self._children.append(Child(name, process, log_path))

    def pid(self, name: str) -> int:
        return self._named(name).process.pid

    def kill(self, name: str, number: signal.Signals) -> None:
        """Signal a child's whole group, and wait for its end."""
        process = self._named(name).process
        os.killpg(process.pid, number)
        process.wait()

    def _named(self, name: str) -> Child:
        """The newest of this name: one may have been started again."""
        return next(child for child in reversed(self._children) if child.name == name)

    def check(self) -> None:
        """Raise if a child has ended before its time."""
        for child in self._children:
            if child.process.poll() is not None:
                raise SimulationFailed(
                    f"{child.name} ended before the run did, with exit code "
                    f"{child.process.returncode}.\n{child.last_words()}"
                )

    def last_words(self) -> str:
        """The end of every child's log."""
        return "\n".join(child.last_words() for child in self._children)

    def end(self, grace: float = 3) -> None:
        """Ask the groups to end; kill what is left of them once the children have gone."""
        try:
            self._signal(signal.SIGTERM)
            deadline = time.monotonic() + grace
            for child in self._children:
                try:
                    child.process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    log.debug("%s outlived the grace period", child.name)
        finally:  # also when a second Ctrl-C cuts the grace period short
            self._signal(signal.SIGKILL)
            for child in self._children:
                child.process.wait()

    def _signal(self, number: signal.Signals) -> None:
        for child in self._children:
            try:
                os.killpg(child.process.pid, number)
            except ProcessLookupError:  # the whole group is gone
                continue


@contextmanager
def unwinding_on_hangup() -> Iterator[None]:
    """SIGTERM and SIGHUP end Python without unwinding and would leave Ray running: exit instead."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    caught = []
    if threading.current_thread() is threading.main_thread():
        caught = [
            number
            for number in (signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) is signal.SIG_DFL  # leave nohup and the caller's own alone
        ]
    for number in caught:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, signal.SIG_DFL)


# --- one SuperLink and its runs ----------------------------------------------------------------


class Connection:
    """A SuperLink that runs somewhere: runs are handed in to it and followed to their end."""

    def __init__(self, address: str, home: Path, authority: Path | None = None) -> None:
        self.address = address
        self.home = home
        self._authority = authority
        self.children = Children(home)  # none, unless we started the SuperLink ourselves
        home.mkdir(parents=True, exist_ok=True)
        how = "insecure = true" if authority is None else f"root-certificates = {json.dumps(str(authority))}"
        (home / "config.toml").write_text(
            f'[superlink.{CONNECTION}]\naddress = "{address}"\n{how}\n', "utf-8"
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

    def follow(
        self,
        run_id: int,
        *,
        on_line: Callable[[str], None] | None = None,
        timeout: float | None = None,
    ) -> RunEnd:
        """Wait for the end of the run, passing on its log line by line; stop the run on Ctrl-C.

        The ServerApp's output (in simulation also what clients print) goes to the SuperLink's store
        only, not to its log file. Flower closes the stream of it when the run has finished.
        """
        chunks: queue.Queue[str | None] = queue.Queue()

        def read() -> None:
            """The stream breaks on a busy machine and when the SuperLink restarts: ask on after its last."""
            seen, tries = 0.0, RECONNECTS
            while tries:
                tries -= 1
                try:
                    with control_client(self.address, self._authority) as client:
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
        with control_client(self.address, self._authority) as client:
            try:
                for line in self._lines(chunks, deadline):
                    lines.append(line)
                    if on_line is not None:
                        on_line(line)
            except KeyboardInterrupt:
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


def run_app(
    app_dir: Path,
    run_config: dict[str, Scalar],
    *,
    num_supernodes: int,
    cpus_per_client: float = 1,
    gpus_per_client: float = 0,
    work_dir: Path,
    start_timeout: float = 120,
    on_line: Callable[[str], None] | None = None,
) -> None:
    """Run the app on simulated nodes; return when it has completed, raise otherwise.

    `work_dir` receives `run.log` (what the app printed and logged), `superlink.log`,
    `superexec.log` and Flower's home. `on_line` is called, in the caller's thread, with every line
    of the app's log.
    """
    check_resources(num_supernodes, cpus_per_client, gpus_per_client)
    work_dir = work_dir.resolve()
    work_dir.mkdir(parents=True, exist_ok=True)
    federation = {
        "num-supernodes": num_supernodes,
        "client-resources-num-cpus": cpus_per_client,
        "client-resources-num-gpus": gpus_per_client,
    }
    with (
        unwinding_on_hangup(),
        (work_dir / "run.log").open("w", encoding="utf-8", buffering=1) as run_log,
        Children(work_dir) as children,
    ):

        def keep(line: str) -> None:
            run_log.write(line + "\n")
            if on_line is not None:
                on_line(line)

        home = work_dir / "flwr_home"
        superlink = SuperLink(children, home, simulation=True, timeout=start_timeout)
        end = superlink.follow(superlink.submit(app_dir, run_config, federation), on_line=keep)
        if end.status != "completed":
            raise failure(end, "" if end.log else children.last_words())
