"""Texts that a language model wrote before and after training: from samples.json."""

import json
import logging
from pathlib import Path
from typing import Any

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.files.readers import read_checked

log = logging.getLogger(__name__)

FILE = "samples.json"
LINES = {"prompt": "prompt", "answer": "the data's answer", "before": "before training", "after": "after"}


def read_samples(run: Path) -> list[dict[str, Any]]:
    """Read samples.json; empty if the model writes no text, or the file is damaged (logged)."""
    try:
        found = json.loads(checked.content) if (checked := read_checked(run / FILE)) is not None else []
    except (UserError, ValueError, RecursionError) as error:
        log.warning("The samples are left out: %s", error)
        return []
    return found if isinstance(found, list) and all(isinstance(one, dict) for one in found) else []


def sample_lines(sample: dict[str, Any]) -> list[tuple[str, str]]:
    return [(title, str(sample[key])) for key, title in LINES.items() if key in sample]
