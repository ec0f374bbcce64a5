"""`STATE/budget.json`: the price of each private run, and which of its rounds were answered."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedfrozen_app.core.errors import DAMAGED, UserError
from fedfrozen_app.exchange.proposal import Proposal
from fedfrozen_app.files.disk import flush, patient, replace_file
from fedfrozen_app.files.seal import sealed, unsealed
from fedfrozen_app.sites.audit_log import FIRST, AuditLog

UNNAMED_DELTA = 1e-5  # of a run in an older record without delta


@dataclass(frozen=True)
class Price:
    """What a private run may cost, per unit of privacy."""

    epsilon: float
    delta: float
    unit: str
    proposal: str  # hash

    @classmethod
    def of(cls, proposal: Proposal, unit: str) -> "Price | None":
        """None if the run is not private."""
        epsilon = proposal.epsilon
        return None if epsilon is None else cls(epsilon, proposal.delta, unit, proposal.hash)


@dataclass
class SiteBudget:
    """Epsilon and delta over all runs. A run is charged in full before its first private step, and belongs to
    one proposal from then on; each of its rounds is answered once. Runs add up by basic composition."""

    path: Path

    def problem(self, run: str, price: Price, max_epsilon: float, max_delta: float) -> str | None:
        """Why the run may not begin or continue; nothing is written."""
        runs = self._read()
        if run in runs:
            same = runs[run].get("proposal") == price.proposal
            return None if same else "a private run of this name began with other settings"
        others = {unit for entry in runs.values() if (unit := entry.get("unit", price.unit)) != price.unit}
        if others:
            return (
                f"its budget is spent per {sorted(others)[0]}, which does not add up with epsilon per "
                f"{price.unit}"
            )
        for what, asked, spent, limit in (
            ("epsilon", price.epsilon, self.spent()[0], max_epsilon),
            ("delta", price.delta, self.spent()[1], max_delta),
        ):
            if spent + asked > limit * (1 + 1e-9):  # 0.1 + 0.1 + 0.1 is more than 0.3 in floating point
                left = max(0.0, limit - spent)
                return f"the run asks for {what} {asked:g}, and {round(left, 12):g} is left"
        return None

    def problem_of_round(self, run: str, server_round: int, request: str) -> str | None:
        done = self._read().get(run, {"rounds": {}})["rounds"].get(str(server_round))
        return (
            None
            if done in (None, request)
            else f"round {server_round} of this private run was answered already"
        )

    def rounds(self, run: str) -> frozenset[int]:
        """Rounds of this private run whose reply may have left: a round is charged before its reply is
        stored."""
        return frozenset(map(int, self._read().get(run, {"rounds": {}})["rounds"]))

    def proposal_of(self, run: str) -> str | None:
        """The hash of the proposal that this private run was charged for."""
        return self._read().get(run, {}).get("proposal")

    def runs_of(self, proposal: str) -> list[str]:
        """The entries charged for the proposal with this hash, oldest first."""
        return [run for run, entry in self._read().items() if entry.get("proposal") == proposal]

    def is_charged(self, run: str, price: Price) -> bool:
        """Whether this run is in the record, for this proposal."""
        return self.proposal_of(run) == price.proposal

    def is_round_charged(self, run: str, price: Price, server_round: int, request: str) -> bool:
        return self.is_charged(run, price) and self._read()[run]["rounds"].get(str(server_round)) == request

    def begin(self, run: str, price: Price, head: str) -> None:
        """Charge the run, before any of its rounds is answered. `head`: see `charge`."""
        self._write(run, price, {}, head)

    def charge(self, run: str, price: Price, server_round: int, request: str, head: str) -> None:
        """Charge a round. `head`: the audit log's last digest, which `check` looks for in the log."""
        self._write(run, price, {str(server_round): request}, head)

    @patient
    def _write(self, run: str, price: Price, rounds: Mapping[str, str], head: str) -> None:
        runs = self._read()
        entry = runs.setdefault(run, {**asdict(price), "rounds": {}})
        if entry.get("proposal") != price.proposal:  # `problem` has refused it before
            raise ValueError("a private run of this name began with other settings")
        entry["rounds"] |= rounds
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, sealed({"runs": runs, "log": head}))
        flush(self.path.parent)

    def spent(self) -> tuple[float, float]:
        """(epsilon, delta) of all runs."""
        runs = self._read().values()
        return (
            math.fsum(entry["epsilon"] for entry in runs),
            math.fsum(entry.get("delta", UNNAMED_DELTA) for entry in runs),
        )

    def charged(self) -> dict[str, dict[str, Any]]:
        """What each run was charged, oldest first."""
        return self._read()

    def check(self, log: AuditLog) -> None:
        """`UserError` if this record and the audit log contradict each other: one of them was lost."""
        record = self._record()
        for run, rounds in log.spending.items():
            known = record["runs"].get(run, {"rounds": {}})["rounds"]
            lost = [number for number in rounds if number not in known]
            if lost:
                raise UserError(
                    f"{self.path}, the record of spent epsilon, does not know round {lost[0]} of the run "
                    f"{run}, which {log.path} says was sent: bring it back from a backup. Until then this "
                    "site answers nothing."
                )
        if not log.holds(record.get("log", FIRST)):
            raise UserError(
                f"{log.path} lacks what it held when {self.path} was written: it was shortened or replaced. "
                "Bring it back from a backup. Until then this site answers nothing."
            )

    def _read(self) -> dict[str, dict[str, Any]]:
        return self._record()["runs"]

    def _record(self) -> dict[str, Any]:
        """`UserError` if the file is damaged: without it the site answers nothing."""
        if not self.path.exists():
            return {"runs": {}}
        try:
            found = unsealed(self.path)
            return {**found, "runs": found["runs"]}
        except DAMAGED as error:
            raise UserError(
                f"{self.path}, the record of spent epsilon, is damaged: bring it back from a backup. "
                "Without it this site answers nothing."
            ) from error
