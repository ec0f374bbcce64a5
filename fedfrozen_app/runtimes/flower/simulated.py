"""`runtime=flower`: the job in Flower's own simulation, with a SuperLink that ends with it."""

import logging
import shlex
from typing import Any

from fedfrozen_app.config import absolute_paths, device_of, quoted
from fedfrozen_app.core.app_folder import app_folder
from fedfrozen_app.core.formatting import counted
from fedfrozen_app.core.own_objects import handed_down
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.files import checkpoint
from fedfrozen_app.privacy.notices import model_metadata
from fedfrozen_app.report.output import write_interrupted
from fedfrozen_app.report.summary import finished_summary
from fedfrozen_app.run.evaluation import trivial_scores
from fedfrozen_app.run.job import Job
from fedfrozen_app.runtimes.flower.run_log import show
from fedfrozen_app.runtimes.flower.simulation import run_app

log = logging.getLogger(__name__)


def run_with_flower(job: Job) -> dict[str, Any]:
    """Train to the end and return the summary."""
    config = job.config
    if job.start is not None and config.start_from is None:
        checkpoint.check_private(job.start, in_process=False)  # fails before Flower is started
    # Fails before Flower is started if the data are missing or do not fill the clients.
    corpus = load_corpus(config)
    shares = share_out(corpus, config, config.num_clients)
    assert shares.partition is not None
    count = len(shares.partition.indices)
    paths = absolute_paths(job.resolved_config)
    if (start := job.start_folder()) is not None:
        paths["from"] = start
    overrides = [
        *job.overrides,
        *(quoted(key, value) for key, value in paths.items()),
        f"num_clients={count}",
    ]
    work = job.folder / "flower"
    log.info("Starting Flower's simulation with %s; its logs go to %s.", counted(count, "node"), work)
    try:
        with handed_down(job.resolved_config):
            run_app(
                app_folder(work),
                {"overrides": shlex.join(overrides), "output-dir": str(job.folder)},
                num_supernodes=count,
                cpus_per_client=config.runtime.cpus_per_client,
                gpus_per_client=config.runtime.gpus_per_client,
                work_dir=work,
                on_line=show,
            )
    except KeyboardInterrupt:  # Flower ends the ServerApp's process before it can write
        state = checkpoint.newest_state(job.folder)
        personal = state is not None and state["hooks"].get("private")
        write_interrupted(
            job.folder,
            model_metadata(config.privacy),
            device=str(device_of(config.device)),
            trivial={} if personal else trivial_scores(corpus.task, corpus.test.labels),
        )
        raise
    return finished_summary(job.folder)
