"""The worker of this process: built for a run at its first message, and kept for later ones."""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context

from fedfrozen_app.config import Config, compose_config, read, resolved
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.flower_internals import get_flwr_home
from fedfrozen_app.core.logs import prepare_logging
from fedfrozen_app.core.ray_process import simulated
from fedfrozen_app.data.federated import Shares, load_corpus, share_out
from fedfrozen_app.data.sources import needs_path
from fedfrozen_app.data.text_reading import reading_of_spec
from fedfrozen_app.exchange.cache import Cache
from fedfrozen_app.local.worker import Worker

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AcceptedRun:
    """The run that a site's executor trains, from an accepted proposal and the site's own settings."""

    site: str
    proposal: str  # hash
    config: Config
    data_spec: Mapping[str, Any]


RunKey = tuple[Any, ...]
_installed: tuple[RunKey, Worker] | None = None
_accepted: dict[str, AcceptedRun] = {}  # by site: a process has one site, a test may have several


def set_accepted_run(run: AcceptedRun) -> None:
    """Set the run that the next message of this site belongs to. Only the site's executor calls this."""
    _accepted[run.site] = run


def install(key: RunKey, worker: Worker) -> None:
    """Make this the process's worker, for contexts whose run has this key."""
    global _installed
    _installed = (key, worker)


def installed() -> tuple[RunKey, Worker]:
    assert _installed is not None
    return _installed


def run_key(context: Context) -> RunKey:
    node = context.node_config
    if "executor" in node:
        return ("proposal", node["site"], node["proposal"])
    where = (node.get("site"), node.get("data-path"), node.get("num-partitions"))
    return (context.run_config["overrides"], *where)


def worker_for(context: Context) -> Worker:
    """The process's worker for this run."""
    key = run_key(context)
    if _installed is None or _installed[0] != key:
        install(key, _build_for(context))
    assert _installed is not None
    return _installed[1]


@lru_cache(maxsize=1)
def config_of(overrides: str) -> Config:
    return read(resolved(compose_config(overrides)))


def _build_for(context: Context) -> Worker:
    prepare_logging()  # a Ray worker's or a site's process starts without it
    build = _build_accepted if "executor" in context.node_config else _build_from_overrides
    worker = build(context)
    log.info("Worker %d trains on %s and keeps its model and data loaded.", os.getpid(), worker.device)
    return worker


def _build_from_overrides(context: Context) -> Worker:
    config = config_of(str(context.run_config["overrides"]))
    node = context.node_config
    path = node.get("data-path")
    if "model-path" in node:
        config = replace(config, model=replace(config.model, path=str(node["model-path"])))
    if path is None and needs_path(config.dataset.kind) and not simulated():
        raise UserError(
            "This node names no data of its own: start its SuperNode with "
            "--node-config 'data-path=\"/folder/of/this/site\"'."
        )
    data_spec = json.loads(str(context.state["card"]["json"]))
    local_path = None if path is None else str(path)
    corpus = load_corpus(
        config,
        local_path,
        tuple(data_spec["classes"]),
        site="site" in node,
        reading=reading_of_spec(data_spec.get("text")),
        data_spec=data_spec,
    )
    if "site" in node:
        shares = Shares(validation=np.arange(0))
    else:
        shares = share_out(corpus, config, int(node["num-partitions"]))
    return Worker(config, corpus, cache=disk_cache(context), shares=shares, data_spec=data_spec)


def _build_accepted(context: Context) -> Worker:
    """Build the worker without composing a configuration: use the object that the site's policy checked."""
    node = context.node_config
    accepted = _accepted[str(node["site"])]
    if accepted.proposal != node["proposal"]:
        raise ValueError("the site has accepted another proposal")
    config, data_spec = accepted.config, dict(accepted.data_spec)
    reading = reading_of_spec(data_spec.get("text"))
    classes = tuple(data_spec["classes"])
    corpus = load_corpus(config, None, classes, site=True, reading=reading, data_spec=data_spec)
    shares = Shares(validation=np.arange(0))
    return Worker(config, corpus, cache=disk_cache(context), shares=shares, data_spec=data_spec)


def disk_cache(context: Context) -> Cache:
    """This machine's cache of arrays across processes. A site sets its own folder; a server cannot."""
    node = context.node_config
    if "executor" in node:
        return Cache(Path(str(node["cache-dir"])), limit_bytes=int(float(node["cache-gb"]) * 1e9))
    runtime = config_of(str(context.run_config["overrides"])).runtime
    named = context.node_config.get("cache-dir") if "site" in context.node_config else runtime.cache_dir
    folder = Path(str(named)) if named else get_flwr_home() / "fedfrozen" / "cache"
    room = float(context.node_config.get("cache-gb", runtime.cache_gb))
    return Cache(folder, limit_bytes=int(room * 1e9))
