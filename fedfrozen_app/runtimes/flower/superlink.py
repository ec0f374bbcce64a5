"""A local SuperLink, as a child process."""

import os
import socket
import sys
import time
from pathlib import Path

from fedfrozen_app.runtimes.flower import patient_superlink
from fedfrozen_app.runtimes.flower.processes import Children, SimulationFailed, free_port
from fedfrozen_app.runtimes.flower.superlink_connection import Connection


class SuperLink(Connection):
    """A SuperLink on loopback with the SuperExec that starts its ServerApps, as children."""

    def __init__(self, children: Children, home: Path, *, simulation: bool, timeout: float) -> None:
        """Start both; return when the SuperLink accepts connections."""
        host, port = "127.0.0.1", free_port()  # the only port it binds: every API is on it
        super().__init__(f"{host}:{port}", home)
        self.children = children
        superlink = [sys.executable, "-m", patient_superlink.__name__, "--insecure", "--host", host]
        superlink += ["--port", str(port)]
        superlink += ["--isolation", "process", "--disable-runtime-dependency-installation"]
        children.start("superlink", superlink + ["--simulation"] * simulation, home)
        self._wait_until_up(host, port, timeout)
        # Only now: earlier, growing pauses between connection attempts would cost seconds.
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
