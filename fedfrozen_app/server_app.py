"""Flower's entry on the server: gather the nodes, then run the rounds as every other runtime does."""

import json
import logging
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.utils import get_flwr_home

from fedfrozen_app.bundles import source_digest
from fedfrozen_app.census.ask import read_ask
from fedfrozen_app.config import Config, compose_config, read, resolved
from fedfrozen_app.data.federated import load_corpus, server_only, share_out
from fedfrozen_app.errors import RunFailed, UserError
from fedfrozen_app.exchange.proposal import propose
from fedfrozen_app.files import checkpoint, lease, status
from fedfrozen_app.files.folders import check_empty, sites_file
from fedfrozen_app.files.rows import Row
from fedfrozen_app.files.stopping import stop_asked
from fedfrozen_app.local.resident import Resident
from fedfrozen_app.logs import prepare_logging
from fedfrozen_app.run.federate import explain_disk_errors, federate
from fedfrozen_app.run.job import Job
from fedfrozen_app.run.outline import shared_roles
from fedfrozen_app.run.take_census import take_census
from fedfrozen_app.server.anchors import AnchorFile
from fedfrozen_app.server.asking import Asking
from fedfrozen_app.server.conversation import Conversation
from fedfrozen_app.words import counted

log = logging.getLogger(__name__)
app = ServerApp()
HANDOVER = 60.0  # seconds for the process before this one to end


@app.main()
def main(grid: Grid, context: Context) -> None:
    """`flwr run .`, our own simulation, or a deployed federation."""
    prepare_logging()
    job = job_of(context)
    if asked := str(context.run_config.get("census", "")):
        with explain_disk_errors(job.folder):
            census(job, grid, context.run_id, asked)
        return
    with owned(job, context.run_id), explain_disk_errors(job.folder):
        run(job, grid, context.run_id)


def run(job: Job, grid: Grid, flower_run: int) -> None:
    config = job.config
    corpus = load_corpus(config)
    resident = Resident(config, corpus, shares=server_only(corpus, config))
    conversation = converse(grid, job, resident, flower_run)
    try:
        if num_clients := gather(conversation, config):
            resident.shares = share_out(corpus, config, num_clients)
        log.info("Results go to %s", job.folder)
        federate(job, conversation, resident)
    except KeyboardInterrupt:
        conversation.let_finish()
        raise


def census(job: Job, grid: Grid, flower_run: int, asked: str) -> None:
    """In place of a run: nothing is trained, and every node is asked what it counts."""
    runtime = job.config.runtime
    asking = Asking(
        grid,
        read_ask(asked),
        least=runtime.min_nodes or job.config.num_clients or 2,
        timeout=runtime.node_timeout,
        approval_timeout=runtime.approval_timeout,
        sites=registered_sites(job.folder),
        anchors=AnchorFile(job.folder / "anchors.jsonl"),
        stop_asked=lambda: stop_asked(job.folder, flower_run),
    )
    take_census(asking, job.folder)


@contextmanager
def owned(job: Job, flower_run: int) -> Iterator[None]:
    """The run's folder is this process's alone, and its status file tells how it ends, whoever watches."""
    if not job.goes_on:
        check_empty(job.folder, overwrite=job.config.overwrite)
    deployed = job.config.runtime.name == "deployed"
    try:
        with lease.held(job.folder, patience=HANDOVER):
            known = deployed and status.taken_over(job.folder, flower_run, patience=HANDOVER)
            with status.concluded(job.folder) if known else nullcontext():
                yield
    except KeyboardInterrupt:
        raise RunFailed("The run was stopped, as it was asked to.") from None
    except (UserError, RunFailed) as error:
        raise type(error)(str(error)) from None  # Flower prints all that led to it, and buries the sentence


def registered_sites(folder: Path) -> dict[int, str]:
    """Which node is which site, as the server had it registered when the run was handed in."""
    path = sites_file(folder)
    return {int(node): name for node, name in json.loads(path.read_text()).items()} if path.exists() else {}


def last_seen(row: Row) -> dict[str, str]:
    """In which state a checkpoint's round has left its clients."""
    failed = " ".join(row.get("failures", ()))
    return {
        client: f"did not answer round {row['round']}"
        if f"Client {client} was" in failed
        else f"answered round {row['round']}"
        for client in row.get("clients", ())
    }


def converse(grid: Grid, job: Job, resident: Resident, flower_run: int) -> Conversation:
    """With the nodes of a run. Sites know it by Flower's number where it has no run_id."""
    config = job.config
    proposal = None
    try:
        roles = shared_roles(config, resident.exchanged, resident.roles)
        proposal = propose(config, resident.card, config.run_id or f"flower-{flower_run}", roles)
        if config.runtime.name != "flower":  # nodes of a simulation are no sites
            log.info("Sites with an executor are asked for the proposal %s.", proposal.hash)
    except UserError as error:
        if config.runtime.name == "deployed":
            raise
        log.info("%s", error)  # a simulation's nodes, or sites that run the server's code, need none
    return Conversation(
        grid,
        resident.roles,
        card=resident.card,
        hello_timeout=config.runtime.node_timeout,
        proposal=proposal,
        anchors=AnchorFile(job.folder / "anchors.jsonl"),
        sites=registered_sites(job.folder),
        version=f"sources {own_sources()}",
        seen=last_seen(job.start.row) if job.start is not None and job.goes_on else {},
        stop_asked=lambda: stop_asked(job.folder, flower_run),
    )


@cache  # what this process runs; files that change meanwhile are another's
def own_sources() -> str:
    return source_digest(Path(__file__).resolve().parents[1])


def job_of(context: Context) -> Job:
    """What Flower was handed."""
    settings = context.run_config
    overrides = shlex.split(str(settings["overrides"]))
    # The paths of this machine; a site reads the ones above alone.
    overrides += shlex.split(str(settings["server-overrides"]))
    resolved_config = resolved(compose_config(overrides))
    config = read(resolved_config)
    named = str(settings["output-dir"])
    folder = Path(named) if named else get_flwr_home() / "fedfrozen" / f"run-{context.run_id}"
    start = checkpoint.read(Path(config.start_from)) if config.start_from else None
    return Job(config, resolved_config, overrides, folder, start)


def gather(conversation: Conversation, config: Config) -> int | None:
    """Wait for the nodes; into how many partitions the data are split, or None for sites with their own."""
    began = time.monotonic()  # one time-out for all that is waited for
    patience, approval = config.runtime.node_timeout, config.runtime.approval_timeout
    wanted = config.runtime.min_nodes or config.num_clients or 2
    nodes = conversation.wait_for(1, patience, wanted, approval_timeout=approval)
    if not (splits := conversation.num_partitions()):
        before = time.monotonic() - began
        conversation.wait_for(wanted, patience, before=before, approval_timeout=approval)
        return None
    if len(splits) > 1:
        raise UserError(f"The nodes disagree on num-partitions ({sorted(splits)}): give all the same number.")
    (count,) = splits
    if config.num_clients is not None and config.num_clients != count:
        raise UserError(
            f"num_clients={config.num_clients} was asked for, but the federation has "
            f"{counted(count, 'node')}: use --federation-config 'num-supernodes={config.num_clients}', "
            "or leave num_clients out."
        )
    if config.num_clients is None:
        log.info(
            "The data are split over the nodes there are (%d); for more, use "
            "--federation-config 'num-supernodes=10'.",
            count,
        )
    if len(nodes) < count:
        conversation.wait_for(count, patience, before=time.monotonic() - began)
    return count
