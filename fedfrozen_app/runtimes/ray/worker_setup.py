"""The setup sent to a Ray worker before it loads anything. Imports nothing heavy."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedfrozen_app.config import Config


@dataclass(frozen=True)
class RunSetup:
    """What a worker needs to take part in a run."""

    config: "Config"
    clients: int
    settings: dict[str, str]  # of the clients' Flower contexts
    parts: int  # number of parts of a round
    gpus: float  # of the worker: below 1, it shares the GPU with others
    environment: dict[str, str]
