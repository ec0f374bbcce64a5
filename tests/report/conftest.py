"""Synthetic runs: rows with hand-checkable bytes, and the folders that hold them."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Row = dict[str, Any]

# Bytes of one client's arrays; the kernel (query, key) falls away in frozen rounds.
ROLE_BYTES = {
    "embedding": 12_000,
    "query": 33_000,
    "key": 33_000,
    "value": 33_000,
    "output": 33_000,
    "mlp": 131_000,
    "norm": 2_000,
    "head": 1_300,
}
RECORD_BYTES = 420  # plan and digests, a client


def make_row(place: int, warmup: int, clients: int, metric: str = "accuracy") -> Row:
    if place == 0:
        return {"round": 0, "stage": "initial", "test_loss": 2.31, f"test_{metric}": 0.101}
    frozen = place > warmup
    roles = {r: n for r, n in ROLE_BYTES.items() if not (frozen and r in ("query", "key"))}
    wobble = math.sin(7.0 * place) * (0.008 if frozen else 0.03)
    score = 0.1 + 0.8 * (1 - math.exp(-place / 4)) + wobble
    up = {role: size * clients for role, size in roles.items()}
    own = {str(client): 1 / (client + 2) for client in range(clients)}  # the first is served worst
    kernel = {} if frozen else {"kernel": {"rms": 0.9 / place**0.3, "mean_update": 0.4 / place**0.6}}
    return {
        "round": place,
        "stage": "frozen" if frozen else "warmup",
        "test_loss": 2.3 * math.exp(-place / 5) + 0.3 - wobble,
        f"test_{metric}": score,
        "val_loss": 2.25 * math.exp(-place / 5) + 0.33 - wobble,
        f"val_{metric}": score - 0.012 + math.cos(5.0 * place) * 0.01,
        "client_val_before": score - 0.03,
        "client_val_after": min(score + 0.09, 0.985),
        "by_client": {
            "client_val_before": {name: (score - 0.03) * (1 - share) for name, share in own.items()},
            "client_val_after": {name: min(score + 0.09, 0.985) * (1 - share) for name, share in own.items()},
        },
        "train_loss": 2.0 * math.exp(-place / 4) + 0.12,
        "lr": 1e-3,
        "bytes_up": sum(up.values()) + RECORD_BYTES * clients,
        "bytes_down": sum(up.values()) + 2 * RECORD_BYTES * clients,
        "bytes_up_by_role": up,
        "bytes_down_by_role": dict(up),
        "trained_params": sum(roles.values()) // 4,
        "clients_ok": clients,
        "clients_failed": 0,
        "seconds": {
            "total": 0.8 if frozen else 1.1,
            "train": 0.5 if frozen else 0.8,
            "aggregate": 0.05,
            "evaluate": 0.15,
            "checkpoint": 0.03,
        },
        "drift": {**kernel, "rest": {"rms": 2.2 / place**0.4, "mean_update": 1.1 / place**0.6}},
    }


def make_rows(rounds: int = 20, warmup: int = 5, clients: int = 10, metric: str = "accuracy") -> list[Row]:
    return [make_row(place, warmup, clients, metric) for place in range(rounds + 1)]


def with_selection(rows: list[Row], layers: int = 12, top: int = 4) -> list[Row]:
    """Client c chooses `top` neighbouring layers, beginning with c + round, in every frozen round."""
    for row in rows:
        if row["stage"] == "frozen":
            clients = row["by_client"]["client_val_after"]
            first = {client: int(client) + row["round"] for client in clients}
            row["selection"] = {
                client: sorted((begin + step) % layers for step in range(top))
                for client, begin in first.items()
            }
    return rows


def make_summary(rows: list[Row], **changes: Any) -> dict[str, Any]:
    metric = "f1" if "test_f1" in rows[0] else "accuracy"
    scored = [row for row in rows if f"test_{metric}" in row]
    best = max(scored, key=lambda row: row[f"test_{metric}"])
    final = scored[-1][f"test_{metric}"]
    return {
        f"final_test_{metric}": final,
        f"best_test_{metric}": best[f"test_{metric}"],
        "best_test_round": best["round"],
        "selected_round": best["round"],
        f"selected_test_{metric}": best[f"test_{metric}"],
        "stability": {"std_last_10": 0.0061, "best_minus_final": best[f"test_{metric}"] - final},
        "total_bytes_up": sum(row.get("bytes_up", 0) for row in rows),
        "total_bytes_down": sum(row.get("bytes_down", 0) for row in rows),
        "seconds": 17.9,
        "status": "completed",
        "config": {
            "strategy": {"name": "fedfrozen", "warmup_rounds": 5, "scope": "qk"},
            "model": {"name": "vit_tiny", "layers": 4, "width": 64},
            "dataset": {"name": "digits", "path": None},
            "partition": {"name": "dirichlet", "alpha": 0.1},
            "num_clients": 10,
            "num_rounds": 20,
            "participation": 1.0,
            "eval_every": 1,
            "seed": 0,
            "client": {"local_epochs": 1, "batch_size": 32, "lr": 0.001, "optimizer": "adamw"},
            "runtime": {"name": "inprocess", "runner": "auto"},
        },
        "versions": {"python": "3.12.3", "torch": "2.13.0", "flwr": "1.41.0"},
        "git_commit": "0123456789abcdef0123456789abcdef01234567",
        "seed": 0,
        "device": "cpu",
        "machine": "Linux x86_64, 2 cores",
        "command": "fedfrozen strategy=fedfrozen partition.alpha=0.1 seed=0",
        **changes,
    }


def save(folder: Path, rows: list[Row], summary: dict[str, Any] | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return folder


@pytest.fixture
def rows() -> list[Row]:
    return make_rows()


@pytest.fixture
def save_run(tmp_path: Path) -> Callable[..., Path]:
    """Write a run folder; `summary` changes are keyword arguments."""

    def write(rows: list[Row], **changes: Any) -> Path:
        return save(tmp_path / "run", rows, make_summary(rows, **changes))

    return write
