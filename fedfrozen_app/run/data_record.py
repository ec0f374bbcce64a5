"""`data.json`: a run's rows, from the files to the clients."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedfrozen_app.core.quantiles import LISTED, quantiles
from fedfrozen_app.data.federated import Shares
from fedfrozen_app.data.row_lists import row_lists
from fedfrozen_app.data.subwords import tokenizer_json
from fedfrozen_app.data.table import Corpus
from fedfrozen_app.files.disk import remove_file, replace_file
from fedfrozen_app.local.worker import Worker

FILE, TOKENIZER, COLUMNS = "data.json", "tokenizer.json", "table.json"


def write_data_record(worker: Worker, folder: Path) -> None:
    replace_file(folder / FILE, json.dumps(data_record(worker), indent=2))


def write_tokenizer(worker: Worker, folder: Path) -> None:
    """Write a learned tokenizer for transformers and `dataset.tokenizer`; remove an earlier run's."""
    reading = worker.corpus.reading
    if reading is None or reading.vocabulary is None:
        remove_file(folder / TOKENIZER)
    else:
        replace_file(folder / TOKENIZER, tokenizer_json(reading.vocabulary))


def write_columns(worker: Worker, folder: Path) -> None:
    """Write the encoding of a table's cells for `dataset.statistics`; remove an earlier run's."""
    table, settings = worker.corpus.preprocessing, worker.corpus.settings
    if table is None:
        remove_file(folder / COLUMNS)
    else:
        replace_file(folder / COLUMNS, json.dumps(table.spec() | {"target": dict(settings)}, indent=1) + "\n")


def data_record(worker: Worker) -> dict[str, Any]:
    """The rows read and dropped, and the classes of each split and client.

    For real sites it has only the server's own rows: a site's policy decides what it reports of its rows.
    """
    corpus, shares, names = worker.corpus, worker.shares, worker.corpus.stratum_names
    parts = shares.partition
    account = corpus.account or {"files": [], "splits": {}, "warnings": []}
    used = {
        "train": _counts(corpus.strata, names),
        "test": _counts(corpus.test_strata, names),
        "server_validation": _counts(corpus.strata[shares.validation], names),
    }
    clients: dict[str, Any] = {}
    many = parts is not None and len(parts.indices) > LISTED
    for number, rows in enumerate(parts.indices if parts is not None and not many else ()):
        assert parts is not None
        held = worker.rows(str(number)).validation.numpy()
        tested = shares.test[number] if shares.test else np.arange(0)
        clients[str(number)] = {
            "name": parts.names[number],
            **_counts(corpus.strata[rows], names),
            "held_out": len(held),
            "test_rows": len(tested),
        }
    return {
        "version": 1,
        "dataset": corpus.name,
        "task": corpus.task,
        "classes": list(corpus.every_class) or list(names),
        **account,
        **_texts(worker),
        **_columns(worker),
        "rows": used,
        "clients": clients,
        **({"client_bands": client_bands(shares, corpus)} if many else {}),
    }


def client_bands(shares: Shares, corpus: Corpus) -> dict[str, Any]:
    """For very many clients: quantiles of their rows, classes and test rows."""
    assert shares.partition is not None
    indices = shares.partition.indices
    counts = indices.counts(corpus.strata, len(corpus.stratum_names))
    found = {"rows": quantiles(indices.sizes), "classes": quantiles((counts > 0).sum(axis=1))}
    if len(shares.test):
        found["test_rows"] = quantiles(row_lists(shares.test).sizes)
    return {"clients": len(indices), **found}


def _texts(worker: Worker) -> dict[str, Any]:
    """The tokenisation, and the number of truncated texts; empty for images."""
    reading, account = worker.corpus.reading, worker.corpus.account
    if reading is None or "texts" not in account:
        return {}
    tokenizer: dict[str, Any] = {"learned": False, "pieces": worker.corpus.vocab_size}
    if (own := reading.vocabulary) is not None:
        tokenizer = {"learned": True, "pieces": own.size, "lowercase": own.lowercase, "sha256": own.digest}
    return {"texts": account["texts"] | {"tokenizer": tokenizer}}


def _columns(worker: Worker) -> dict[str, Any]:
    """The columns that the model reads, by kind; empty for images and texts."""
    if (table := worker.corpus.preprocessing) is None:
        return {}
    categorical = {one.name: len(one.levels) for one in table.categorical}
    return {"columns": {"numeric": [one.name for one in table.numeric], "categorical": categorical}}


def _counts(strata: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    found = np.bincount(strata, minlength=len(names))
    return {
        "rows": len(strata),
        "by_class": {name: int(count) for name, count in zip(names, found, strict=True) if count},
    }
