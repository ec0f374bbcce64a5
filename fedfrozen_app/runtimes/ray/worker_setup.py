"""What a Ray worker is sent before it loads anything. Nothing heavy is imported here."""

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
    parts: int  # into how many a round is divided
    gpus: float  # of the worker: below 1, it shares the GPU with others
    environment: dict[str, str]
