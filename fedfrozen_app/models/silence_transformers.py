"""Suppress transformers' messages and progress bars."""

import contextlib
from collections.abc import Iterator

from transformers.utils import logging as transformers_logging


@contextlib.contextmanager
def silence_transformers(*, progress: bool = False) -> Iterator[None]:
    """Suppress transformers' messages, and its progress bars unless `progress`."""
    level = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    if bars and not progress:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars and not progress:
            transformers_logging.enable_progress_bar()
