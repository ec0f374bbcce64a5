"""The masked sums for which sites were asked for agreement: `flower/sums.json` in the run's folder.

A site does not agree to a second sum of the same round, or from the same model, over other sites: the
difference could be one site's update. So a repeated round, or one that starts from the model of a round
without a result, has the same sites, even after the server was killed.
"""

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedfrozen_app.core.errors import DAMAGED
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.files.disk import replace_file

log = logging.getLogger(__name__)


@dataclass
class EarlierSums:
    path: Path | None = None  # None: simulated clients, which have no memory of sums
    run: str = ""
    spoilers: set[str] = field(default_factory=set)  # clients that have made a masked round fail
    clip: float | None = None  # of the next masked round, if it adapts; a checkpoint's row has it
    # With noise in the sum: the noise that a round's clients add, from the settings alone.
    owed: Callable[[int], Mapping[str, float]] = lambda number: {}
    _sums: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.path is not None and self.path.exists():
            try:
                found = json.loads(self.path.read_text("utf-8"))
                self._sums = [one for one in found if {"run", "round", "model", "clients"} <= set(one)]
            except DAMAGED as error:
                log.warning("%s cannot be read (%s): it is replaced.", self.path, error)

    def add(self, request: TrainRequest, clients: Sequence[str]) -> None:
        """Record a sum before the sites are asked: one may agree without the server learning of it."""
        if self.path is None:
            return
        self._sums.append(
            {"run": self.run, "round": request.round, "model": request.model, "clients": sorted(clients)}
        )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, json.dumps(self._sums))

    def cohort(
        self, drawn: list[str], request: TrainRequest, present: Collection[str], *, private: bool
    ) -> list[str]:
        """The clients of the request: those drawn, or those of the earlier sum that the sites remember. In a
        private run, sites compare only sums of the same round."""
        known = [one for one in self._sums if self._is_same(one, request, private)]
        if not known:
            return drawn
        earlier = sorted({client for one in known for client in one["clients"]})
        if gone := [client for client in earlier if client not in present]:
            log.warning(
                "Round %d: an earlier sum from this model was over %s. Sites agree to no other, and %s is "
                "not there: start it, or begin another run from another model (seed=).",
                *(request.round, ", ".join(earlier), ", ".join(gone)),
            )
        elif set(earlier) != set(drawn):
            log.info(
                "Round %d: asked of %s, whose sum from this model the sites know.",
                *(request.round, ", ".join(earlier)),
            )
        return [client for client in earlier if client in present]

    def _is_same(self, one: dict[str, Any], request: TrainRequest, private: bool) -> bool:
        if (one["run"], one["round"]) == (self.run, request.round):
            return True
        return not private and one["model"] == request.model
