"""`runtime=deployed`: hand the run in to a federation with an operator's kit, and wait for its end.

It runs on the server's own machine, because the results are written there. Flower never
starts a run again: `fedfrozen resume RUN` hands in a new one, which loads the checkpoint and has the same
`run_id`, by which the sites know it.
"""

import json
import logging
import secrets
import shlex
import socket
import ssl
from pathlib import Path
from typing import Any

import yaml

from fedfrozen_app.config import Config, absolute_paths, quoted
from fedfrozen_app.errors import UserError
from fedfrozen_app.exchange.proposal import propose
from fedfrozen_app.flower.app_folder import app_folder
from fedfrozen_app.flower.superlink import Connection, Scalar, failure, show
from fedfrozen_app.run.job import Job

log = logging.getLogger(__name__)


def run_deployed(job: Job) -> dict[str, Any]:
    """Train to the end and return the summary."""
    config, folder = job.config, job.folder
    address, tls = server_of(config)
    # What no site can be asked for is better said before the run is handed in.
    propose(config, {"classes": (), "mean": (), "std": ()}, config.run_id or "run", ())
    shared, server_only = split_overrides(job.resolved_config, job.overrides)
    if (start := job.start_folder()) is not None:
        server_only = [word for word in server_only if not word.startswith("from=")]
        server_only.append(quoted("from", start))
    if config.run_id is None:
        shared.append(f"run_id={secrets.token_hex(8)}")
    work = folder.resolve() / "flower"
    connection = Connection(address, work / "home", tls)
    settings: dict[str, Scalar] = {
        "overrides": shlex.join(shared),
        "server-overrides": shlex.join(server_only),
        "output-dir": str(folder.resolve()),
    }
    run_id = connection.submit(app_folder(work), settings, {})
    log.info("Handed in as Flower's run %d; the sites are asked now. Ctrl-C stops it.", run_id)
    with (work / "run.log").open("a", encoding="utf-8", buffering=1) as run_log:

        def keep(line: str) -> None:
            run_log.write(line + "\n")
            show(line)

        end = connection.follow(run_id, on_line=keep)
    if end.status != "completed":
        again = f"If it wrote a checkpoint, go on with: fedfrozen resume {shlex.quote(str(folder))}"
        raise failure(end, again)
    return json.loads((folder / "summary.json").read_text())


def split_overrides(resolved_config: dict[str, Any], overrides: list[str]) -> tuple[list[str], list[str]]:
    """(what everybody is told, what only the server reads: the paths of its machine)."""
    paths = absolute_paths(resolved_config)
    # An experiment's file may set one too, so each is taken back by name.
    shared = [word for word in overrides if word.lstrip("+").partition("=")[0] not in paths]
    shared += [f"{key}=null" for key in paths]
    return shared, [quoted(key, value) for key, value in paths.items()]


def server_of(config: Config) -> tuple[str, ssl.SSLContext]:
    """Where the server's proxy listens, and TLS with the certificate by which it knows the operator."""
    if config.runtime.server_kit is None:
        raise UserError("Say which federation: runtime.server_kit=DIR, the folder of an operator's kit.")
    kit = Path(config.runtime.server_kit).expanduser().resolve()
    if (kit / "server.yaml").exists():
        raise UserError(
            f"{kit} is the server's own kit, and starting runs needs an operator's: give that one's folder."
        )
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        address = str(yaml.safe_load((kit / "operator.yaml").read_text("utf-8"))["server"])
        host, _, port = address.rpartition(":")
        number = int(port)
        tls.load_verify_locations(kit / "ca.crt")
        tls.load_cert_chain(kit / "operator.crt", kit / "operator.key")
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{kit} is no operator's kit ({error}): give the folder of one.") from error
    try:
        socket.create_connection((host.strip("[]"), number), timeout=5).close()
    except OSError as error:
        raise UserError(
            f"No server answers at {address} ({error.strerror or error}): are its SuperLink and its proxy up?"
        ) from error
    return address, tls
