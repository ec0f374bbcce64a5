"""A real federation on loopback, for tests: one SuperLink and its SuperNodes, without TLS."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedfrozen_app.runtimes.flower.processes import Children, SimulationFailed, free_port, tail
from fedfrozen_app.runtimes.flower.run_log import RunEnd
from fedfrozen_app.runtimes.flower.superlink import SuperLink
from fedfrozen_app.runtimes.flower.superlink_connection import Scalar


@dataclass(frozen=True)
class Federation:
    superlink: SuperLink

    def run(self, app_dir: Path, run_config: Mapping[str, Scalar], timeout: float) -> RunEnd:
        """Submit the app and wait for its end; raise with every log's tail unless it completed."""
        run_id = self.superlink.submit(app_dir, run_config, {})
        end = self.superlink.follow(run_id, timeout=timeout)
        if end.status != "completed":
            raise SimulationFailed(
                f"The run {end.status}: {end.details}\n{self.superlink.children.last_words()}\n"
                f"--- run\n{tail(end.log)}"
            )
        return end


@contextmanager
def deployed(work_dir: Path, node_configs: Sequence[Mapping[str, Scalar]]) -> Iterator[Federation]:
    """Start a SuperLink and a SuperNode per node configuration; all end when the block ends.

    ServerApp and ClientApps run in processes that the SuperExecs start: ours beside the SuperLink,
    and one that each SuperNode starts by itself. Nothing installs an app's dependencies: that is
    switched off at the SuperLink, and a SuperNode would have to be asked for it.
    """
    with Children(work_dir) as children:
        home = work_dir / "superlink_home"
        superlink = SuperLink(children, home, simulation=False, timeout=60)
        for number, config in enumerate(node_configs):
            command = ["flower-supernode", "--insecure", "--superlink", superlink.address]
            command += ["--host", "127.0.0.1", "--port", str(free_port())]
            pairs = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
            command += ["--node-config", pairs]
            children.start(f"supernode_{number}", command, work_dir / f"supernode_{number}_home")
        yield Federation(superlink)
