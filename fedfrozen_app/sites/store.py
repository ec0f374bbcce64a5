"""A run's state on the site's disk: the accepted proposal, private arrays and the last replies.

    STATE/RUN/proposal.json              the accepted proposal: every request of the run is checked against it
    STATE/RUN/HASH/proposal.json         the proposal with this hash, to which this folder belongs
    STATE/RUN/HASH/ROUND/private.safetensors   what the site kept for itself after that round
    STATE/RUN/HASH/ROUND/HASH.safetensors      a reply, and HASH.json: to which request, with which metrics
    STATE/RUN/HASH/privacy/              the client's own record of a private run

A resumed run repeats a round. The site then sends the same reply again: it trains once, moves its private
arrays once and draws noise once. RUN is fedfrozen's own id, which outlives Flower's runs.

What is kept belongs to one proposal: no other proposal of the run finds it. The one exception is a run that
is resumed with more rounds: its proposal differs from the earlier one in that and nothing else, and it
inherits the private arrays. A reply is written after its noise was added and its epsilon charged, and holds
nothing that may not be sent. Masks are not part of it: they belong to one session, and a resumed round has
another. `store_migration` moves what earlier versions wrote.
"""

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedfrozen_app.core.errors import DAMAGED, UserError
from fedfrozen_app.exchange.messages import Reply
from fedfrozen_app.exchange.proposal import Proposal, read_proposal
from fedfrozen_app.files.disk import flush, fresh_folder, patient, replace_file, save_tensors
from fedfrozen_app.files.seal import sealed, unsealed

UPDATES = 2  # per round of a run: a resumed run may repeat a round from another model


@dataclass(frozen=True)
class RunStore:
    folder: Path
    keep: int  # rounds that a resumed run may go back

    def proposal(self) -> Proposal | None:
        """The accepted proposal of this run; None if there is none."""
        path = self.folder / "proposal.json"
        return read_proposal(path.read_text("utf-8")) if path.exists() else None

    @patient
    def accept(self, proposal: Proposal) -> None:
        own = self.of(proposal.hash)
        own.mkdir(parents=True, exist_ok=True)
        replace_file(own / "proposal.json", proposal.text)
        replace_file(self.folder / "proposal.json", proposal.text)

    def of(self, proposal: str) -> Path:
        """The folder of all that belongs to the proposal with this hash."""
        return self.folder / proposal

    def rounds(self, proposal: str) -> list[int]:
        folder = self.of(proposal)
        if not folder.is_dir():
            return []
        return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())

    def reply_to(self, proposal: str, server_round: int, request: str) -> Reply | None:
        """The stored reply to this request of the proposal with this hash, if there is one."""
        path = self.of(proposal) / str(server_round) / f"{proposal}.json"
        try:
            record = unsealed(path)
            if record["order"] != request:
                return None
            arrays = load_file(path.with_suffix(".safetensors")) if record["names"] else {}
            arrays = {name: arrays[name] for name in record["names"]}
            return Reply(request, int(record["examples"]), arrays, dict(record["metrics"]))
        except (SafetensorError, *DAMAGED):
            return None  # missing or damaged: as if it had not been stored

    def private_for(self, proposal: Proposal, server_round: int) -> dict[str, Tensor] | None:
        """The private arrays after the newest round before this one, of this proposal or of the one that it
        continues."""
        own = self.private_before(proposal.hash, server_round)
        if own is not None:
            return own
        found = [
            (number, earlier)
            for earlier in self._continued_by(proposal)
            for number in self.rounds(earlier)
            if number < server_round
        ]
        return self.private_before(max(found)[1], server_round) if found else None

    def private_before(self, proposal: str, server_round: int) -> dict[str, Tensor] | None:
        """The private arrays after the newest round before this one, of the proposal with this hash."""
        for number in reversed([number for number in self.rounds(proposal) if number < server_round]):
            path = self.of(proposal) / str(number) / "private.safetensors"
            if path.exists():
                try:
                    unsealed(path.with_name(f"{proposal}.json"))
                    return load_file(path)
                except (SafetensorError, *DAMAGED) as error:
                    raise UserError(
                        f"The private state {path} is damaged: bring it back or remove it."
                    ) from error
        return None

    def _continued_by(self, proposal: Proposal) -> list[str]:
        """The hashes of earlier proposals that this one continues with more rounds."""
        found = []
        for path in self.folder.glob("*/proposal.json"):
            try:
                earlier = read_proposal(path.read_text("utf-8"))
            except DAMAGED:
                continue
            if earlier.hash == path.parent.name and continues(proposal, earlier):
                found.append(earlier.hash)
        return found

    @patient
    def write(self, proposal: str, server_round: int, reply: Reply, private: Mapping[str, Tensor]) -> None:
        """Store a round, all or nothing. Later rounds are deleted: a resumed run repeats them."""
        folder = self.of(proposal)
        part = folder / f".{server_round}.part"
        with fresh_folder(part):
            if private:
                save_tensors(private, part / "private.safetensors")
            if reply.arrays:
                save_tensors(reply.arrays, part / f"{proposal}.safetensors")
            record = {
                "order": reply.request,
                "names": list(reply.arrays),
                "examples": reply.examples,
                "metrics": reply.metrics,
            }
            (part / f"{proposal}.json").write_text(sealed(record, *sorted(part.iterdir())))
            for path in part.iterdir():
                flush(path)
        for number in self.rounds(proposal):
            if number >= server_round:
                shutil.rmtree(folder / str(number))
        part.rename(folder / str(server_round))
        flush(folder)
        for number in self.rounds(proposal)[: -self.keep]:
            shutil.rmtree(folder / str(number))


def continues(proposal: Proposal, earlier: Proposal) -> bool:
    """Whether it is the same run with more rounds, or from a server that was updated; without differential
    privacy, which has no such runs."""
    longer = (proposal.run.num_rounds, proposal.format) > (earlier.run.num_rounds, earlier.format)
    return longer and proposal.epsilon is None and _without_length(proposal) == _without_length(earlier)


def _without_length(proposal: Proposal) -> dict[str, Any]:
    """A proposal without its number of rounds, and without what changes no array."""
    run = replace(proposal.run, num_rounds=0, eval_every=1, threads=None, keep_rounds=1)
    return {**proposal.plain, "run": asdict(run), "format": 0}
