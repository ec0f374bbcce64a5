"""A census or a survival study of Flower's nodes: in its simulation, or the sites of a federation."""

import json
import shlex
from pathlib import Path
from typing import Any

from fedfrozen_app.census.ask import Ask
from fedfrozen_app.census.record_source import simulated
from fedfrozen_app.config import Config, absolute_paths, quoted
from fedfrozen_app.core.app_folder import app_folder
from fedfrozen_app.files.disk import replace_file
from fedfrozen_app.files.folders import authorities_file, sites_file
from fedfrozen_app.runtimes.flower.deployed import connect, kit_of, split_overrides
from fedfrozen_app.runtimes.flower.run_log import failure, show
from fedfrozen_app.runtimes.flower.simulation import run_app
from fedfrozen_app.runtimes.flower.superlink_connection import Scalar


def census_with_flower(
    config: Config, resolved_config: dict[str, Any], overrides: list[str], ask: Ask, folder: Path
) -> dict[str, Any]:
    paths = [quoted(key, value) for key, value in absolute_paths(resolved_config).items()]
    count = len(simulated(shlex.join(overrides), config.num_clients)[1])
    words = [*overrides, *paths, f"num_clients={count}"]
    work = folder / "flower"
    run_app(
        app_folder(work),
        {"overrides": shlex.join(words), "output-dir": str(folder), "census": ask.text},
        num_supernodes=count,
        cpus_per_client=config.runtime.cpus_per_client,
        work_dir=work,
        on_line=show,
    )
    return json.loads((folder / "census.json").read_text())


def asked_deployed(
    config: Config, resolved_config: dict[str, Any], overrides: list[str], kind: str, text: str, folder: Path
) -> dict[str, Any]:
    """Submit a request of this kind (census, survival) with an operator's kit, and wait for its end."""
    connection = connect(config, folder)
    shared, server_only = split_overrides(resolved_config, overrides)
    replace_file(sites_file(folder), json.dumps(connection.sites()))
    replace_file(authorities_file(folder), (kit_of(config) / "ca.crt").read_text("ascii"))
    settings: dict[str, Scalar] = {
        "overrides": shlex.join(shared),
        "server-overrides": shlex.join(server_only),
        "output-dir": str(folder),
        kind: text,
    }
    run_id = connection.submit(app_folder(folder / "flower"), settings, {})
    end = connection.follow(run_id, on_line=show, stop_on_interrupt=True)
    if end.status != "completed":
        raise failure(end, "")
    return json.loads((folder / f"{kind}.json").read_text())
