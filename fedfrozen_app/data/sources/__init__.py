"""Reading data sets: a module for each kind of source, and one path from their rows to tensors."""

from fedfrozen_app.data.sources.load import load
from fedfrozen_app.data.sources.rows import BUILT_IN, DatasetSpec

__all__ = ["BUILT_IN", "DatasetSpec", "load"]
