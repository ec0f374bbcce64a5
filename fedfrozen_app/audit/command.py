"""`fedfrozen audit RUN [key=value ...]`: attack a finished run, and write `audit.json` beside its results."""

import json
import math
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

from fedfrozen_app.audit.canaries import rehearse
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
from fedfrozen_app.local.private import sampling
from fedfrozen_app.local.resident import Resident
from fedfrozen_app.privacy.accountant import epsilon_of
from fedfrozen_app.privacy.budget import BudgetFile
from fedfrozen_app.privacy.dpsgd import Recipe
from fedfrozen_app.privacy.steps import Steps
from fedfrozen_app.report.output import replace_file
from fedfrozen_app.words import counted


@dataclass
class AuditSettings:
    client: str = "0"  # whose steps are rehearsed, and whose uploads are looked at
    rows: int = 500  # members, and as many others, in an attack
    shadow_pairs: int = 2
    shadow_epochs: int = 10
    canaries: int = 200
    steps: int = 100  # private steps that the rehearsal takes at most
    seed: int = 0


def audit(arguments: list[str]) -> None:
    run, overrides = run_folder("audit", arguments)
    settings = read_settings(overrides)
    resident = load_run(run, [])
    clients = took_part(resident, run)
    check_client(resident, run, settings.client)
    final = {name: value.detach().clone() for name, value in resident.parameters.items()}
    found = {
        "run": str(run),
        "strategy": resident.config.strategy["name"],
        "settings": asdict(settings),
        "final_model": attack_model(resident, clients, final, settings),
        "uploads": attack_uploads(resident, run, settings),
        "canaries": attack_mechanism(resident, run, final, settings),
    }
    replace_file(run / "audit.json", json.dumps(found, indent=2))
    Console().print(as_grid(found))
    print(f"Wrote {run / 'audit.json'}")


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
        ("canaries", 8),
        ("steps", 1),
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
    if resident.config.privacy.name != "none" and BudgetFile(run / "privacy", client).read() is None:
        raise UserError(f"In {run} client {client} took no private step: choose one that has taken part.")


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
    pool = _pool(resident, resident.rows(settings.client).train, settings)
    gain = np.zeros(len(pool.rows))
    for folder in kept:
        before = losses_of(resident, pool.rows, load_file(folder / "base.safetensors"))
        after = losses_of(resident, pool.rows, load_file(folder / f"{settings.client}.safetensors"))
        gain += (before - after) / len(kept)
    return {"rounds": len(kept), "gain": interval(*split_scores(gain, pool), settings.seed)}


def attack_mechanism(
    resident: Resident, run: Path, final: dict[str, Tensor], settings: AuditSettings
) -> dict[str, Any]:
    """The client's private steps, rehearsed with canaries; for a run without privacy, its plain gradients."""
    config = resident.config
    rows = resident.rows(settings.client).train
    resident.load(final, {})
    budget = BudgetFile(run / "privacy", settings.client).read() if config.privacy.name != "none" else None
    declared = len(rows) if budget is None else budget.declared
    rate, steps = sampling(config, declared)
    claimed, noise, bound, delta = math.inf, 0.0, math.inf, 0.0
    taken = min(steps * config.num_rounds, settings.steps)
    if budget is not None:
        noise, bound, delta = budget.noise, config.privacy.max_grad_norm, budget.delta
        paid = sum(step.times for step in budget.steps if step.noise == noise)
        taken = min(paid, settings.steps)
        done = [Steps(noise, rate, taken)]
        claimed = epsilon_of(done, delta, config.privacy.accountant, config.privacy.epsilon)
    recipe = Recipe(rate, taken, noise, bound, 1.0, config.privacy.physical_batch)
    result = rehearse(resident, rows, recipe, canaries=settings.canaries, delta=delta, seed=settings.seed)
    return {
        **asdict(result),
        "steps": taken,
        "epsilon_claimed": None if math.isinf(claimed) else claimed,
        "privacy_unit": None if budget is None else budget.unit,
        "exceeds_claim": result.epsilon_lower > claimed,
    }


def as_grid(found: dict[str, Any]) -> Grid:
    grid = Grid(title=f"Audit of {found['strategy']}: can one tell who was in the data?")
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
    canaries = found["canaries"]
    claim = canaries["epsilon_claimed"]
    claim_line = (
        "no privacy claimed"
        if claim is None
        else f"claimed for these steps: {claim:.3f} per {canaries['privacy_unit']}"
    )
    grid.add_row(
        f"canaries, {counted(canaries['steps'], 'step')}",
        f"{canaries['right']} of {canaries['guesses']} guesses right",
        f"epsilon above {canaries['epsilon_lower']:.3f}; {claim_line}",
    )
    return grid


def _pool(resident: Resident, members: Tensor, settings: AuditSettings) -> Pool:
    table: Table = resident.train_table.take(members.to(resident.device))
    return pool_of(table, resident.corpus.test.to(resident.device), settings.rows, settings.seed)
