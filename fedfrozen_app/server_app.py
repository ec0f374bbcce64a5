"""Flower's entry on the server: gather the nodes, then run the rounds as every other runtime does."""

import logging
import shlex
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.utils import get_flwr_home

from fedfrozen_app.config import Config, compose_config, read, resolved
from fedfrozen_app.data.federated import load_corpus, server_only, share_out
from fedfrozen_app.errors import UserError
from fedfrozen_app.exchange.proposal import propose
from fedfrozen_app.files import checkpoint
from fedfrozen_app.local.resident import Resident
from fedfrozen_app.logs import prepare_logging
from fedfrozen_app.run.federate import explain_disk_errors, federate
from fedfrozen_app.run.job import Job
from fedfrozen_app.run.outline import shared_roles
from fedfrozen_app.server.anchors import AnchorFile
from fedfrozen_app.server.conversation import Conversation
from fedfrozen_app.words import counted

log = logging.getLogger(__name__)
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """`flwr run .`, our own simulation, or a deployed federation."""
    prepare_logging()
    job = job_of(context)
    config = job.config
    corpus = load_corpus(config)
    resident = Resident(config, corpus, shares=server_only(corpus, config))
    conversation = converse(grid, job, resident, f"flower-{context.run_id}")
    if num_clients := gather(conversation, config):
        resident.shares = share_out(corpus, config, num_clients)
    log.info("Results go to %s", job.folder)
    with explain_disk_errors(job.folder):
        federate(job, conversation, resident)


def converse(grid: Grid, job: Job, resident: Resident, run_name: str) -> Conversation:
    """With the nodes of a run; `run_name` is what sites know it by where it has no run_id."""
    config = job.config
    proposal = None
    try:
        roles = shared_roles(config, resident.exchanged, resident.roles)
        proposal = propose(config, resident.card, config.run_id or run_name, roles)
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
    )


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
    patience = config.runtime.node_timeout
    nodes = conversation.wait_for(1, patience, config.runtime.approval_timeout)
    if not (splits := conversation.num_partitions()):
        least = config.runtime.min_nodes or config.num_clients or 2
        conversation.wait_for(least, patience, config.runtime.approval_timeout)
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
        conversation.wait_for(count, patience)
    return count
