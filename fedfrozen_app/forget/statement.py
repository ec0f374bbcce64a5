"""The statement of what was done to forget a client: forget.json, signed if a key is given."""

import json
from pathlib import Path
from typing import Any

from fedfrozen_app.config import Config
from fedfrozen_app.config.needs import PICTURE_KINDS
from fedfrozen_app.core.signing import Private, sign_file
from fedfrozen_app.exchange.strict import hash_of
from fedfrozen_app.files import checkpoint, client_segments, disk, status
from fedfrozen_app.files.disk import replace_file
from fedfrozen_app.files.folder_manifest import file_digest
from fedfrozen_app.files.rows import first_rounds, read_rows
from fedfrozen_app.forget.asked import Asked
from fedfrozen_app.forget.rollback import Rollback
from fedfrozen_app.launch import finished

FILE = "forget.json"
FORMAT = 1


def write_statement(
    rollback: Rollback, folder: Path, config: Config, key: Private | None, asked: Asked | None = None
) -> dict[str, Any]:
    """Write the statement for the finished run in `folder`; `asked`: the site's request, if there is one."""
    summary, rows = finished(folder), read_rows(folder)
    again = [row for row in rows if row["round"] > rollback.start_round]
    if trained := first_rounds(rows).keys() & set(rollback.excluded):
        raise AssertionError(f"{folder} asked {sorted(trained)} to train")
    found = {
        "format": FORMAT,
        "client": rollback.client,
        "clients_left_out": rollback.excluded,
        "request": None if asked is None else asked.record,
        "run": rollback.run.name,
        "first_round": rollback.first,
        "rounds_with_client": sum(rollback.client in row.get("clients", ()) for row in rollback.rows),
        "restarted_after_round": rollback.start_round,
        "start_sha256": None if rollback.start is None else file_digest(rollback.start / "model.safetensors"),
        "rounds_again": len([row for row in again if row["round"]]),
        "seconds": sum(row.get("seconds", {}).get("total", 0.0) for row in again),
        "model_before_sha256": file_digest(rollback.run / "model.safetensors"),
        "model_sha256": file_digest(folder / "model.safetensors"),
        "configuration_sha256": hash_of(summary["config"]),
        "versions": summary.get("versions"),
        "means": (
            "The model in this folder is, to the bit, that of a run which this client never joined after the "
            "checkpoint, and the checkpoint was written before its first round."
        ),
        "made_of_all_clients": shared_statistics(config),
        "files_that_still_hold_it": still_holding(rollback),
        "written": status.now(),
    }
    replace_file(folder / FILE, json.dumps(found, indent=1) + "\n")
    if key is not None:
        sign_file(folder / FILE, key)
    return found


def shared_statistics(config: Config) -> list[str]:
    """Statistics that a simulation computes from all clients' rows, including this client's."""
    dataset = config.dataset
    if config.runtime.name == "deployed":
        return []
    if dataset.kind == "table":
        return [] if dataset.statistics else ["how columns are scaled and filled (dataset.statistics)"]
    if dataset.mean is None and dataset.kind in PICTURE_KINDS:
        return ["mean and deviation of the pixels (dataset.mean, dataset.std)"]
    return []


def still_holding(rollback: Rollback) -> list[str]:
    """Files of the run that depend on the client and must be deleted to forget it."""
    run, first = rollback.run, rollback.first
    found = [run / name for name in ("model.safetensors", "report.html", "metrics.jsonl")]
    best = run / "best.safetensors"
    if best.is_file() and int(disk.header(best).get("round", first)) >= first:
        found.append(best)
    for folder in ("checkpoints", "uploads"):
        found += [run / folder / str(n) for n in checkpoint.numbers(run / folder) if n >= first]
    found.append(run / client_segments.FOLDER)
    return [str(path.relative_to(run)) for path in found if path.exists()]
