"""Masked sums still in flight when a round closes: their content, and their weight on arrival.

A cohort that starts in round v adds up Σ nᵢ uᵢ over its clients, exactly. When its sum arrives, in round r,
it enters the mean as s(τ) Σ nᵢ uᵢ, with τ = r − v and the full weights Σ nᵢ, like single updates in
`late_replies.py`. Only the arrays that round r still shares are used.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedfrozen_app.exchange.count import Upload
from fedfrozen_app.exchange.names import is_parameter
from fedfrozen_app.secure.layout import Sums
from fedfrozen_app.server.masked_result import MaskedResult

SCALARS = ("replies", "examples", "examples_squared", "clipped")


@dataclass
class LateSum:
    """A cohort's result that has not arrived yet: its sum, or why there is none."""

    result: MaskedResult
    upload: Upload  # of all its clients

    @classmethod
    def of(cls, result: MaskedResult, uploads: Sequence[Upload]) -> "LateSum":
        """The late sum of a cohort. What the clients spent is recorded already: they have trained."""
        by_role = sum((one.by_role for one in uploads), Counter[str]())
        return cls(replace(result, spent={}), Upload(by_role, sum(one.size for one in uploads)))

    def aged(self, weight: float, shared: Sequence[str]) -> MaskedResult:
        """The sum as it enters the mean. Sums follow the order of `shared`: a checkpoint's differs."""
        sums = self.result.sums
        if sums is None:
            return self.result
        kept = {name: sums.arrays[name] for name in shared if name in sums.arrays}
        scaled = [value for name, value in kept.items() if is_parameter(name)]
        if scaled and weight != 1:
            torch._foreach_mul_(scaled, weight)
        squares = {name: sums.squares[name] * (weight**2 if is_parameter(name) else 1.0) for name in kept}
        weights = {name: sums.weights[name] for name in kept}
        return replace(self.result, sums=replace(sums, arrays=kept, weights=weights, squares=squares))

    @property
    def arrays(self) -> Mapping[str, Tensor]:
        return {} if self.result.sums is None else self.result.sums.arrays

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, without arrays."""
        sums = self.result.sums
        known = None if sums is None else {
            **{key: getattr(sums, key) for key in SCALARS},
            "weights": sums.weights,
            "squares": sums.squares,
            "figures": {name: list(figure) for name, figure in sums.figures.items()},
        }  # fmt: skip
        plain = {key: getattr(self.result, key) for key in ("failures", "problem", "roster", "error")}
        upload = {"by_role": dict(self.upload.by_role), "size": self.upload.size}
        return {"sums": known, "upload": upload, **plain}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], arrays: dict[str, Tensor]) -> "LateSum":
        sums, known = None, state["sums"]
        if known is not None:
            figures = {name: (mean, examples) for name, (mean, examples) in known["figures"].items()}
            scalars = {key: known[key] for key in SCALARS}
            weights, squares = dict(known["weights"]), dict(known["squares"])
            sums = Sums(**scalars, arrays=arrays, weights=weights, squares=squares, figures=figures)
        plain = {key: state[key] for key in ("failures", "problem", "roster", "error")}
        upload = Upload(Counter(state["upload"]["by_role"]), state["upload"]["size"])
        return cls(MaskedResult(sums=sums, **plain), upload)


@dataclass
class LateSums:
    """Late sums by the first client of each cohort: a client is in one cohort at a time."""

    _known: dict[str, LateSum] = field(default_factory=dict)

    def keep(self, clients: Sequence[str], late: LateSum) -> None:
        self._known[clients[0]] = late

    def pop(self, client: str) -> LateSum:
        return self._known.pop(client)

    def discard(self, clients: Sequence[str]) -> None:
        for client in clients:
            self._known.pop(client, None)

    def __contains__(self, client: str) -> bool:
        return client in self._known

    def __len__(self) -> int:
        return len(self._known)

    def arrays(self) -> dict[str, Tensor]:
        """The arrays for a checkpoint, by CLIENT/NAME."""
        return {
            f"{first}/{name}": value
            for first, late in self._known.items()
            for name, value in late.arrays.items()
        }

    def state_dict(self) -> dict[str, Any]:
        return {first: late.state_dict() for first, late in self._known.items()}

    def load(self, state: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> None:
        by_client: dict[str, dict[str, Tensor]] = {}
        for key, value in arrays.items():
            first, _, name = key.partition("/")
            by_client.setdefault(first, {})[name] = value
        self._known = {
            first: LateSum.from_state(late, by_client.get(first, {})) for first, late in state.items()
        }
