"""Runs that a study keeps in folders: what is there is not trained again, and several train side by side."""

import io
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from fedfrozen_app.config import compose_run
from fedfrozen_app.data.table import Corpus
from fedfrozen_app.files.rows import read_rows
from fedfrozen_app.run.job import Job
from fedfrozen_app.runtimes.inprocess.runtime import run_in_process


def last_row(run: tuple[Path, list[str]], corpus: Corpus | None = None) -> dict[str, Any]:
    """Of (folder, words): the last round's line, of a run that is trained if it is not there or not over. On
    `corpus`, where the words' own data are not meant."""
    folder, words = run
    torch.set_num_threads(1)
    if not ended(folder):
        composed = compose_run([*words, "overwrite=true"])
        silent = io.StringIO()
        with redirect_stdout(silent), redirect_stderr(silent):
            run_in_process(Job(composed, folder, shown=False), corpus=corpus)
        print(folder.name, flush=True)
    return read_rows(folder)[-1]


def ended(folder: Path) -> bool:
    summary = folder / "summary.json"
    return summary.exists() and json.loads(summary.read_text())["status"] == "completed"


def last_rows(
    runs: Sequence[tuple[Path, list[str]]], workers: int, corpus: Corpus | None = None
) -> list[dict[str, Any]]:
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return list(pool.map(partial(last_row, corpus=corpus), runs))
