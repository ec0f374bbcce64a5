"""`fedfrozen audit RUN [key=value ...]`: try what a run claims of privacy, and write `audit.json` beside it.

RUN is a run's folder; or a site's own privacy folder, which holds the record of its audited rounds alone.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.table import Table as Grid
from safetensors.torch import load_file
from torch import Tensor

from fedfrozen_app.audit.claim import EXCEEDED, UNTOLD, judge_claim
from fedfrozen_app.audit.membership import (
    Pool,
    interval,
    losses_of,
    pool_of,
    shadow_losses,
    split_scores,
)
from fedfrozen_app.config import sentence
from fedfrozen_app.data.table import Table
from fedfrozen_app.errors import UserError
from fedfrozen_app.files.rows import read_rows
from fedfrozen_app.launch import load_run, run_folder
from fedfrozen_app.local.resident import Resident
from fedfrozen_app.report.output import replace_file


@dataclass
class AuditSettings:
    client: str | None = None  # whose uploads are attacked; None: the audited one's, or those of client 0
    rows: int = 500  # members, and as many others, in an attack
    shadow_pairs: int = 2
    shadow_epochs: int = 10
    seed: int = 0


def audit(arguments: list[str]) -> int:
    """1 when a claimed epsilon is exceeded."""
    run, overrides = run_folder("audit", arguments)
    settings = read_settings(overrides)
    if (run / "audit").is_dir():
        claims = [judge_claim(path, None, path.name, None) for path in audited(run)]
        found: dict[str, Any] = {"run": str(run), "claims": claims}
    else:
        found = attack(run, settings)
    replace_file(run / "audit.json", json.dumps(found, indent=2))
    for grid in as_grids(found):
        Console().print(grid)
    print(f"Wrote {run / 'audit.json'}")
    return int(any(claim["verdict"] == EXCEEDED for claim in found["claims"]))


def attack(run: Path, settings: AuditSettings) -> dict[str, Any]:
    claims = judge_claims(run)
    resident = load_run(run, [])
    clients = took_part(resident, run)
    settings.client = settings.client or resident.config.privacy.audited or "0"
    check_client(resident, run, settings.client)
    final = {name: value.detach().clone() for name, value in resident.parameters.items()}
    return {
        "run": str(run),
        "strategy": resident.config.strategy["name"],
        "settings": asdict(settings),
        "claims": claims,
        "final_model": attack_model(resident, clients, final, settings),
        "uploads": attack_uploads(resident, run, settings),
    }


def audited(privacy: Path) -> list[Path]:
    """The folders of the clients whose rounds were watched."""
    return sorted(path for path in (privacy / "audit").glob("*") if any(path.glob("[0-9]*.safetensors")))


def judge_claims(run: Path) -> list[dict[str, Any]]:
    """Of each client that claims an epsilon; who was not watched claims without proof."""
    told = {client: value for row in read_rows(run) for client, value in row.get("epsilon", {}).items()}
    watched = {path.name: path for path in audited(run / "privacy")}
    found = [judge_claim(path, run / "uploads", client, told.get(client)) for client, path in watched.items()]
    if told and not found:
        largest = max(told, key=lambda client: told[client])
        found.append({"client": largest, "epsilon_claimed": told[largest], "verdict": UNTOLD, "checks": {}})
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


def took_part(resident: Resident, run: Path) -> list[str]:
    assert resident.shares.partition is not None
    clients = sorted({client for row in read_rows(run) for client in row.get("clients", ())})
    if not clients or not set(clients) <= set(map(str, range(len(resident.shares.partition.indices)))):
        raise UserError(
            f"{run} cannot be audited here: it needs trained rounds, and its clients' rows at hand."
        )
    return clients


def check_client(resident: Resident, run: Path, client: str) -> None:
    assert resident.shares.partition is not None
    count = len(resident.shares.partition.indices)
    if client not in map(str, range(count)):
        raise UserError(f"{run} has no client {client}: choose one from 0 to {count - 1}.")


def attack_model(
    resident: Resident, clients: list[str], final: dict[str, Tensor], settings: AuditSettings
) -> dict[str, Any]:
    """Members are the training rows of all clients that took part, the others the test rows."""
    members = torch.cat([resident.rows(client).train for client in clients])
    pool = _pool(resident, members, settings)
    losses = losses_of(resident, pool.rows, final)
    hard = shadow_losses(resident, pool, settings.shadow_pairs, settings.shadow_epochs, settings.seed)
    return {
        "loss": interval(*split_scores(-losses, pool), settings.seed),
        "shadow": interval(*split_scores(hard - losses, pool), settings.seed),
    }


def attack_uploads(resident: Resident, run: Path, settings: AuditSettings) -> dict[str, Any] | None:
    """Where checkpoint.uploads kept what this client sent: what its rounds did for its own rows."""
    folders = sorted((run / "uploads").glob("*"), key=lambda path: int(path.name))
    kept = [path for path in folders if (path / f"{settings.client}.safetensors").exists()]
    if not kept:
        return None
    assert settings.client is not None
    pool = _pool(resident, resident.rows(settings.client).train, settings)
    gain = np.zeros(len(pool.rows))
    for folder in kept:
        before = losses_of(resident, pool.rows, load_file(folder / "base.safetensors"))
        after = losses_of(resident, pool.rows, load_file(folder / f"{settings.client}.safetensors"))
        gain += (before - after) / len(kept)
    return {"rounds": len(kept), "gain": interval(*split_scores(gain, pool), settings.seed)}


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
        grid.add_row("none", "nobody was watched: run it again with privacy.audited=CLIENT", claim["verdict"])
    grid.add_section()
    grid.add_row("the claim", "", claim["verdict"])
    return grid


def as_attack_grid(found: dict[str, Any]) -> Grid:
    grid = Grid(title=f"Attacks on {found['strategy']}: can one tell who was in the data?")
    for column in ("attack", "result", "95 % interval"):
        grid.add_column(column)
    attacks = {
        "final model, loss threshold": found["final_model"]["loss"],
        "final model, shadow-calibrated": found["final_model"]["shadow"],
    }
    if found["uploads"]:
        attacks[f"uploads of client {found['settings']['client']}"] = found["uploads"]["gain"]
    for name, figures in attacks.items():
        grid.add_row(name, f"AUC {figures['auc']:.3f}", f"{figures['low']:.3f} to {figures['high']:.3f}")
    return grid


def _pool(resident: Resident, members: Tensor, settings: AuditSettings) -> Pool:
    table: Table = resident.train_table.take(members.to(resident.device))
    return pool_of(table, resident.corpus.test.to(resident.device), settings.rows, settings.seed)
