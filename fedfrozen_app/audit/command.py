"""`fedfrozen audit RUN [key=value ...]`: test a run's privacy claims, and write its `audit.json`.

RUN is a run's folder, or a site's privacy folder, which holds only the record of its audited rounds.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.table import Table as Grid
from torch import Tensor

from fedfrozen_app.audit.claim import EXCEEDED, UNDECIDED, check_claim
from fedfrozen_app.audit.membership_inference import (
    Pool,
    interval,
    losses_of,
    pool_of,
    shadow_losses,
    split_scores,
)
from fedfrozen_app.config import sentence
from fedfrozen_app.core.client_order import Numbered
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.terminal import Console
from fedfrozen_app.core.verbs.verb import TRUST
from fedfrozen_app.data.table import Table
from fedfrozen_app.files.rows import read_rows
from fedfrozen_app.files.uploads import read_upload
from fedfrozen_app.launch import load_run, run_folder
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.report.output import replace_file


@dataclass
class AuditSettings:
    client: str | None = None  # client whose uploads are attacked; None: the audited one, or client 0
    members: str | None = None  # client whose rows are the members; None: all that took part
    rows: int = 500  # number of members, and of non-members, in an attack
    shadow_pairs: int = 2
    shadow_epochs: int = 10
    seed: int = 0


def audit(arguments: list[str]) -> int:
    """Returns 1 if a claimed epsilon is exceeded."""
    run, overrides = run_folder("audit", [word for word in arguments if word != TRUST])
    settings = read_settings(overrides)
    if (run / "audit").is_dir():
        claims = [check_claim(path, None, path.name, None) for path in audited(run)]
        found: dict[str, Any] = {"run": str(run), "claims": claims}
    else:
        found = attack(run, settings, trusted=TRUST in arguments)
    replace_file(run / "audit.json", json.dumps(found, indent=2))
    for grid in as_grids(found):
        Console().print(grid)
    print(f"Wrote {run / 'audit.json'}")
    return int(any(claim["verdict"] == EXCEEDED for claim in found["claims"]))


def attack(run: Path, settings: AuditSettings, *, trusted: bool) -> dict[str, Any]:
    claims = check_claims(run)
    worker = load_run(run, [], trusted=trusted)
    clients = took_part(worker, run)
    settings.client = settings.client or worker.config.privacy.audited or "0"
    check_client(worker, run, settings.client)
    if settings.members is not None:
        check_client(worker, run, settings.members)
        clients = [settings.members]
    final = {name: value.detach().clone() for name, value in worker.parameters.items()}
    return {
        "run": str(run),
        "strategy": worker.config.strategy["name"],
        "settings": asdict(settings),
        "claims": claims,
        "final_model": attack_model(worker, clients, final, settings),
        "uploads": attack_uploads(worker, run, settings),
    }


def audited(privacy: Path) -> list[Path]:
    """The folders of the audited clients."""
    return sorted(path for path in (privacy / "audit").glob("*") if any(path.glob("[0-9]*.safetensors")))


def check_claims(run: Path) -> list[dict[str, Any]]:
    """Check each client that claims an epsilon; without a record, its claim is unproven."""
    reported = {client: value for row in read_rows(run) for client, value in row.get("epsilon", {}).items()}
    watched = {path.name: path for path in audited(run / "privacy")}
    found = [
        check_claim(path, run / "uploads", client, reported.get(client)) for client, path in watched.items()
    ]
    if reported and not found:
        largest = max(reported, key=lambda client: reported[client])
        found.append(
            {"client": largest, "epsilon_claimed": reported[largest], "verdict": UNDECIDED, "checks": {}}
        )
    return found


def read_settings(overrides: list[str]) -> AuditSettings:
    try:
        merged = OmegaConf.merge(OmegaConf.structured(AuditSettings), OmegaConf.from_dotlist(overrides))
        settings = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise UserError(f"fedfrozen audit: {sentence(error)}") from error
    assert isinstance(settings, AuditSettings)
    for key, least in (
        ("rows", 10),
        ("shadow_pairs", 1),
        ("shadow_epochs", 1),
    ):
        if (value := getattr(settings, key)) < least:
            raise UserError(f"fedfrozen audit: {key}={value} is too few: it must be at least {least}.")
    return settings


def took_part(worker: Worker, run: Path) -> list[str]:
    assert worker.shares.partition is not None
    clients = sorted({client for row in read_rows(run) for client in row.get("clients", ())})
    known = Numbered(len(worker.shares.partition.indices))
    if not clients or not all(client in known for client in clients):
        raise UserError(
            f"{run} cannot be audited here: it needs trained rounds, and its clients' rows at hand."
        )
    return clients


def check_client(worker: Worker, run: Path, client: str) -> None:
    assert worker.shares.partition is not None
    count = len(worker.shares.partition.indices)
    if client not in Numbered(count):
        raise UserError(f"{run} has no client {client}: choose one from 0 to {count - 1}.")


def attack_model(
    worker: Worker, clients: list[str], final: dict[str, Tensor], settings: AuditSettings
) -> dict[str, Any]:
    """Members are the training rows of these clients, the others the test rows."""
    members = torch.cat([worker.rows(client).train for client in clients])
    pool = _pool(worker, members, settings)
    losses = losses_of(worker, pool.rows, final)
    hard = shadow_losses(worker, pool, settings.shadow_pairs, settings.shadow_epochs, settings.seed)
    return {
        "loss": interval(*split_scores(-losses, pool), settings.seed),
        "shadow": interval(*split_scores(hard - losses, pool), settings.seed),
    }


def attack_uploads(worker: Worker, run: Path, settings: AuditSettings) -> dict[str, Any] | None:
    """Attack the client's stored uploads (checkpoint.uploads) by how much each round lowered its rows'
    loss."""
    folders = sorted((run / "uploads").glob("[0-9]*"), key=lambda path: int(path.name))
    if not folders:
        return None
    assert settings.client is not None
    pool = _pool(worker, worker.rows(settings.client).train, settings)
    gain, kept = np.zeros(len(pool.rows)), 0
    for folder in folders:
        if (found := read_upload(folder, settings.client)) is None:
            continue
        before, after = (losses_of(worker, pool.rows, arrays) for arrays in found)
        gain, kept = gain + before - after, kept + 1
    return (
        {"rounds": kept, "gain": interval(*split_scores(gain / kept, pool), settings.seed)} if kept else None
    )


def as_grids(found: dict[str, Any]) -> list[Grid]:
    grids = [as_claim_grid(claim) for claim in found["claims"]]
    if "final_model" in found:
        grids.append(as_attack_grid(found))
    return grids


def as_claim_grid(claim: dict[str, Any]) -> Grid:
    per = f" per {claim['privacy_unit']}" if "privacy_unit" in claim else ""
    grid = Grid(title=f"Client {claim['client']} claims epsilon {claim['epsilon_claimed']:.3f}{per}")
    for column in ("check", "found", "word"):
        grid.add_column(column)
    for name, check in claim["checks"].items():
        grid.add_row(name, check["found"], check["word"])
    if not claim["checks"]:
        grid.add_row(
            "none", "no client was watched: run it again with privacy.audited=CLIENT", claim["verdict"]
        )
    grid.add_section()
    grid.add_row("the claim", "", claim["verdict"])
    return grid


def as_attack_grid(found: dict[str, Any]) -> Grid:
    client = found["settings"]["members"]
    of = "" if client is None else f" Were the rows of client {client}?"
    grid = Grid(title=f"Attacks on {found['strategy']}: who was in the data?{of}")
    for column in ("attack", "result", "95 % interval"):
        grid.add_column(column)
    attacks = {
        "final model, loss threshold": found["final_model"]["loss"],
        "final model, shadow-calibrated": found["final_model"]["shadow"],
    }
    if found["uploads"]:
        attacks[f"uploads of client {found['settings']['client']}"] = found["uploads"]["gain"]
    for name, area in attacks.items():
        grid.add_row(name, f"AUC {area['auc']:.3f}", f"{area['low']:.3f} to {area['high']:.3f}")
    return grid


def _pool(worker: Worker, members: Tensor, settings: AuditSettings) -> Pool:
    table: Table = worker.train_table.take(members.to(worker.device))
    return pool_of(table, worker.corpus.test.to(worker.device), settings.rows, settings.seed)
