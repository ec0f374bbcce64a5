"""Reading data sets: a module for each kind of source, and one path from their rows to tensors."""

from fedfrozen_app.data.sources.load import Prepared, decode, load, needs_path, prepare, read, undecoded
from fedfrozen_app.data.sources.raw_rows import DatasetSpec
from fedfrozen_app.data.sources.ready import read_ready

__all__ = [
    "DatasetSpec",
    "Prepared",
    "decode",
    "load",
    "needs_path",
    "prepare",
    "read",
    "read_ready",
    "undecoded",
]
