"""`flower/asked.json`: the clients of the current round's requests, written before these are sent.

A checkpoint is older than that. A run resumed from it sends the same round's request to these clients first:
the request is the same, so a site that has trained for it sends its stored reply, and pays once.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedfrozen_app.core.errors import DAMAGED
from fedfrozen_app.files.disk import patient, replace_file

FILE = Path("flower") / "asked.json"


@dataclass
class AskedFile:
    path: Path

    @classmethod
    def of(cls, folder: Path) -> "AskedFile":
        return cls(folder / FILE)

    @patient
    def write(self, server_round: int, clients: Sequence[str]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, json.dumps({"round": server_round, "clients": list(clients)}))

    def read(self, server_round: int) -> list[str]:
        """The clients of this round's requests, in order; none if the file is missing or of another round."""
        try:
            found = json.loads(self.path.read_text("utf-8"))
            same = found["round"] == server_round
            return [str(client) for client in found["clients"]] if same else []
        except DAMAGED:
            return []
