"""Digests of the rows that a run reads, by split: they must agree before two machines' results compare."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedfrozen_app.config import Config
from fedfrozen_app.core.digests import digests
from fedfrozen_app.core.quantiles import LISTED
from fedfrozen_app.data.federated import Shares, load_corpus, share_out
from fedfrozen_app.data.row_lists import row_lists
from fedfrozen_app.data.table import Corpus, Table
from fedfrozen_app.exchange.strict import hash_of

Splits = dict[str, Any]


def split_digests(config: Config, corpus: Corpus | None = None) -> Splits:
    corpus = corpus or load_corpus(config)
    return digests_of(corpus, share_out(corpus, config, config.num_clients))


def digests_of(corpus: Corpus, shares: Shares) -> Splits:
    """`train` and `test` are all rows in order; `validation` and `clients` are indices into the train
    rows."""
    parts = () if shares.partition is None else shares.partition.indices
    return {
        "train": _of_table(corpus.train),
        "test": _of_table(corpus.test),
        "validation": _of_rows(shares.validation),
        "clients": _of_clients(parts),
    }


def _of_clients(parts: Sequence[np.ndarray]) -> dict[str, str]:
    if len(parts) <= LISTED:
        return {str(number): _of_rows(rows) for number, rows in enumerate(parts)}
    lists = row_lists(parts)  # one digest in total for very many clients
    return {f"all {len(parts)}": _of_rows(np.concatenate([lists.offsets, lists.rows]))}


def difference(stated: Splits, found: Splits) -> str:
    """The first split that differs; "" if none does."""
    for name in ("train", "test", "validation"):
        if stated.get(name) != found[name]:
            return f"the {name} rows"
    if stated.get("clients") != found["clients"]:
        return "the rows of the clients"
    return ""


def _of_table(table: Table) -> str:
    return hash_of(digests({**table.inputs, "labels": table.labels}))


def _of_rows(rows: Any) -> str:
    return hashlib.sha256(np.asarray(rows, dtype="<i8").tobytes()).hexdigest()
