"""Flower's entry on the server: wait for the nodes, then run the rounds as in every other runtime."""

import logging
import shlex
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedfrozen_app.census.ask import read_ask
from fedfrozen_app.config import Config, compose_run, excluded_clients
from fedfrozen_app.config.unused_keys import check_used
from fedfrozen_app.core.bundles import source_digest
from fedfrozen_app.core.errors import RunFailed, UserError
from fedfrozen_app.core.flower_internals import get_flwr_home
from fedfrozen_app.core.formatting import counted
from fedfrozen_app.core.logs import logs_of, prepare_logging
from fedfrozen_app.core.own_objects import take_over
from fedfrozen_app.data.federated import load_corpus, server_only, share_out
from fedfrozen_app.exchange.proposal import Proposal, propose
from fedfrozen_app.exchange.strict import Spelled
from fedfrozen_app.files import checkpoint, disk, lease, status
from fedfrozen_app.files.folders import authorities_file, check_empty, sites_file
from fedfrozen_app.files.readers import Damaged, read_object
from fedfrozen_app.files.rows import Row
from fedfrozen_app.files.stopping import stop_asked
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.run.federate import explain_disk_errors, federate
from fedfrozen_app.run.job import Job
from fedfrozen_app.run.outline import shared_roles
from fedfrozen_app.run.take_census import take_census
from fedfrozen_app.run.take_study import take_study
from fedfrozen_app.secure.certified import Shown
from fedfrozen_app.server.anchors import AnchorFile
from fedfrozen_app.server.asking import Asking, Limits, Question, census_question
from fedfrozen_app.server.connection import Connection
from fedfrozen_app.server.membership import Invitation, Membership
from fedfrozen_app.server.presence_writer import PresenceWriter
from fedfrozen_app.server.transport import Transport
from fedfrozen_app.study.study_ask import read_study

log = logging.getLogger(__name__)
app = ServerApp()
HANDOVER = 60.0  # seconds for the process before this one to end


@app.main()
def main(grid: Grid, context: Context) -> None:
    """`flwr run .`, our own simulation, or a deployed federation."""
    prepare_logging()
    take_over()
    job = job_of(context)
    logs_of(run=job.config.run_id or f"flower-{context.run_id}")
    if asked := str(context.run_config.get("census", "")):
        with explain_disk_errors(job.folder):
            ask = read_ask(asked)
            take_census(asking_of(job, grid, context.run_id)(ask, census_question(ask)), job.folder)
        return
    if asked := str(context.run_config.get("survival", "")):
        with explain_disk_errors(job.folder):
            trust = Shown.read(authorities_file(job.folder))
            take_study(read_study(asked), asking_of(job, grid, context.run_id), job.folder, trust)
        return
    with owned(job, context.run_id), explain_disk_errors(job.folder):
        run(job, grid, context.run_id)


def run(job: Job, grid: Grid, flower_run: int) -> None:
    config = job.config
    corpus = load_corpus(config)
    worker = Worker(config, corpus, shares=server_only(corpus, config))
    connection = open_connection(grid, job, worker, flower_run)
    try:
        if num_clients := gather(connection.membership, config):
            worker.data = worker.data.for_run(config, share_out(corpus, config, num_clients))
        log.info("Results go to %s", job.folder)
        federate(job, connection, worker)
    except KeyboardInterrupt:
        connection.transport.drain()
        raise


def asking_of(job: Job, grid: Grid, flower_run: int) -> Callable[..., Asking]:
    """Run a census or a study in place of a training run."""
    runtime = job.config.runtime
    least = runtime.min_nodes or job.config.num_clients or 2

    def make(ask: Spelled, question: Question, only: Collection[int] | None = None) -> Asking:
        return Asking(
            grid,
            ask,
            question,
            Limits(least if only is None else len(only), runtime.node_timeout, runtime.approval_timeout),
            sites=registered_sites(job.folder),
            anchors=AnchorFile(job.folder / "anchors.jsonl"),
            stop_asked=lambda: stop_asked(job.folder, flower_run),
            only=only,
        )

    return make


@contextmanager
def owned(job: Job, flower_run: int) -> Iterator[None]:
    """Lock the run's folder for this process, and write into its status file how the run ends."""
    if not job.resumes_itself:
        check_empty(job.folder, overwrite=job.config.overwrite)
    deployed = job.config.runtime.name == "deployed"
    try:
        with lease.held(job.folder, patience=HANDOVER), disk.reserved(job.folder):
            known = deployed and status.taken_over(job.folder, flower_run, patience=HANDOVER)
            with status.concluded(job.folder) if known else nullcontext():
                yield
    except KeyboardInterrupt:
        raise RunFailed("The run was stopped, as it was asked to.") from None
    except (UserError, RunFailed) as error:
        raise type(error)(str(error)) from None  # without a cause: Flower would print its traceback


def registered_sites(folder: Path) -> dict[int, str]:
    """Names of nodes registered by the server when the run was submitted."""
    path = sites_file(folder)
    found = read_object(path) or {}
    try:
        return {int(node): str(name) for node, name in found.items()}
    except ValueError as error:
        raise Damaged(path, "it names no nodes") from error


def last_states(row: Row) -> dict[str, str]:
    """By client, its state after a checkpoint's round, as the rest of a sentence."""
    failed = " ".join(row.get("failures", ()))
    return {
        client: f"did not answer round {row['round']}"
        if f"Client {client} was" in failed
        else f"answered round {row['round']}"
        for client in row.get("clients", ())
    }


def open_connection(grid: Grid, job: Job, worker: Worker, flower_run: int) -> Connection:
    """The connection to the nodes of a run."""
    config = job.config
    proposal = proposal_of(job, worker, flower_run)
    version = f"sources {own_sources()}"
    transport = Transport(grid, stop_requested=lambda: stop_asked(job.folder, flower_run))
    membership = Membership(
        transport,
        Invitation(
            worker.data_spec,
            config.runtime.node_timeout,
            proposal,
            version,
            to_sites=config.runtime.name == "deployed",
        ),
        anchors=AnchorFile(job.folder / "anchors.jsonl"),
        sites=registered_sites(job.folder),
        last_state=last_states(job.start.row) if job.start is not None and job.resumes_itself else {},
        excluded=excluded_clients(config),
    )
    connection = Connection(
        transport, membership, worker.roles, trust=Shown.read(authorities_file(job.folder))
    )
    if config.runtime.name == "deployed":
        transport.on_wait = PresenceWriter(job.folder, membership, connection.lateness, connection.closed)
    return connection


def proposal_of(job: Job, worker: Worker, flower_run: int) -> Proposal | None:
    """The proposal to sites. They identify the run by Flower's number if it has no run_id."""
    config = job.config
    try:
        roles = shared_roles(config, worker.exchanged, worker.roles)
        proposal = propose(config, worker.data_spec, config.run_id or f"flower-{flower_run}", roles)
    except UserError as error:
        if config.runtime.name == "deployed":
            raise
        log.info("%s", error)  # a simulation's nodes, or sites that run the server's code, need no proposal
        return None
    if config.runtime.name != "flower":  # nodes of a simulation are no sites
        log.info("Sites with an executor are asked for the proposal %s.", proposal.hash)
    return proposal


@cache  # of the sources that this process has loaded: the files may change while it runs
def own_sources() -> str:
    return source_digest(Path(__file__).resolve().parents[1])


def job_of(context: Context) -> Job:
    """The job in Flower's run configuration."""
    settings = context.run_config
    overrides = shlex.split(str(settings["overrides"]))
    # The paths of this machine; a site reads the ones above alone.
    overrides += shlex.split(str(settings["server-overrides"]))
    composed = compose_run(overrides, recorded=True)
    config = composed.config
    named = str(settings["output-dir"])
    if not named:  # plain `flwr run`; our own command has checked them
        check_used(overrides, composed.resolved, runtime_known=False)
    folder = Path(named) if named else get_flwr_home() / "fedfrozen" / f"run-{context.run_id}"
    start = checkpoint.read(Path(config.start_from)) if config.start_from else None
    return Job(composed, folder, start)


def gather(membership: Membership, config: Config) -> int | None:
    """Wait for the nodes; the number of partitions of the data, or None for sites with their own data."""
    began = time.monotonic()  # one time-out for all waiting
    patience, approval = config.runtime.node_timeout, config.runtime.approval_timeout
    wanted = config.runtime.min_nodes or config.num_clients or 2
    nodes = membership.wait_for(1, patience, wanted, approval_timeout=approval)
    if not (splits := membership.num_partitions()):
        before = time.monotonic() - began
        membership.wait_for(wanted, patience, before=before, approval_timeout=approval)
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
        membership.wait_for(count, patience, before=time.monotonic() - began)
    return count
