"""Scores of plain models on the test rows of a run, by the run's own metric."""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedfrozen_app.baselines.models import BASELINES, Baseline
from fedfrozen_app.baselines.own_model import mean_of
from fedfrozen_app.baselines.same_rows import SameRows, same_rows
from fedfrozen_app.config import Config
from fedfrozen_app.data.federated import Shares
from fedfrozen_app.data.table import Corpus
from fedfrozen_app.files.rows import HEADLINES
from fedfrozen_app.tasks.target import target_of

log = logging.getLogger(__name__)
_last: dict[str, dict[str, Any] | None] = {}  # cached per process: the runs of a sweep have the same rows


def quick_baseline(config: Config, corpus: Corpus, shares: Shares) -> dict[str, Any] | None:
    """The best quick baseline; None if there is none, or too much data to read."""
    if shares.partition is None or corpus.task not in BASELINES:
        return None
    index = np.sort(shares.partition.indices.rows.astype(np.int64))
    asked = repr((config.dataset, config.baseline)).encode()
    key = hashlib.sha256(asked + index.tobytes()).hexdigest()
    if key not in _last:
        rows = same_rows(config, corpus, shares, quick=True)
        _last.clear()
        _last[key] = None if rows is None else max(scores(rows, quick=True), key=_headline, default=None)
    return _last[key]


def scores(rows: SameRows, *, quick: bool = False) -> list[dict[str, Any]]:
    """One entry per plain model of the task, except models that these rows do not allow."""
    found = []
    for one in BASELINES.get(rows.task, ()):
        if one.quick or not quick:
            began = time.perf_counter()
            try:
                metrics = _alone(rows, one) if one.alone else measured(rows, one.predict(rows))
            except ValueError as error:  # texts without a word of two letters, for instance
                log.warning("There is no figure of %s: %s", one.name, error)
                continue
            found.append(
                {
                    "name": one.name,
                    **metrics,
                    "train_rows": len(rows.train),
                    "of_rows": rows.of,
                    "seconds": time.perf_counter() - began,
                }
            )
    return found


def measured(rows: SameRows, predicted: Any) -> dict[str, float]:
    """The metrics that a run reports: accuracy, micro F1, or F1 of whole entities."""
    if rows.task == "tokens":
        from seqeval.metrics import f1_score as entity_f1
        from seqeval.scheme import IOB2

        return {
            "f1": float(entity_f1(rows.test_labels, predicted, mode="strict", scheme=IOB2, zero_division=0))
        }
    if rows.task == "multilabel":
        from sklearn.metrics import f1_score

        return {"f1": float(f1_score(rows.test_labels, predicted, average="micro", zero_division=0))}
    if rows.task == "regression":
        guess, truth = (
            torch.from_numpy(np.asarray(one, dtype=np.float64)) for one in (predicted, rows.test_labels)
        )
        return target_of(rows.task).measure(guess, truth, ())
    return {"accuracy": float((predicted == rows.test_labels).mean())}


def _alone(rows: SameRows, one: Baseline) -> dict[str, Any]:
    """Metrics on all test rows of models trained on each client's own rows: the mean, and each client's."""
    found = {}
    for name, places in rows.sites.items():
        own = replace(rows, train=rows.train[places], train_labels=rows.train_labels[places])
        found[name] = measured(own, one.predict(own))
    return {**mean_of(found), "by_client": found}


def _headline(found: dict[str, Any]) -> float:
    return float(next((found[name] for name in HEADLINES if name in found), 0.0))
