"""The files that an audited client writes, and how `fedfrozen audit` reads them.

    CLIENT/N.safetensors           the N-th round that was paid for

They reveal the noise, so they stay where the client keeps its privacy record.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedfrozen_app.core.errors import DAMAGED, UserError
from fedfrozen_app.files.seal import read_arrays
from fedfrozen_app.privacy.steps import Steps


def record_folder(privacy: Path, client: str) -> Path:
    return privacy / "audit" / client


@dataclass
class AuditTotals:
    """Sums over the steps of one round. The field names are those of the record's file."""

    server_round: int
    claimed: Steps  # what was paid for
    max_grad_norm: float
    steps: int = 0
    units: int = 0  # from which each step samples
    sampled: int = 0
    squares: float = 0.0  # of (sent − recomputed without noise), in units of the noise paid for
    elements: int = 0
    products: float = 0.0  # of these differences with the next step's, in the same units
    pairs: int = 0
    along: float = 0.0  # of the differences with the rows' clipped sums, in units of the bound
    length: float = 0.0  # of the squares of those sums
    repeats: tuple[str, ...] = ()  # the draws that a rebuilt source repeats
    epsilon: float = 0.0  # what the client reported
    delta: float = 0.0
    unit: str = "example"
    masked: bool = False  # `squares` is of the share of noise in the vector that was masked


@dataclass(frozen=True)
class RecordedRound:
    number: int  # of all rounds that the client has paid for
    figures: AuditTotals
    seen: np.ndarray  # (steps, canaries), in units of the bound; NaN where a canary's array did not train
    there: np.ndarray  # (steps, canaries): in the sample
    first: np.ndarray | None  # (elements,): the first step's noise
    made: dict[str, np.ndarray]  # the round's model after the recorded steps


def round_files(folder: Path) -> list[Path]:
    """Oldest first."""
    paths = [path for path in folder.glob("*.safetensors") if path.stem.isdigit()]
    return sorted(paths, key=lambda path: int(path.stem))


def read_rounds(folder: Path) -> list[RecordedRound]:
    return [read_round(path) for path in round_files(folder)]


def read_round(path: Path) -> RecordedRound:
    arrays, metadata = read_arrays(path)
    try:
        figures: dict[str, Any] = json.loads(metadata["figures"])
        figures["claimed"] = Steps(*figures["claimed"])
        figures["repeats"] = tuple(figures["repeats"])
        made = {name[5:]: value for name, value in arrays.items() if name.startswith("made/")}
        return RecordedRound(
            int(path.stem), AuditTotals(**figures), arrays["seen"], arrays["there"], arrays.get("first"), made
        )
    except DAMAGED as error:
        raise UserError(f"{path} is no record of an audited round: bring it back from a copy.") from error
