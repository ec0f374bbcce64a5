"""Data sets whose rows are tensors already: a reader with a method `corpus` gives them whole."""

from typing import Any

from fedfrozen_app.core import registry
from fedfrozen_app.data.sources.load import check_spec, log_sizes
from fedfrozen_app.data.sources.raw_rows import DatasetSpec
from fedfrozen_app.data.table import Corpus


def read_ready(spec: DatasetSpec, classes: tuple[str, ...] | None = None) -> Corpus | None:
    """None for all other readers; `classes` as for `load`."""
    reader: Any = registry.find("datasets", spec.kind)
    if not hasattr(reader, "corpus"):
        return None
    check_spec(spec, reader)
    corpus: Corpus = reader.corpus(spec, classes)
    rows = len(corpus.train), len(corpus.test)
    log_sizes(spec, rows, f"{len(corpus.classes)} classes", corpus.train.inputs)
    return corpus
