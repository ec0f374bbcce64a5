"""Runs as folders hold them, with figures chosen by the test."""

import json
from pathlib import Path
from typing import Any

import pytest


def config(strategy: str = "fedavg", alpha: float = 0.1, seed: int = 0, **more: Any) -> dict[str, Any]:
    own = {"fedprox": {"mu": 0.01}, "fedfrozen": {"warmup_rounds": 4, "freeze_scope": "qk"}}
    return {
        "strategy": {"name": strategy, **own.get(strategy, {})},
        "model": {"name": "vit_tiny", "config": {"hidden_size": 16}},
        "partition": {"name": "dirichlet", "alpha": alpha},
        "num_rounds": 3,
        "seed": seed,
        "output_dir": None,
        **more,
    }


@pytest.fixture
def save(tmp_path):
    """Write a run with this curve of test accuracies; 100 bytes go up and 10 down in a round."""

    def save(
        name: str,
        curve: list[float],
        *,
        status: str = "completed",
        metric: str = "accuracy",
        command: str | None = None,
        **keys: Any,
    ):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        rows = [
            {
                "round": number,
                "stage": "train",
                f"test_{metric}": value,
                "bytes_up": 100 if number else 0,
                "bytes_down": 10 if number else 0,
                "by_client": {"client_val_after": {str(n): value - n / 100 for n in range(3)}},
            }
            for number, value in enumerate(curve)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        summary = {
            "status": status,
            f"final_test_{metric}": curve[-1],
            f"best_test_{metric}": max(curve),
            "stability": {"std_last_10": None, "best_minus_final": max(curve) - curve[-1]},
            "total_bytes_up": 100 * (len(curve) - 1),
            "total_bytes_down": 10 * (len(curve) - 1),
            "seconds": 2.0,
            "versions": {"torch": "2.13"},
            "device": "cpu",
            "git_commit": "abc",
            "config": config(**keys),
        }
        if command is not None:
            summary["command"] = f"fedfrozen {command}"
        (folder / "summary.json").write_text(json.dumps(summary))
        return Path(folder)

    return save
