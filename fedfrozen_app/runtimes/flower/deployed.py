"""`runtime=deployed`: submit the run to a federation with an operator's kit, and wait for its end.

The command runs on the server's own machine, because the results are written there. Flower never restarts a
run: `fedfrozen resume RUN` submits a new one, which loads the checkpoint and has the same `run_id` for the
sites.
"""

import json
import logging
import secrets
import shlex
import socket
import ssl
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from fedfrozen_app.config import Config, absolute_paths, device_of, quoted
from fedfrozen_app.core.app_folder import app_folder
from fedfrozen_app.core.bundles import source_digest
from fedfrozen_app.core.errors import RunFailed, UserError
from fedfrozen_app.core.formatting import resume_command
from fedfrozen_app.core.signals import shielded
from fedfrozen_app.data.federated import load_corpus
from fedfrozen_app.exchange.proposal import propose
from fedfrozen_app.files import checkpoint, lease, status
from fedfrozen_app.files.disk import replace_file
from fedfrozen_app.files.folders import authorities_file, sites_file
from fedfrozen_app.files.stopping import ask_to_stop, forget
from fedfrozen_app.privacy.notices import model_metadata
from fedfrozen_app.report.output import write_interrupted
from fedfrozen_app.report.summary import finished_summary
from fedfrozen_app.run.job import Job
from fedfrozen_app.runtimes.flower.run_log import failure, kept, show
from fedfrozen_app.runtimes.flower.server_app_watch import ServerAppLost, ServerAppWatch
from fedfrozen_app.runtimes.flower.superlink_connection import RECONNECTS, Connection, Scalar, SuperLinkLost

log = logging.getLogger(__name__)
GRACE = 60.0  # seconds for a stopping run to receive replies and write its report
LAST_WORDS = 30.0  # seconds for its process to end after Flower has stopped it


def run_deployed(job: Job) -> dict[str, Any]:
    """Train to the end and return the summary; with `job.detach` raise `Detached` once it is submitted."""
    config, folder = job.config, job.folder
    connection = connect(config, folder)
    # Both fail here, before the run is submitted: the server's own data, and settings that no site accepts.
    propose(config, load_corpus(config).spec(), config.run_id or "run", ())
    shared, server_only = split_overrides(job.resolved_config, job.overrides)
    if (start := job.start_folder()) is not None:
        server_only = [word for word in server_only if not word.startswith("from=")]
        server_only.append(quoted("from", start))
    if config.run_id is None:
        shared.append(f"run_id={secrets.token_hex(8)}")
    replace_file(sites_file(folder), json.dumps(connection.sites()))
    replace_file(authorities_file(folder), (kit_of(config) / "ca.crt").read_text("ascii"))
    settings: dict[str, Scalar] = {
        "overrides": shlex.join(shared),
        "server-overrides": shlex.join(server_only),
        "output-dir": str(folder.resolve()),
    }
    app = app_folder(folder.resolve() / "flower")
    with shielded():  # without its record, a submitted run could not be found again
        run_id = connection.submit(app, settings, {})
        status.handed_in(folder, run_id)
    log.info("Handed in as Flower's run %d, bundle %s; the sites are asked now.", run_id, source_digest(app))
    if job.detach:
        raise status.Detached(f"Flower's run {run_id} goes on: fedfrozen attach {shlex.quote(str(folder))}")
    log.info("Ctrl-C stops it.")
    return follow_to_end(connection, config, folder, run_id, on_interrupt="stop")


def connect(config: Config, folder: Path) -> Connection:
    """A connection to the federation of the run's operator kit."""
    address, tls = server_of(config)
    return Connection(address, folder.resolve() / "flower" / "home", tls)


def follow_to_end(
    connection: Connection, config: Config, folder: Path, run_id: int, *, on_interrupt: str
) -> dict[str, Any]:
    """Show the run until it ends, and return the summary. On Ctrl-C `stop` it, or `detach` from it."""
    with kept(folder / "flower" / "run.log", show, append=True) as keep:
        watched = ServerAppWatch(folder)
        try:
            end = connection.follow(run_id, on_line=keep, stop_on_interrupt=False, check=watched.check)
        except SuperLinkLost as error:
            raise RunFailed(
                f"The SuperLink at {connection.address} has not answered for {RECONNECTS} s: this command "
                "gives up. The run may still go on: when the SuperLink is back, watch it with "
                f"fedfrozen attach {shlex.quote(str(folder))}"
            ) from error
        except ServerAppLost as error:
            end_lost(connection, config, folder, run_id)
            raise RunFailed(f"{error} {how_to_go_on(folder)}") from None
        except KeyboardInterrupt:
            if on_interrupt == "detach":
                raise status.Detached(
                    f"Flower's run {run_id} goes on: fedfrozen attach {shlex.quote(str(folder))}"
                ) from None
            stop_run(connection, config, folder, run_id)
            raise
    if end.status != "completed":
        leave_report(config, folder, "failed")
        raise failure(end, how_to_go_on(folder))
    return finished_summary(folder)


def end_lost(connection: Connection, config: Config, folder: Path, run_id: int) -> None:
    """End a run whose process is lost, so that sites need not wait until Flower notices it."""
    try:
        connection.end_run(run_id, 0.0)
    except UserError as error:
        log.warning("%s", error)
    leave_report(config, folder, "failed")


def how_to_go_on(folder: Path) -> str:
    """A sentence after a failed run: the round from which it can be resumed, if any."""
    kept = checkpoint.numbers(folder / "checkpoints")
    if not kept:
        return "It wrote no checkpoint: start it again."
    return f"Go on after round {max(kept)} with: {resume_command(folder)}"


def stop_run(connection: Connection, config: Config, folder: Path, run_id: int) -> None:
    """End the run with a complete report and no process left, whichever of its processes still run."""
    print("Stopping the run; Ctrl-C again ends it at once.", file=sys.stderr)
    ask_to_stop(folder, run_id)
    try:
        connection.end_run(run_id, GRACE)
    except KeyboardInterrupt:
        log.info("Ended at once.")
    except UserError as error:  # the server is down; the run finds the stop request in its folder
        log.warning("%s", error)
    with shielded():
        deadline = time.monotonic() + LAST_WORDS
        while lease.holder(folder) is not None and time.monotonic() < deadline:
            time.sleep(0.2)
        leave_report(config, folder, "interrupted")
        status.settle(folder, "interrupted")
        forget(folder)


def leave_report(config: Config, folder: Path, state: str) -> None:
    """Write the report of the finished rounds, if the run's process could not."""
    device = str(device_of(config.device))
    try:
        write_interrupted(folder, model_metadata(config.privacy), status=state, device=device)
    except OSError as error:  # a full disk, often what ended the run: its own sentence must follow
        log.warning("The report of the finished rounds could not be written: %s.", error)


def split_overrides(resolved_config: dict[str, Any], overrides: list[str]) -> tuple[list[str], list[str]]:
    """(overrides for all, overrides for the server only: paths of its machine)."""
    paths = absolute_paths(resolved_config)
    # An experiment's file may set one too, so each is reset by name.
    own = {*paths, "overwrite"}
    shared = [word for word in overrides if word.lstrip("+").partition("=")[0] not in own]
    shared += [f"{key}=null" for key in paths]
    server_only = [quoted(key, value) for key, value in paths.items()]
    return shared, [*server_only, "overwrite=true"] if resolved_config["overwrite"] else server_only


def kit_of(config: Config) -> Path:
    """The folder of the run's operator kit."""
    if config.runtime.server_kit is None:
        raise UserError("Say which federation: runtime.server_kit=DIR, the folder of an operator's kit.")
    return Path(config.runtime.server_kit).expanduser().resolve()


def server_of(config: Config) -> tuple[str, ssl.SSLContext]:
    """The address of the server's proxy, and TLS with the operator's certificate."""
    kit = kit_of(config)
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
