"""A Ray actor that holds data and model for a whole run.

Nothing heavy is imported here: an actor reports its placement at once, and then loads model and data.
"""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedfrozen_app.runtimes.ray.packing import Packed
    from fedfrozen_app.runtimes.ray.part import PartOrder, PartReply
    from fedfrozen_app.runtimes.ray.worker_setup import RunSetup


@dataclass(frozen=True)
class Place:
    process: int
    host: str


@dataclass(frozen=True)
class Ready:
    """A worker's report after loading model and data, or why it cannot take part."""

    device: str = ""
    data: str = ""  # digest of the clients' data
    user_error: str = ""


class TrainingActor:
    """The process of one worker. It returns user errors as sentences: Ray would wrap them into a
    traceback."""

    def __init__(self) -> None:
        self._trainer: Any = None

    def place(self) -> Place:
        return Place(os.getpid(), os.uname().nodename)

    def load(self, setup: "RunSetup") -> Ready:
        from fedfrozen_app.core.errors import RunFailed, UserError
        from fedfrozen_app.runtimes.ray.load_worker import data_digest, load_trainer

        os.environ.update(setup.environment)
        try:
            self._trainer = load_trainer(setup)
        except (UserError, RunFailed) as error:
            return Ready(user_error=str(error))
        worker = self._trainer.worker
        return Ready(str(worker.device), data_digest(worker))

    def train(self, order: "PartOrder", common: "Packed") -> "PartReply":
        """`common`: arrays, by digest, that other parts need too."""
        reply: PartReply = self._trainer.train(order, common)
        return reply
