"""Logging: our own lines, and the warnings of other packages.

With FEDFROZEN_LOG=json each line is an object for a log collector, with its site, run and round. It contains
an exception's type and place, but not its text, which may quote a row.
"""

import datetime
import json
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import printable, printable_lines

VARIABLE, JSON = "FEDFROZEN_LOG", "json"
ABOUT = ("site", "run", "round")  # in every line, null if it does not apply
OURS = ("fedfrozen_app", "strategies", "clients")
SERVERS = ("flwr", "uvicorn", "uvicorn.error", "uvicorn.access")  # loggers with handlers of their own
HIDDEN = "[hidden]"
KEY = "[A-Z ]*PRIVATE KEY-----"
PRIVATE_KEY = re.compile(rf"-----BEGIN {KEY}.*?(-----END {KEY}|\Z)", re.DOTALL)
PASSWORD = re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")  # of an address, such as a database's
SHORTEST = 8  # characters of a secret: hiding shorter words would hide other texts

_process: dict[str, Any] = {}
_task: ContextVar[dict[str, Any] | None] = ContextVar("what lines are about", default=None)
_secrets: set[str] = set()


# Context of lines ---------------------------------------------------------------------------------------


def logs_of(**fields: str | int | None) -> None:
    """Set the site, run or round of all later lines of this process."""
    _process.update(fields)


@contextmanager
def about(**fields: str | int | None) -> Iterator[None]:
    """Set them for the lines of the block, in this thread."""
    token = _task.set({**(_task.get() or {}), **fields})
    try:
        yield
    finally:
        _task.reset(token)


def learn(**fields: str | int | None) -> None:
    """Set them for the surrounding block, when they become known."""
    if (known := _task.get()) is not None:
        known.update(fields)


def hide(secret: str | bytes | None) -> None:
    """Remove this secret from all lines."""
    text = secret.decode("utf-8", "replace") if isinstance(secret, bytes) else secret or ""
    if len(text) >= SHORTEST:
        _secrets.add(text)


def without_secrets(text: str) -> str:
    text = PASSWORD.sub(HIDDEN, PRIVATE_KEY.sub(HIDDEN, text))
    for secret in _secrets:
        text = text.replace(secret, HIDDEN)
    return text


# Formats ----------------------------------------------------------------------------------------------------


class OneLine(logging.Formatter):
    """Each record as one printable line, whatever its text holds; only tracebacks have more lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(without_secrets(super().formatMessage(record)))

    def formatException(self, ei: Any) -> str:
        return printable_lines(without_secrets(super().formatException(ei)))


class JsonLine(logging.Formatter):
    """Each record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        known = {**_process, **(_task.get() or {})}
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            **{key: known.get(key) for key in ABOUT},
            "message": printable(without_secrets(record.getMessage())),
        }
        if record.exc_info and record.exc_info[1] is not None:
            line |= _of_error(record.exc_info[1])
        return json.dumps(line)


def _of_error(error: BaseException) -> dict[str, Any]:
    """Kind and places of an exception and of its causes: its text may quote a row."""
    kinds, places = [], []
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        kinds.append(type(one).__name__)
        places += [
            f"{os.path.basename(place.filename)}:{place.lineno} {place.name}"  # noqa: PTH119
            for place in traceback.extract_tb(one.__traceback__)
        ]
        one = one.__cause__ or one.__context__
    return {"error": kinds, "stack": places}


# Handlers ---------------------------------------------------------------------------------------------------


def wants_json() -> bool:
    """Whether logs are JSON; `UserError` for an unknown format."""
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "text", JSON):
        raise UserError(f"{VARIABLE}={asked} is no format of the logs: set it to text, or to json.")
    return asked == JSON


def prepare_logging() -> None:
    """Set up handlers; call it again after importing Flower, which adds its own."""
    as_json = wants_json()
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLine() if as_json else OneLine())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("flwr").propagate = False  # it has a handler of its own: each line would appear twice
    if as_json:
        _take_lines_of_others()
    for name in OURS:
        logging.getLogger(name).setLevel(logging.INFO)
    warnings.filterwarnings("ignore", category=FutureWarning)


def _take_lines_of_others() -> None:
    handlers = [one for one in logging.root.handlers if isinstance(one.formatter, JsonLine)]
    for name in SERVERS:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = list(handlers), False
    logging.captureWarnings(True)


def uvicorn_config(usual: dict[str, Any] | None) -> dict[str, Any] | None:
    """uvicorn's log configuration: none if `prepare_logging` has set it up."""
    return None if wants_json() else usual
