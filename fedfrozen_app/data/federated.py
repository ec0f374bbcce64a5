"""One corpus as a federation sees it: what the server keeps, and which rows each client has."""

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase

from fedfrozen_app.config import DEFAULT_CLIENTS, Config, DatasetConfig
from fedfrozen_app.data.augment import check_pictures
from fedfrozen_app.data.partition import (
    DRAWN,
    FILE_COLUMN,
    Partition,
    PartitionSpec,
    deal_test,
    grouping_column,
    partition,
    split_validation,
)
from fedfrozen_app.data.partition_file import read_clients
from fedfrozen_app.data.sources import DatasetSpec, load
from fedfrozen_app.data.sources.synthetic import word_tokenizer
from fedfrozen_app.data.table import Corpus, InputShape, Novel
from fedfrozen_app.errors import UserError
from fedfrozen_app.seeds import seed_for

log = logging.getLogger(__name__)
# What is done with rows once read.
_NOT_READING = ("validation", "client_validation", "align", "novel", "subgroups", "subgroup_floor", "augment")
_ALIGN = 1
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.txt", "vocab.json")


@dataclass(frozen=True)
class ClientRows:
    """Row numbers of the training table."""

    train: Tensor
    validation: Tensor


@dataclass(frozen=True)
class Shares:
    """Who has which rows of the training table: the server for validation, and each client.

    Without a partition the clients have their data elsewhere, or this is one of them and has all rows.
    """

    validation: np.ndarray
    partition: Partition | None = None
    test: tuple[np.ndarray, ...] = ()  # rows of the test table by client, in its train rows' proportions


def load_corpus(
    config: Config, path: str | None = None, classes: tuple[str, ...] | None = None, *, site: bool = False
) -> Corpus:
    """The run's corpus; a site passes its own path and the federation's class order.

    With privacy on a site draws no rows of its own: one row more would then change which others are trained
    on, and epsilon is about one row alone.
    """
    dataset = config.dataset
    if site and config.privacy.name != "none":
        if dataset.limit is not None:
            raise UserError(
                "dataset.limit draws from a site's rows, which privacy=dp_sgd does not cover: leave it out."
            )
        dataset = replace(dataset, test_fraction=0.0)
    judges = config.runtime.name == "deployed" and classes is None
    if judges:
        dataset = replace(dataset, test_fraction=0.0)
    corpus = load(spec_of(dataset, path), tokenizer_of(config), classes)
    if judges and not len(corpus.test):
        corpus = _all_to_judge_by(corpus, config)
    if dataset.novel:
        corpus = hold_back(corpus, dataset.novel, deployed=config.runtime.name == "deployed")
    check_pictures(corpus, dataset.augment)
    if classes is None and not len(corpus.test):  # a site is judged by the server's rows
        raise UserError(
            "There are no test rows, and none could be held out: no class has two rows (or two documents or "
            "patients, which are never parted). Name a test split with dataset.test_split, or use more data."
        )
    return corpus


def hold_back(corpus: Corpus, share: float, *, deployed: bool) -> Corpus:
    """Of the classes in their order, the last ones become novel: their train rows are dealt to nobody."""
    if deployed:
        raise UserError(
            "dataset.novel takes classes away from simulated clients, and real sites keep their own rows: "
            "leave it out, or use runtime=inprocess."
        )
    if corpus.task != "image":
        raise UserError("dataset.novel needs pictures with one class each: leave it out for these data.")
    kept = len(corpus.classes) - round(share * len(corpus.classes))
    if min(kept, len(corpus.classes) - kept) < 2:
        raise UserError(
            f"dataset.novel={share:g} of {len(corpus.classes)} classes leaves fewer than two on one side: "
            "choose another share."
        )
    labels = corpus.test.labels.numpy()
    base, novel = np.flatnonzero(labels < kept), np.flatnonzero(labels >= kept)
    of_novel = corpus.test.take(torch.from_numpy(novel))
    return replace(
        corpus,
        classes=corpus.classes[:kept],
        test=corpus.test.take(torch.from_numpy(base)),
        test_strata=corpus.test_strata[base],
        test_units=corpus.test_units[base],
        test_columns={name: values[base] for name, values in corpus.test_columns.items()},
        novel=Novel(corpus.classes[kept:], replace(of_novel, labels=of_novel.labels - kept)),
    )


def _all_to_judge_by(corpus: Corpus, config: Config) -> Corpus:
    """The server of real sites trains on nothing: all its rows are test rows, but those of its validation."""
    rows = _set_apart(corpus, config)[0]
    return replace(
        corpus,
        test=corpus.train.take(torch.from_numpy(rows)),
        test_columns={name: values[rows] for name, values in corpus.columns.items()},
        test_strata=corpus.strata[rows],
        test_units=corpus.units[rows],
    )


def share_out(corpus: Corpus, config: Config, num_clients: int | None) -> Shares:
    """Set the server's validation rows apart and split the rest over the clients."""
    rest, validation = _set_apart(corpus, config)
    spec = PartitionSpec(**vars(config.partition))
    if num_clients is None and spec.name in DRAWN:
        num_clients = DEFAULT_CLIENTS
    # Dealt are units: a row each, or all rows of a patient or a document.
    units, first = np.unique(corpus.units[rest], return_index=True)
    columns = {name: values[rest[first]] for name, values in corpus.columns.items()}
    if spec.name == "file":
        columns[FILE_COLUMN] = _file_clients(corpus, config)[rest[first]]
    strata = corpus.strata[rest[first]]
    parts = partition(strata, columns, spec, num_clients, config.seed, corpus.stratum_names)
    indices = tuple(rest[np.isin(corpus.units[rest], units[index])] for index in parts.indices)
    column = grouping_column(columns, spec)
    if column in corpus.test_columns:
        groups = (corpus.columns[column], corpus.test_columns[column])
    else:  # the test rows do not say where they come from
        groups = (np.zeros(len(corpus.train)), np.zeros(len(corpus.test)))
    test = (corpus.test_strata, groups[1])
    dealt = deal_test((corpus.strata, groups[0]), test, indices, config.seed)
    return Shares(validation, Partition(indices, parts.note, parts.names), dealt)


def _file_clients(corpus: Corpus, config: Config) -> np.ndarray:
    """The client of every train row by the file; a unit's rows have one."""
    clients = read_clients(config.partition.path, len(corpus.train))
    first: dict[int, int] = {}
    for row, unit in enumerate(corpus.units.tolist()):
        if clients[first.setdefault(unit, row)] != clients[row]:
            raise UserError(
                f"partition.path={config.partition.path} gives rows {first[unit]} and {row} to different "
                "clients, and they are of one patient or document: give them to one."
            )
    return clients


def server_only(corpus: Corpus, config: Config) -> Shares:
    """Where every client is a site with data of its own: the server's validation rows alone."""
    return Shares(_set_apart(corpus, config)[1])


def align_rows(corpus: Corpus, config: Config) -> tuple[np.ndarray, np.ndarray]:
    """(rest, the rows for `fedfrozen align`), by the dataset's own seed: no run ever trains on the latter."""
    key = (config.dataset.split_seed, _ALIGN)
    return _split_units(np.arange(len(corpus.train)), corpus, config.dataset.align, key)


def _set_apart(corpus: Corpus, config: Config) -> tuple[np.ndarray, np.ndarray]:
    """(rest, validation), by the dataset's own seed: every run chooses its best round by the same rows."""
    rows, key = align_rows(corpus, config)[0], (config.dataset.split_seed,)
    if corpus.novel is not None:
        rows = rows[corpus.train.labels.numpy()[rows] < len(corpus.classes)]
    return _split_units(rows, corpus, config.dataset.validation, key)


def _split_units(
    rows: np.ndarray, corpus: Corpus, fraction: float, key: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """(train, validation) rows; a unit's rows stay on one side."""
    if not fraction:
        return rows, rows[:0]
    strata = np.zeros(corpus.units.max() + 1, dtype=np.int64)  # of each unit
    strata[corpus.units] = corpus.strata
    _, held = split_validation(np.unique(corpus.units[rows]), strata, fraction, key)
    chosen = np.isin(corpus.units[rows], held)
    return rows[~chosen], rows[chosen]


def client_rows(
    rows: np.ndarray, corpus: Corpus, config: Config, client: str, seed: int | None = None
) -> ClientRows:
    """One client's rows, less those it holds out for its own validation, drawn with the run's or this seed.

    With privacy on it holds none out: whether a row is trained on would depend on the other rows' labels.
    """
    share = config.dataset.client_validation if config.privacy.name == "none" else 0.0
    key = (seed_for(config.seed if seed is None else seed, "client validation", client),)
    train, held = _split_units(rows, corpus, share, key)
    return ClientRows(torch.from_numpy(train), torch.from_numpy(held))


def input_shape(corpus: Corpus, config: Config) -> InputShape:
    if corpus.task != "image":
        return InputShape(
            task=corpus.task,
            classes=corpus.classes,
            vocab_size=corpus.vocab_size,
            max_tokens=config.dataset.max_tokens,
            pad_token_id=corpus.pad_token_id,
        )
    _, channels, height, width = corpus.train.inputs["pixel_values"].shape
    if height != width:
        raise UserError(
            f"The pictures are {height}x{width}, not square: set dataset.image_size to resize them."
        )
    return InputShape(task="image", classes=corpus.classes, channels=channels, image_size=height)


def spec_of(dataset: DatasetConfig, path: str | None) -> DatasetSpec:
    settings = {k: v for k, v in vars(dataset).items() if k not in _NOT_READING}
    settings["path"] = path if path is not None else dataset.path
    for key in ("mean", "std", "keep_classes", "window"):
        settings[key] = None if settings[key] is None else tuple(settings[key])
    return DatasetSpec(**settings)


def _check_bytes_will_do(config: Config) -> None:
    """A pretrained language model knows tokens by number, and bytes would be words it never saw."""
    if config.dataset.kind != "instructions":
        return
    try:
        known = json.loads((Path(str(config.model.path)) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # said better where the model is built
    if isinstance(known, dict) and known.get("vocab_size") != len(ByT5Tokenizer()):
        raise UserError(
            f"{config.model.path} holds no tokenizer, and a language model reads texts by its own alone: put "
            "its tokenizer.json (or tokenizer.model) there."
        )


def tokenizer_of(config: Config) -> PreTrainedTokenizerBase | None:
    """The checkpoint's own; None (bytes) for a model that brings none, or for pictures."""
    source, path = config.model.source, str(config.model.path)
    if config.dataset.kind == "synthetic" and source == "config":
        return word_tokenizer()
    if config.dataset.kind in ("digits", "digit_words", "images") or source not in ("checkpoint", "hub"):
        return None
    # Asked for one that is not there, transformers makes up an empty tokenizer for some architectures.
    if source == "checkpoint" and not any((Path(path) / name).exists() for name in TOKENIZER_FILES):
        _check_bytes_will_do(config)
        return None
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=source == "checkpoint")
    except (OSError, ValueError) as error:
        if source == "checkpoint":
            raise UserError(f"The tokenizer in {path} cannot be read: {error}") from error
        log.info("%s brings no tokenizer: texts would be read as bytes.", path)
        return None
