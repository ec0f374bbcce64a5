"""Replies still in flight when a round closes: their content, and their weight when they arrive.

A client whose request is of round v trains from the model of that round under its plan. Its reply is stored
as an update u = wᵢ − w_v until it arrives, in round r, and then enters the mean as

    s(τ) · u          τ = r − v: its staleness; s by default 1/√(1+τ)

with the same weight as a reply of round r: as in FedBuff (arXiv 2106.06639), the mean divides by the replies'
full weights, not by weights reduced by s. Only the names of u that round r still shares are used.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedfrozen_app.exchange.count import Upload
from fedfrozen_app.exchange.messages import Reply
from fedfrozen_app.exchange.names import is_parameter

WEIGHTS = {
    "inverse_sqrt": lambda staleness: 1 / math.sqrt(1 + staleness),
    "inverse": lambda staleness: 1 / (1 + staleness),
    "constant": lambda staleness: 1.0,
}


@dataclass
class LateReply:
    """A reply that has not arrived yet, or why there is none, as the rest of a sentence."""

    reply: Reply | str
    upload: Upload

    @property
    def arrays(self) -> Mapping[str, Tensor]:
        return {} if isinstance(self.reply, str) else self.reply.arrays

    def aged(self, weight: float, shared: Sequence[str]) -> Reply | str:
        """The reply as it enters the mean: its update times `weight`, for the names shared now. Sums follow
        the order of `shared`, because a checkpoint has another order."""
        if isinstance(self.reply, str):
            return self.reply
        update = {name: self.arrays[name] for name in shared if name in self.arrays}
        scaled = [value for name, value in update.items() if is_parameter(name)]
        if scaled and weight != 1:
            torch._foreach_mul_(scaled, weight)
        self.reply.arrays = update
        return self.reply

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, without arrays."""
        upload = {"by_role": dict(self.upload.by_role), "size": self.upload.size}
        if isinstance(self.reply, str):
            return {"failure": self.reply, "upload": upload}
        reply = {
            "request": self.reply.request,
            "examples": self.reply.examples,
            "metrics": self.reply.metrics,
        }
        return {"reply": reply, "upload": upload}

    @classmethod
    def of(cls, state: Mapping[str, Any], arrays: dict[str, Tensor]) -> "LateReply":
        upload = Upload(Counter(state["upload"]["by_role"]), state["upload"]["size"])
        if "failure" in state:
            return cls(state["failure"], upload)
        known = state["reply"]
        reply = Reply(known["request"], known["examples"], arrays, dict(known["metrics"]))
        return cls(reply, upload)


@dataclass
class LateReplies:
    """Late replies by client: each client has one request at a time."""

    _known: dict[str, LateReply] = field(default_factory=dict)

    def keep(self, client: str, late: LateReply) -> None:
        self._known[client] = late

    def pop(self, client: str) -> LateReply:
        return self._known.pop(client)

    def discard(self, clients: Sequence[str]) -> None:
        for client in clients:
            self._known.pop(client, None)

    def __len__(self) -> int:
        return len(self._known)

    def arrays(self) -> dict[str, Tensor]:
        """The arrays for a checkpoint, by CLIENT/NAME."""
        return {
            f"{client}/{name}": value
            for client, late in self._known.items()
            for name, value in late.arrays.items()
        }

    def state_dict(self) -> dict[str, Any]:
        return {client: late.state_dict() for client, late in self._known.items()}

    def load(self, state: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> None:
        by_client: dict[str, dict[str, Tensor]] = {}
        for key, value in arrays.items():
            client, _, name = key.partition("/")
            by_client.setdefault(client, {})[name] = value
        self._known = {
            client: LateReply.of(late, by_client.get(client, {})) for client, late in state.items()
        }
