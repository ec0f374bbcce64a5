"""The verb `fedfrozen try-sites`: provisions, starts, trains, shows what was asked and sent, and stops."""

import contextlib
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml

from fedfrozen_app.commands.try_sites.door import LEFT_OUT, Door
from fedfrozen_app.commands.try_sites.examples import CLASSES, write_examples
from fedfrozen_app.commands.try_sites.shown import Shell, Tail, end, explain, heading, say
from fedfrozen_app.core.errors import RunFailed, UserError
from fedfrozen_app.core.verb_table import parse
from fedfrozen_app.runtimes.flower.processes import Children, flower_environment, free_port
from fedfrozen_app.sites.approval import Approvals

SITES = ("north", "south")
ROUNDS = 3
PATIENCE = 600.0  # seconds for something to start: a busy machine takes minutes to import torch
LAST_WORDS = 20.0  # seconds for a run that is stopped to write its report
LOOK = 0.2  # seconds between two checks of the processes
SBIN = "/usr/local/sbin:/usr/sbin"  # also searched for nginx by a server's start script


def try_sites(arguments: list[str]) -> int:
    """The verb."""
    options = parse("try-sites", arguments)
    _check_machine(options.port, asks=not options.yes)
    with _place(options.folder) as folder:
        began = time.monotonic()
        approved = _Trial(folder, options.port or free_port(), yes=options.yes).go()
        minutes = (time.monotonic() - began) / 60
        heading(f"Done, in {minutes:.1f} minutes. Nothing of it runs any more.")
        if options.folder is None:
            explain("The folder is removed now: `fedfrozen try-sites FOLDER` keeps it.")
        else:
            explain(
                f"{folder} has everything: kits/, data/, the results in run/, and in logs/ what each process "
                "said. docs/deployment.md goes on from here, to real machines."
            )
    return 0 if approved else 1


def _check_machine(port: int | None, *, asks: bool) -> None:
    """Refuse early what would fail later."""
    if not sys.platform.startswith("linux"):
        raise UserError("Sites run on Linux: use a Linux machine, a virtual one or a container.")
    if shutil.which("fedfrozen", path=flower_environment(Path())["PATH"]) is None:
        raise UserError(
            "The command fedfrozen is not on the PATH, and the kits' scripts call it: install it."
        )
    if asks and not sys.stdin.isatty():
        raise UserError("A person has to approve the run, and nobody is here to ask: add --yes.")
    if port is not None:
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except (OSError, OverflowError) as error:
            why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error
            raise UserError(
                f"Port {port} cannot be used ({why}): give another, or leave --port out."
            ) from error


@contextlib.contextmanager
def _place(named: Path | None) -> Iterator[Path]:
    """The folder of the trial. A temporary one is removed, unless something failed, to keep the logs."""
    if named is not None:
        folder = named.expanduser().resolve()
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{named} is not empty: give a new folder.")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    else:
        folder = Path(tempfile.mkdtemp(prefix="fedfrozen-sites-"))
    failed = False
    try:
        yield folder
    except (RunFailed, UserError):
        failed = True
        say(f"\nEverything was stopped. The logs are in {folder}/logs.")
        raise
    except KeyboardInterrupt:
        say("\nEverything was stopped.")
        raise
    finally:
        if named is None and not failed:
            shutil.rmtree(folder, ignore_errors=True)


class _Trial:
    def __init__(self, folder: Path, port: int, *, yes: bool) -> None:
        self._folder, self._port, self._internal, self._yes = folder, port, free_port(), yes
        self._shell, self._logs = Shell(folder), folder / "logs"
        self._kits = folder / "kits"

    def go(self) -> bool:
        """Run the whole trial. Returns whether the run was approved and trained. Stops all processes."""
        explain(f"A server and two sites, {' and '.join(SITES)}, on this machine, in {self._folder}.")
        explain("Lines that begin with $ are the commands that are carried out there.")
        self._logs.mkdir()
        with self._shell, contextlib.ExitStack() as stack, Children(self._logs) as children:
            self._provision()
            self._start_server(children, stack)
            self._start_sites(children)
            approved = self._train(children)
            if approved:
                self._show_logs()
            else:
                explain("You refused the run, so it was stopped. Nothing left the sites.")
        return approved

    def _provision(self) -> None:
        heading("1. Kits: a key, a certificate, scripts and a policy for each party")
        write_examples(self._folder / "data", SITES)
        plan = {
            "server": {"address": "127.0.0.1", "port": self._port, "internal_port": self._internal},
            "sites": [
                {
                    "name": name,
                    "data": {"kind": "images", "path": f"{self._folder}/data/{name}", "classes": [*CLASSES]},
                }
                for name in SITES
            ],
        }
        text = yaml.safe_dump(plan, sort_keys=False, default_flow_style=None)
        (self._folder / "federation.yaml").write_text(text)
        say("\n$ cat federation.yaml")
        for line in text.splitlines():
            say(f"    {line}")
        self._shell.run("fedfrozen provision federation.yaml -o kits")
        say()
        explain("A person at each site shall be asked before a run trains, as with real sites:")
        policies = " ".join(f"kits/{name}/policy.yaml" for name in SITES)
        self._shell.run(f"sed -i 's/^approval: policy/approval: ask/' {policies}")

    def _start_server(self, children: Children, stack: contextlib.ExitStack) -> None:
        heading("2. The server")
        kit = self._kits / "server"
        listens = (kit / "run" / "superlink.sock").exists
        path = f"{flower_environment(kit)['PATH']}:{SBIN}"
        if shutil.which("nginx", path=path) is not None:
            self._start(children, "server", "start")
        else:
            explain(LEFT_OUT)
            self._start(children, "server", "superlink")
            self._wait(listens, children, "The SuperLink did not start")
            stack.enter_context(Door(kit, self._port, self._internal))
            self._start(children, "server", "superexec")
        self._wait(lambda: listens() and self._answers(), children, "The server did not open its port")
        say()
        explain("The server lets in whom the authority has signed:")
        self._shell.run("fedfrozen server admit kits/server")

    def _start_sites(self, children: Children) -> None:
        heading("3. The sites")
        for name in SITES:
            self._start(children, name, "start")
        for name in SITES:
            self._wait_for_line(name, "SuperNode ID", children, "was not let in by the server")
            self._wait_for_line(name, "waits for work", children, "has no executor")
        for name in SITES:
            self._shell.run(f"fedfrozen site check kits/{name}")

    def _train(self, children: Children) -> bool:
        """Start a run. Returns whether it was approved; `RunFailed` if it then failed."""
        heading("4. An operator starts a run, and each site is asked")
        run = self._shell.start(
            f"fedfrozen runtime=deployed runtime.server_kit=kits/operator runtime.min_nodes={len(SITES)} "
            f"dataset=images dataset.path={self._folder}/data/test num_rounds={ROUNDS} output_dir=run",
            self._logs / "run.log",
        )
        shown = Tail(self._logs / "run.log")

        def ended() -> bool:
            shown.show()
            return run.poll() is not None

        def asked() -> bool:
            return ended() or all(self._asked(name) for name in SITES)

        refused = False
        try:
            self._wait(asked, children, "The sites were not asked")
            refused = run.poll() is None and not self._decide()
            if not refused:
                self._wait(ended, children, "The run did not end", patience=float("inf"))
        finally:
            if run.poll() is None:
                end(run, LAST_WORDS)
            shown.show(all_of_it=True)
        if run.returncode and not refused:
            raise RunFailed(f"It ended with exit code {run.returncode}: see above, and {self._logs}.")
        return not refused

    def _decide(self) -> bool:
        """Show the run to the person at the sites, and apply the decision."""
        say()
        explain("What the person at the site north sees:")
        self._shell.run("fedfrozen site pending kits/north")
        short = self._asked(SITES[0])[:8]
        self._shell.run(f"fedfrozen site show {short} kits/north")
        names = " and ".join(SITES)
        say()
        if self._yes:
            explain(f"--yes: approved at {names}.")
        elif not _agreed(f"Do you approve this run, for {names}? [y/N] "):
            for name in SITES:
                self._shell.run(f"fedfrozen site refuse {short} kits/{name}")
            return False
        for name in SITES:
            self._shell.run(f"fedfrozen site approve {short} kits/{name}")
        say()
        return True

    def _show_logs(self) -> None:
        heading("5. What each site was asked, and what it sent")
        for name in SITES:
            self._shell.run(f"fedfrozen site audit kits/{name}")

    # Parts ---------------------------------------------------------------------------------------------

    def _start(self, children: Children, party: str, script: str) -> None:
        say(f"\n$ sh kits/{party}/{script}.sh &")
        kit = self._kits / party
        children.start(f"{party}-{script}", ["sh", str(kit / f"{script}.sh")], kit / "flwr")

    def _wait_for_line(self, name: str, text: str, children: Children, why: str) -> None:
        """Wait until a site's log contains this text."""
        log = self._logs / f"{name}-start.log"
        self._wait(
            lambda: text in log.read_text("utf-8", errors="replace"), children, f"The site {name} {why}"
        )

    def _asked(self, name: str) -> str:
        """The hash of the run that waits at this site; "" if there is none."""
        found = Approvals(self._kits / name / "var" / "approvals").proposals()
        return found[-1].hash if found else ""

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
        except OSError:
            return False
        return True

    def _wait(
        self, until: Callable[[], object], children: Children, why: str, patience: float = PATIENCE
    ) -> None:
        """Wait until this is true; `RunFailed` if a party ends before, or after `patience` seconds."""
        deadline = time.monotonic() + patience
        while not until():
            children.check()
            if time.monotonic() > deadline:
                raise RunFailed(f"{why} within {patience:.0f} s.\n{children.last_words()}")
            time.sleep(LOOK)


def _agreed(question: str) -> bool:
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False
