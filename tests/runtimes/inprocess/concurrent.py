"""Runs alone and the same runs beside others, compared."""

from pathlib import Path

import pytest
import torch

from fedfrozen_app.config import compose_run
from fedfrozen_app.data.federated import load_corpus
from fedfrozen_app.files import checkpoint
from fedfrozen_app.run.job import Job
from fedfrozen_app.runtimes.inprocess.concurrent_runs import WorkerPool, run_concurrently
from tests.conftest import SMALL, Run, same_bits

# Ten clients' worth of skew in three: some of them are through before others.
WORDS = [*SMALL, "runtime.runner=cohort", "model.dtype=float64", "partition.alpha=0.3", "checkpoint.keep=9"]
EXACT = ("clients", "stage", "clients_ok", "clients_failed", "bytes_up", "bytes_down", "bytes_up_by_role")


def job(folder: Path, *words: str) -> Job:
    composed = compose_run([*WORDS, *words])
    from_folder = composed.config.start_from
    start = checkpoint.read(Path(from_folder)) if from_folder else None
    return Job(composed, folder, start)


def alone_and_together(train, folder: Path, *each: list[str], runs: int = 9) -> list[tuple[Run, Run]]:
    """Each run alone, and the same beside the others."""
    alone = [train(*WORDS, *words, folder=f"alone{n}", small=False) for n, words in enumerate(each)]
    jobs = [job(folder / f"stacked{n}", *words) for n, words in enumerate(each)]
    found = run_concurrently(jobs, WorkerPool(load_corpus(jobs[0].config), runs))
    for outcome in found:
        if isinstance(outcome, BaseException):
            raise outcome
    return [(one, Run(made.folder)) for one, made in zip(alone, jobs, strict=True)]


def same(alone: Run, stacked: Run, tolerance: float = 0.0) -> None:
    """What is counted is equal, and what is computed too: to the bit, or within `tolerance`."""
    assert len(alone.rows) == len(stacked.rows)
    for one, other in zip(alone.rows, stacked.rows, strict=True):
        assert one.keys() == other.keys()
        for key in (*EXACT, "test_accuracy", "client_val_before", "client_val_after"):
            assert one.get(key) == other.get(key), key
        for key in ("test_loss", "train_loss", "usual_norm"):
            if key in one:
                assert other[key] == pytest.approx(one[key], rel=tolerance, abs=0), key
    for server_round in range(1, len(alone.rows)):
        there = stacked.model_after(server_round)
        for name, value in alone.model_after(server_round).items():
            torch.testing.assert_close(there[name], value, rtol=0, atol=tolerance)
    if not tolerance:
        assert same_bits(alone.model, stacked.model)
