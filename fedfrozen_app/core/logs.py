"""What a person sees of the logs: our own lines, plainly, and the warnings of others."""

import logging
import sys
import warnings
from typing import Any

from fedfrozen_app.core.formatting import printable, printable_lines


class OneLine(logging.Formatter):
    """Each record as one printable line, whatever its text holds; only tracebacks have more lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return printable_lines(super().formatException(ei))


def prepare_logging() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("flwr").propagate = False  # it has a handler of its own: each line would appear twice
    for name in ("fedfrozen_app", "strategies", "clients"):
        logging.getLogger(name).setLevel(logging.INFO)
    warnings.filterwarnings("ignore", category=FutureWarning)
