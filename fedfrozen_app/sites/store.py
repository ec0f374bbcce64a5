"""What a site keeps on its own disk, by run and round: private arrays, its last replies, and spent epsilon.

    STATE/budget.json               what each private run may cost and which of its rounds were answered
    STATE/RUN/card.json             how the run reads its data, as its hello told
    STATE/RUN/ROUND/private.safetensors   what the site kept for itself after that round
    STATE/RUN/ROUND/reply.safetensors     what it sent, and reply.json: to which order, with which figures

A resumed run asks for a round again. The site then sends the very reply that it sent before: no work is done
twice, no private array moves twice, no noise is drawn twice. RUN is our own id and survives Flower's runs.
"""

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedfrozen_app.errors import UserError
from fedfrozen_app.exchange.messages import Reply
from fedfrozen_app.files.disk import flush, fresh_folder, replace_file, save_tensors
from fedfrozen_app.files.seal import DAMAGED, sealed, unsealed


@dataclass(frozen=True)
class RunStore:
    folder: Path
    keep: int  # rounds; as many as a resumed run may go back

    def card(self) -> str | None:
        path = self.folder / "card.json"
        return path.read_text("utf-8") if path.exists() else None

    def keep_card(self, text: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_file(self.folder / "card.json", text)

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


@dataclass
class Budget:
    """Epsilon over all runs. A run is charged in full when it begins; each of its rounds is answered once."""

    path: Path

    def problem(self, run: str, epsilon: float, overrides: str, limit: float) -> str | None:
        """Why the run may not begin or go on; nothing is written."""
        runs = self._read()
        if run in runs:
            same = runs[run]["overrides"] == _digest(overrides) and runs[run]["epsilon"] == epsilon
            return None if same else "a private run of this name began with other settings"
        spent = sum(entry["epsilon"] for entry in runs.values())
        left = round(limit - spent, 9)  # 0.1 + 0.1 + 0.1 is more than 0.3 in floating point
        if epsilon > left:
            return f"the run asks for epsilon {epsilon:g}, and {max(0.0, left):g} is left"
        return None

    def problem_of_round(self, run: str, server_round: int, order: str) -> str | None:
        done = self._read().get(run, {"rounds": {}})["rounds"].get(str(server_round))
        return (
            None
            if done in (None, order)
            else f"round {server_round} of this private run was answered already"
        )

    def charge(self, run: str, epsilon: float, overrides: str, server_round: int, order: str) -> None:
        runs = self._read()
        entry = runs.setdefault(run, {"epsilon": epsilon, "overrides": _digest(overrides), "rounds": {}})
        entry["rounds"][str(server_round)] = order
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, sealed({"runs": runs}))
        flush(self.path.parent)

    def spent(self) -> float:
        return sum(entry["epsilon"] for entry in self._read().values())

    def _read(self) -> dict[str, dict[str, Any]]:
        """A damaged file ends all work: what it held cannot be guessed."""
        if not self.path.exists():
            return {}
        try:
            return unsealed(self.path)["runs"]
        except DAMAGED as error:
            raise UserError(
                f"{self.path}, the record of spent epsilon, is damaged: bring it back from a backup. "
                "Without it this site answers nothing."
            ) from error


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
