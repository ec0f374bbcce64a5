"""Hooks after every round: keep the best model, decide whether to stop, write the row and a checkpoint."""

import logging
import math
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from fedfrozen_app.config import Config
from fedfrozen_app.core.errors import RunFailed
from fedfrozen_app.core.formatting import resume_command
from fedfrozen_app.core.ray_process import simulated
from fedfrozen_app.files import checkpoint, disk
from fedfrozen_app.files.client_segments import ClientSegments
from fedfrozen_app.files.readers import Damaged, check_file
from fedfrozen_app.files.rows import Row, append_row, first_rounds, metric_name, write_rows
from fedfrozen_app.server.base import PlannedFedAvg
from fedfrozen_app.server.state import arrays_to_keep

log = logging.getLogger(__name__)
Outcome = tuple[bool, Row]
BEST = "best.safetensors"
REFUSALS = 2  # rounds in a row
DEAD_WORKER = re.compile(r"ray\.exceptions\.(ActorDied|OutOfMemory)Error")


@dataclass
class BestModel:
    """Keeps the model of the best round on the server's validation rows; stops without improvement.

    The test set is not used here: selecting a round on it would bias the reported result.
    """

    folder: Path
    patience: int | None = None
    best: float = -math.inf
    round: int | None = None
    waited: int = 0
    metadata: dict[str, str] = field(default_factory=dict)

    def after_round(self, strategy: PlannedFedAvg, row: Row) -> Outcome:
        score = row.get(f"val_{metric_name([row])}")
        if score is None or row["round"] == 0:
            return False, {}
        if score > self.best:
            self.best, self.round, self.waited = score, row["round"], 0
            metadata = self.metadata | {"round": str(self.round)}
            disk.replace_tensors(strategy.model, self.folder / BEST, metadata)
            return False, {}
        self.waited += 1
        if self.out_of_patience:
            log.info(
                "No better validation %s in %d evaluations: stopping early.", metric_name([row]), self.waited
            )
        return self.out_of_patience, {}

    @property
    def out_of_patience(self) -> bool:
        return self.patience is not None and self.waited >= self.patience

    def state_dict(self) -> dict[str, Any]:
        best = None if self.round is None else self.best  # JSON has no -inf
        return {"best": best, "round": self.round, "waited": self.waited}

    def resume_from(self, state: dict[str, Any], run: Path) -> None:
        """Continue from a checkpoint of `run`; without a best model if its file is missing."""
        if state["round"] is None:
            return
        try:
            check_file(run / BEST)
        except Damaged as error:
            log.warning("%s, the best model until then, %s: choosing again.", run / BEST, error.what)
            return
        if not disk.same_round(run / BEST, state["round"]):
            log.info("The model of round %d, the best until then, is gone: choosing again.", state["round"])
            return
        if run.resolve() != self.folder.resolve():
            with disk.whole_file(self.folder / BEST) as part:
                shutil.copyfile(run / BEST, part)
        self.best, self.round, self.waited = state["best"], state["round"], state["waited"]


@dataclass
class Checkpoints:
    """Writes a checkpoint every `every` rounds, and after the last round."""

    folder: Path
    config: dict[str, Any]
    overrides: list[str]
    every: int
    keep: int
    num_rounds: int
    best: BestModel
    client_state: Callable[[], dict[str, dict[str, Tensor]]]
    step_state: Callable[[], dict[str, Any]] = dict  # the decision about compiling local steps
    rollback: set[int | None] | None = None  # checkpoints before clients' first rounds; None: not kept
    firsts: dict[str, int] = field(default_factory=dict)  # each client's first round, so far
    segments: ClientSegments | None = None  # storage for the states of very many clients

    @classmethod
    def of(
        cls,
        config: Config,
        resolved_config: dict[str, Any],
        overrides: list[str],
        folder: Path,
        best: BestModel,
        client_state: Callable[[], dict[str, dict[str, Tensor]]],
        step_state: Callable[[], dict[str, Any]] = dict,
        segments: ClientSegments | None = None,
    ) -> "Checkpoints":
        settings = config.checkpoint
        target = folder / "checkpoints"
        return cls(
            target,
            resolved_config,
            overrides,
            settings.every,
            settings.keep,
            config.num_rounds,
            best,
            client_state,
            step_state,
            set() if settings.rollback else None,
            segments=segments,
        )

    def after_round(self, strategy: PlannedFedAvg, row: Row) -> Outcome:
        number = row["round"]
        if self.rollback is not None:
            self._keep_before([*([] if self.firsts else strategy.history), row])
        if not self.every or number == 0 or (number % self.every and number != self.num_rounds):
            return False, {}
        began = time.perf_counter()
        steps, pacing = self.step_state(), strategy.federation.connection.pacing
        state = checkpoint.Checkpoint(
            round=number,
            config=self.config,
            overrides=self.overrides,
            model=strategy.model,
            row=row,
            ledger=strategy.federation.connection.membership.ledger.state_dict(),
            hooks={"best": self.best.state_dict(), "private": strategy.clients_keep(number)}
            | ({"compiling": steps} if steps else {})
            | ({} if pacing is None else {"pacing": pacing.state_dict()}),
            clients=self.client_state(),
            strategy=arrays_to_keep(strategy),
            metadata=self.best.metadata,
            segments={} if self.segments is None else self.segments.named(),
        )
        checkpoint.write(state, self.folder, self.keep, self.rollback or ())
        if self.segments is not None and state.segments:
            left = checkpoint.numbers(self.folder)
            self.segments.keep_for(left, lambda kept: checkpoint.segments_of(self.folder / str(kept)))
        row["seconds"]["checkpoint"] = time.perf_counter() - began
        return False, {}

    def _keep_before(self, rows: list[Row]) -> None:
        """Keep the newest checkpoint before each round that is some client's first."""
        new = {c: first for c, first in first_rounds(rows).items() if c not in self.firsts}
        self.firsts |= new
        assert self.rollback is not None
        self.rollback |= {checkpoint.last_before(self.folder, first) for first in new.values()}


@dataclass
class PrivacySpent:
    """Adds the largest ε of all clients so far (not only of this round's) and the protected unit to the row;
    also marks runs that are not private, or audited."""

    unit: str
    seeded: bool
    audited: dict[str, Any] | None = None
    spent: dict[str, float] = field(default_factory=dict)

    def after_round(self, strategy: PlannedFedAvg, row: Row) -> Outcome:
        self.add_rows([row])
        more: Row = {"epsilon_max": max(self.spent.values(), default=0.0), "privacy_unit": self.unit}
        if self.seeded:
            more["private"] = False
        if self.audited is not None:
            more["audited"] = self.audited
        return False, more

    def add_rows(self, rows: list[Row]) -> None:
        for row in rows:
            self.spent.update(row.get("epsilon", {}))


@dataclass
class WorkersAlive:
    """Ends a simulation whose Ray worker has died.

    Flower starts no replacement and keeps sending requests to the dead worker, where they fail at once, so
    that it gets most requests of every later round.
    """

    folder: Path

    def after_round(self, strategy: PlannedFedAvg, row: Row) -> Outcome:
        if simulated() and any(DEAD_WORKER.search(failure) for failure in row.get("failures", ())):
            raise RunFailed(
                f"A worker of Flower's simulation died in round {row['round']} (its machine was lost, or had "
                "no memory left), and Flower starts no other: continue with "
                f"`{resume_command(self.folder)}`; with a larger "
                "runtime.cpus_per_client fewer workers share a machine's memory."
            )
        return False, {}


@dataclass
class SomebodyTakesPart:
    """Ends a run in which no client takes part: all have refused or failed, twice in a row.

    Each such round sends the model to all of them for nothing. One round is not enough: a site's disk may be
    full temporarily. A client that did not answer in time may come back: membership waits for it.
    """

    folder: Path
    refused: Counter[str] = field(default_factory=Counter)

    def after_round(self, strategy: PlannedFedAvg, row: Row) -> Outcome:
        cohort = row.get("clients", [])
        if row.get("clients_ok") or not cohort:
            if self.refused:
                self.refused -= Counter(dict.fromkeys(cohort, REFUSALS))
            return False, {}
        late = {client for client in cohort for text in row["failures"] if _is_late(text, client)}
        self.refused.update(set(cohort) - late)
        everybody = strategy.federation.connection.membership.names
        more = row["round"] < strategy.num_rounds  # nothing to save after the last round
        if more and everybody and all(self.refused[client] >= REFUSALS for client in everybody):
            reasons = " ".join(dict.fromkeys(row["failures"]))
            raise RunFailed(
                f"No client took part in the last {REFUSALS} rounds: {reasons} When that is fixed, continue "
                f"with `{resume_command(self.folder)}`."
            )
        return False, {}


def _is_late(failure: str, client: str) -> bool:
    return failure.startswith(f"Client {client} ") and "did not answer within" in failure


@dataclass
class MetricsFile:
    """Appends the row to `metrics.jsonl`."""

    path: Path

    def after_round(self, strategy: PlannedFedAvg, row: Row) -> Outcome:
        append_row(self.path, row)
        return False, {}

    def resume_after(self, row: Row, earlier: list[Row]) -> None:
        """Keep the rows up to the checkpoint's round. Its row may be missing; later rounds run again."""
        rows = [old for old in earlier if old["round"] < row["round"]] + [row]
        if lost := sorted({*range(row["round"])} - {old["round"] for old in rows}):
            numbers = ", ".join(map(str, lost))
            log.warning("The rows of rounds %s are lost: sums over rounds leave them out.", numbers)
        write_rows(self.path, rows)


class RoundDisplay(Protocol):
    def update(self, row: Row) -> None: ...


@dataclass
class ShowProgress:
    progress: RoundDisplay

    def after_round(self, strategy: PlannedFedAvg, row: Row) -> Outcome:
        self.progress.update(row)
        return False, {}
