"""What a site keeps on its own disk, by run and round: private arrays, its last replies, and what is spent.

    STATE/budget.json               what each private run may cost and which of its rounds were answered
    STATE/RUN/proposal.json         what was accepted: every order of the run is held against it
    STATE/RUN/ROUND/private.safetensors   what the site kept for itself after that round
    STATE/RUN/ROUND/reply.safetensors     what it sent, and reply.json: to which order, with which figures

A resumed run asks for a round again. The site then sends the very reply that it sent before: no work is done
twice, no private array moves twice, no noise is drawn twice. RUN is our own id and survives Flower's runs.
"""

import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedfrozen_app.errors import UserError
from fedfrozen_app.exchange.messages import Reply
from fedfrozen_app.exchange.proposal import Proposal, read_proposal
from fedfrozen_app.files.disk import flush, fresh_folder, patient, replace_file, save_tensors
from fedfrozen_app.files.seal import DAMAGED, sealed, unsealed
from fedfrozen_app.sites.audit_log import FIRST, AuditLog

UPDATES = 2  # for each round of a run: one that is resumed may ask for a round anew, from another model


@dataclass(frozen=True)
class RunStore:
    folder: Path
    keep: int  # rounds; as many as a resumed run may go back

    def proposal(self) -> Proposal | None:
        """What this run was accepted as; None where it was not."""
        path = self.folder / "proposal.json"
        return read_proposal(path.read_text("utf-8")) if path.exists() else None

    @patient
    def accept(self, proposal: Proposal) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_file(self.folder / "proposal.json", proposal.text)

    def rounds(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdigit())

    def reply_to(self, server_round: int, order: str) -> Reply | None:
        """What was sent for this very order, if it was."""
        folder = self.folder / str(server_round)
        try:
            record = unsealed(folder / "reply.json")
            if record["order"] != order:
                return None
            arrays = load_file(folder / "reply.safetensors") if record["names"] else {}
            arrays = {name: arrays[name] for name in record["names"]}
            return Reply(order, int(record["examples"]), arrays, dict(record["metrics"]))
        except (SafetensorError, *DAMAGED):
            return None  # not there, or damaged: as if it had not been kept

    def private_before(self, server_round: int) -> dict[str, Tensor] | None:
        """What the site kept after its newest round before this one."""
        for number in reversed([number for number in self.rounds() if number < server_round]):
            path = self.folder / str(number) / "private.safetensors"
            if path.exists():
                try:
                    unsealed(path.with_name("reply.json"))
                    return load_file(path)
                except (SafetensorError, *DAMAGED) as error:
                    raise UserError(
                        f"The private state {path} is damaged: bring it back or remove it."
                    ) from error
        return None

    @patient
    def write(self, server_round: int, reply: Reply, private: Mapping[str, Tensor]) -> None:
        """Whole or not at all. Later rounds belong to a future that a resumed run has given up."""
        part = self.folder / f".{server_round}.part"
        with fresh_folder(part):
            if private:
                save_tensors(private, part / "private.safetensors")
            if reply.arrays:
                save_tensors(reply.arrays, part / "reply.safetensors")
            record = {
                "order": reply.order,
                "names": list(reply.arrays),
                "examples": reply.examples,
                "metrics": reply.metrics,
            }
            (part / "reply.json").write_text(sealed(record, *sorted(part.iterdir())))
            for path in part.iterdir():
                flush(path)
        for number in self.rounds():
            if number >= server_round:
                shutil.rmtree(self.folder / str(number))
        part.rename(self.folder / str(server_round))
        flush(self.folder)
        for number in self.rounds()[: -self.keep]:
            shutil.rmtree(self.folder / str(number))


UNNAMED_DELTA = 1e-5  # of a run in a record that knew of no delta


@dataclass(frozen=True)
class Price:
    """What a private run may cost, and whom that protects."""

    epsilon: float
    delta: float
    unit: str
    proposal: str  # hash

    @classmethod
    def of(cls, proposal: Proposal, unit: str) -> "Price | None":
        """None where the run promises nothing."""
        epsilon = proposal.epsilon
        return None if epsilon is None else cls(epsilon, proposal.delta, unit, proposal.hash)


@dataclass
class Budget:
    """Epsilon and delta over all runs. A run is charged in full when it begins; each of its rounds is
    answered once. By basic composition both add up: no run's noise is taken to help another's."""

    path: Path

    def problem(self, run: str, price: Price, max_epsilon: float, max_delta: float) -> str | None:
        """Why the run may not begin or go on; nothing is written."""
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

    def problem_of_round(self, run: str, server_round: int, order: str) -> str | None:
        done = self._read().get(run, {"rounds": {}})["rounds"].get(str(server_round))
        return (
            None
            if done in (None, order)
            else f"round {server_round} of this private run was answered already"
        )

    def rounds(self, run: str) -> int:
        """How many rounds of this private run were answered."""
        return len(self._read().get(run, {"rounds": {}})["rounds"])

    @patient
    def charge(self, run: str, price: Price, server_round: int, order: str, head: str) -> None:
        """`head`: the audit log's last digest now, which the log must still hold when the site starts."""
        runs = self._read()
        entry = runs.setdefault(run, {**asdict(price), "rounds": {}})
        entry["rounds"][str(server_round)] = order
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

    def check(self, log: AuditLog) -> None:
        """A `UserError` where this record and the audit log contradict each other: one of them was lost."""
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
        """A damaged file ends all work: what it held cannot be guessed."""
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
