"""One corpus as a federation sees it: what the server keeps, and which rows each client has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfrozen_app.config import DEFAULT_CLIENTS, Config, DatasetConfig
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.seeds import seed_for
from fedfrozen_app.data.augment import check_pictures
from fedfrozen_app.data.client_splits import deal_test, split_validation
from fedfrozen_app.data.partition import partition
from fedfrozen_app.data.partition_columns import FILE_COLUMN, grouping_column
from fedfrozen_app.data.partition_file import read_clients
from fedfrozen_app.data.partition_spec import DRAWN, Partition, PartitionSpec, spread
from fedfrozen_app.data.preprocessing import check_noise, preprocessing_from
from fedfrozen_app.data.row_lists import RowLists, distinct, row_lists
from fedfrozen_app.data.sources import DatasetSpec, Prepared, decode, prepare, read_ready, undecoded
from fedfrozen_app.data.table import Corpus, InputShape, Novel, TextReading
from fedfrozen_app.data.text_reading import USUAL, choose_reading, texts_of, tokenizer_for
from fedfrozen_app.tasks.target import NOTHING

# What is done with rows once read.
_NOT_READING = (
    *("validation", "client_validation", "align", "novel", "subgroups", "subgroup_floor", "augment"),
    *("tokenizer", "tokenizer_text", "vocab_size", "long_texts", "max_chunks"),  # see text_reading.py
)
_ALIGN = 1
KEPT = 20_000_000  # characters of texts that stay in memory beside their tokens


@dataclass(frozen=True)
class ClientRows:
    """Row numbers of the training table."""

    train: Tensor
    validation: Tensor


@dataclass(frozen=True)
class Shares:
    """Which rows of the training table belong to whom: the server for validation, and each client.

    Without a partition the clients have their data elsewhere, or this is one of them and has all rows.
    """

    validation: np.ndarray
    partition: Partition | None = None
    test: Sequence[np.ndarray] = ()  # rows of the test table by client, in its train rows' proportions

    def test_clients(self, rows: int, nobody: str) -> np.ndarray:
        """The name of each test row's client, or `nobody`."""
        found = np.full(rows, nobody, dtype=object)
        if self.partition is not None and len(self.test):
            names, dealt = np.array(list(self.partition.names), dtype=object), row_lists(self.test)
            found[dealt.rows] = names[dealt.owner_of_each]
        return found


def load_corpus(
    config: Config,
    path: str | None = None,
    classes: tuple[str, ...] | None = None,
    *,
    site: bool = False,
    reading: TextReading | None = None,
    data_spec: Mapping[str, Any] = NOTHING,
) -> Corpus:
    """The run's corpus; a site passes its own path, the federation's class order, and how it reads texts; a
    table's columns and the target's settings are in `data_spec`.

    With privacy on a site draws no rows of its own: one row more would then change which others are trained
    on, and epsilon is about one row alone.
    """
    dataset = dataset_of(config)
    if site and config.privacy.name != "none":
        if dataset.limit is not None:
            raise UserError(
                "dataset.limit draws from a site's rows, which privacy=dp_sgd does not cover: leave it out."
            )
        dataset = replace(dataset, test_fraction=0.0)
    is_server = config.runtime.name == "deployed" and classes is None
    if is_server:
        dataset = replace(dataset, test_fraction=0.0)
    spec = spec_of(dataset, path, config)
    if config.privacy.name != "none" and not site and spec.statistics is not None:
        check_noise(spec.statistics)
    if (ready := read_ready(spec, classes)) is not None:
        return _checked(ready, config, classes)
    agreed = None if classes is None else data_spec.get("target", NOTHING)
    rows = prepare(spec, classes, agreed)
    if rows.reads == "texts":
        if classes is None:
            reading = choose_reading(config, server_texts(rows, config), rows.task)
        reading = reading or TextReading(dataset.max_tokens or USUAL)  # an older server decided nothing
        spec = replace(spec, max_tokens=reading.max_tokens, chunks=reading.chunks)
    columns = preprocessing_from(data_spec["table"]) if "table" in data_spec else None
    tokenizer = tokenizer_for(config, reading) if rows.reads == "texts" else None
    corpus = decode(rows, spec, tokenizer, classes, columns)
    kept = rows if classes is None and rows.reads == "texts" and rows.characters <= KEPT else None
    corpus = replace(corpus, reading=reading, rows=kept)
    if is_server and not len(corpus.test):
        corpus = _all_rows_as_test(corpus, config)
    return _checked(corpus, config, classes)


def _checked(corpus: Corpus, config: Config, classes: tuple[str, ...] | None) -> Corpus:
    """The same with novel classes held back; a `UserError` where a run could not use it."""
    dataset = config.dataset
    if dataset.novel:
        corpus = hold_back(corpus, dataset.novel, deployed=config.runtime.name == "deployed")
    check_pictures(corpus, dataset.augment)
    if classes is None and not len(corpus.test):  # a site is evaluated on the server's rows
        raise UserError(
            "There are no test rows, and none could be held out: no class has two rows (or two documents or "
            "patients, which are never split). Name a test split with dataset.test_split, or use more data."
        )
    return corpus


def server_texts(rows: Prepared, config: Config) -> list[str]:
    """Of the server's validation rows: the texts that are its own in every runtime."""
    own = _set_apart(undecoded(rows, config.dataset.name), config)[1]
    return texts_of([rows.train.content[row] for row in own], rows.task)


def hold_back(corpus: Corpus, share: float, *, deployed: bool) -> Corpus:
    """Of the classes in their order, the last ones become novel: their train rows go to no client."""
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


def _all_rows_as_test(corpus: Corpus, config: Config) -> Corpus:
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
    # Units are dealt: a row each, or all rows of a patient or a document.
    units, first, places = distinct(corpus.units[rest])
    columns = {name: values[rest[first]] for name, values in corpus.columns.items()}
    if spec.name == "file":
        columns[FILE_COLUMN] = _file_clients(corpus, config)[rest[first]]
    strata = corpus.strata[rest[first]]
    parts = partition(strata, columns, spec, num_clients, config.seed, corpus.stratum_names)
    indices = RowLists.of_owners(parts.indices.owners(len(units))[places], len(parts.indices), rest)
    note = parts.note
    if len(units) < len(rest):
        note = note.replace(" examples", " documents or patients").removesuffix(".")
        note += f" ({spread(indices)} examples)."
    column = grouping_column(columns, spec)
    if column in corpus.test_columns:
        groups = (corpus.columns[column], corpus.test_columns[column])
    else:  # the test rows have no such column
        groups = (np.zeros(len(corpus.train)), np.zeros(len(corpus.test)))
    test = (corpus.test_strata, groups[1])
    dealt = deal_test((corpus.strata, groups[0]), test, indices, config.seed)
    return Shares(validation, Partition(indices, note, parts.names), dealt)


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
    _, held = split_validation(np.unique(corpus.units[rows]), corpus.unit_strata, fraction, key)
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
    if (table := corpus.preprocessing) is not None:
        return InputShape(
            *(corpus.task, corpus.classes),
            numbers=table.numbers,
            levels=table.levels,
            settings=corpus.settings,
        )
    pictures = corpus.train.inputs.get("pixel_values")
    if pictures is None:
        return InputShape(
            task=corpus.task,
            classes=corpus.classes,
            vocab_size=corpus.vocab_size,
            max_tokens=corpus.reading.max_tokens if corpus.reading else USUAL,
            pad_token_id=corpus.pad_token_id,
        )
    _, channels, height, width = pictures.shape
    if height != width:
        raise UserError(
            f"The pictures are {height}x{width}, not square: set dataset.image_size to resize them."
        )
    return InputShape(
        *(corpus.task, corpus.classes), channels=channels, image_size=height, settings=corpus.settings
    )


def dataset_of(config: Config) -> DatasetConfig:
    """The settings by which the rows are read. Epsilon per document counts whole files where they mark none:
    a sentence is no document."""
    by_document = config.privacy.name != "none" and config.privacy.unit == "document"
    return replace(config.dataset, unmarked="files") if by_document else config.dataset


def spec_of(dataset: DatasetConfig, path: str | None, config: Config | None = None) -> DatasetSpec:
    """`config`: of the run, which may use columns of a table for other purposes than to predict from them."""
    settings = {k: v for k, v in vars(dataset).items() if k not in _NOT_READING}
    settings["max_tokens"] = dataset.max_tokens or USUAL
    settings["path"] = path if path is not None else dataset.path
    if config is not None and dataset.kind == "table":
        others = (config.partition.column, config.privacy.unit_column)
        settings["not_columns"] = tuple(name for name in others if name is not None)
    for key in ("mean", "std", "keep_classes", "window", "columns", "categorical", "time_edges"):
        settings[key] = None if settings[key] is None else tuple(settings[key])
    return DatasetSpec(**settings)
