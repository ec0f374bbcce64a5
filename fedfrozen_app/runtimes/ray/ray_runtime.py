"""`runtime=ray`: the server in this process, the clients on Ray actors of one machine or a cluster."""

import logging
import os
from contextlib import ExitStack
from functools import partial
from typing import Any

from fedfrozen_app import client_app
from fedfrozen_app.core import own_objects
from fedfrozen_app.core.formatting import counted
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.run.job import Job
from fedfrozen_app.runtimes.inprocess.runtime import run_with
from fedfrozen_app.runtimes.ray.cluster import Room, connect_to_ray, room_for
from fedfrozen_app.runtimes.ray.load_worker import data_digest
from fedfrozen_app.runtimes.ray.pool import ActorPool
from fedfrozen_app.runtimes.ray.ray_grid import RayGrid
from fedfrozen_app.runtimes.ray.worker_setup import RunSetup

log = logging.getLogger(__name__)
HANDED_ON = (own_objects.PLACE, own_objects.DIGEST)  # environment variables passed on to other machines


def run_on_ray(job: Job) -> dict[str, Any]:
    """Train to the end and return the summary."""
    connect_to_ray(job.config)
    room = room_for(job.config)
    corpus = load_corpus(job.config)
    worker = Worker(job.config, corpus, shares=share_out(corpus, job.config, job.config.num_clients))
    with own_objects.handed_down(job.resolved_config), ExitStack() as ended:
        return run_with(worker, job, make_grid=partial(ray_grid, job, room, ended))


def ray_grid(
    job: Job, room: Room, ended: ExitStack, worker: Worker, clients: int, settings: dict[str, str]
) -> RayGrid:
    """Start the workers, which `ended` ends, and return the grid that uses them."""
    parts = job.config.runtime.workers or room.fitting
    config = job.composed.with_absolute_paths().config
    environment = {name: os.environ[name] for name in HANDED_ON if name in os.environ}
    # Absolute paths: workers may have another working directory, and private clients need their records.
    settings = settings | {"output-dir": str(job.folder.resolve())}
    setup = RunSetup(config, clients, settings, parts, room.gpus, environment)
    log.info("Clients train on %s of Ray (%s).", counted(parts, "worker"), room.size)
    if parts > room.fitting:
        log.warning(
            "Ray has room for %d of %d workers now: the others start when machines join the cluster.",
            *(room.fitting, parts),
        )
    pool = ActorPool(setup, room, data_digest(worker), job.config.runtime.node_timeout)
    ended.callback(pool.close)
    pool.start()
    return RayGrid(client_app.app, clients, settings, worker, pool)
