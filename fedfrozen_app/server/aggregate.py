"""The weighted mean of the clients' updates, one reply at a time."""

import math
import statistics
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fedfrozen_app.exchange.block import Block, Slice
from fedfrozen_app.exchange.check import TOO_LARGE
from fedfrozen_app.server.passes import CHUNK, add_means, subtract


class Gate:
    """Sets aside updates whose norm is over `far_out` times the usual; knows the norms of those it let in."""

    def __init__(self, far_out: float, usual: float | None) -> None:
        self._far_out, self._usual = far_out, usual
        self._norms: list[float] = []

    def problem(self, norm: float) -> str | None:
        if self._usual and norm > self._far_out * self._usual:
            return f"lies far out: the norm of its update is {norm / self._usual:.3g} times the usual"
        self._norms.append(norm)
        return None

    def usual(self) -> float | None:
        """The median of this round's; without one, what it was."""
        return statistics.median(self._norms) if self._norms else self._usual


class OpenBlock:
    """A block whose rows are being taken: (clients, width) of updates, and the weight of each row."""

    def __init__(self, block: Block, gate: Gate | None) -> None:
        self.block = block
        self._gate = gate
        self.weights = [0.0] * len(block.clients)
        self._updates = block.values.sub_(block.base)
        parts = block.layout.views(self._updates).values()  # (clients, *shape) each
        norms = [torch.linalg.vector_norm(p.flatten(1), dim=1, dtype=torch.float64) for p in parts]
        self._norms = torch.stack(norms, dim=1)  # (clients, names)
        self._sound = (self._norms < TOO_LARGE).all(dim=1).tolist()
        self._totals = None if gate is None else torch.linalg.vector_norm(self._norms, dim=1).tolist()

    def accept(self, number: int, weight: float) -> str | None:
        if not self._sound[number]:
            return unsound(dict(zip(self.block.layout.names, self._norms[number].tolist(), strict=True)))
        if self._gate and self._totals and (far := self._gate.problem(self._totals[number])):
            return far
        self.weights[number] = weight
        return None

    def fold(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Σ nᵢuᵢ and Σ nᵢ‖uᵢ‖² by name."""
        device, names = self._updates.device, self.block.layout.names
        refused = [number for number, weight in enumerate(self.weights) if not weight]
        if refused:  # 0 · NaN would be NaN
            self._updates[refused] = 0
            self._norms[refused] = 0
        weights = torch.tensor(self.weights, dtype=torch.float64, device=device)
        sums = self.block.layout.views(weights.to(self._updates.dtype) @ self._updates)
        squares = weights @ self._norms.square()
        return sums, dict(zip(names, squares.unbind(), strict=True))


def unsound(norms: Mapping[str, float]) -> str:
    """Why an update with these norms is set aside, as the rest of a sentence."""
    name = next(name for name, norm in norms.items() if not norm < TOO_LARGE)
    finite = math.isfinite(norms[name])
    return f"holds values that are {'too large to average' if finite else 'not finite'} in {name}"


class RunningMean:
    """w ← w + Σ nᵢ uᵢ / Σ nᵢ with uᵢ = wᵢ − w, one weight sum per name, in a running sum.

    It holds one sum whatever the number of replies, and turns each reply into its update in place: with the
    model and the reply at hand that is three models in memory. Names that only some clients send are averaged
    over those that sent them; a name that nobody sent keeps its value. With `zero_fill` the mean is over all
    clients of the round: one that did not send a name counts as an update of zero.

    `group` names the part of the model that a parameter's drift counts for, or None to leave it out.
    """

    def __init__(
        self,
        model: Mapping[str, Tensor],
        group: Callable[[str], str | None],
        gate: Gate | None = None,
        *,
        zero_fill: bool = False,
    ) -> None:
        self._model = model
        self.gate = gate
        self._zero_fill = zero_fill
        self._all = 0.0  # the weight of every reply taken, whatever it held
        self._group = group
        self._sum: dict[str, Tensor] = {}
        self._weight: dict[str, float] = {}
        self._square: dict[str, Tensor] = {}  # Σ nᵢ‖uᵢ‖² in float64
        self._block: OpenBlock | None = None
        self._scratch = torch.empty(CHUNK, dtype=torch.float64)

    def add(self, arrays: Mapping[str, Tensor], weight: float) -> str | None:
        """Fold one reply in; the reason when it is refused, in which case nothing was added."""
        if isinstance(arrays, Slice):
            return self._add_row(arrays, weight)
        norms: dict[str, Tensor] = {}
        for name, tensor in arrays.items():
            norms[name] = subtract(tensor, self._model[name], self._scratch)  # the reply becomes the update
        # A NaN or an infinity anywhere shows in its tensor's norm: one look for the whole reply.
        if norms and not (torch.stack(list(norms.values())) * weight < TOO_LARGE).all():
            return unsound({name: float(norm) * weight for name, norm in norms.items()})
        if norms and self.gate:
            total = float(torch.linalg.vector_norm(torch.stack(list(norms.values()))))
            if far := self.gate.problem(total):
                return far
        self._all += weight
        for name, update in arrays.items():
            square = norms[name].square() * weight
            if name in self._sum:
                self._sum[name].add_(update, alpha=weight)
                self._weight[name] += weight
                self._square[name] += square
            else:
                self._sum[name] = update.mul_(weight)
                self._weight[name] = weight
                self._square[name] = square
        return None

    # A block's rows are folded in together: one product for all its clients.

    def _add_row(self, row: Slice, weight: float) -> str | None:
        if self._block is None or self._block.block is not row.block:
            self._close_block()
            self._block = OpenBlock(row.block, self.gate)
        return self._block.accept(row.number, weight)

    def _close_block(self) -> None:
        if self._block is None or not (weight := sum(self._block.weights)):
            return
        sums, squares = self._block.fold()
        self._all += weight
        for name, total in sums.items():
            if name in self._sum:
                self._sum[name].add_(total)
                self._weight[name] += weight
                self._square[name] += squares[name]
            else:
                self._sum[name], self._weight[name], self._square[name] = total, weight, squares[name]
        self._block = None

    def problem(self) -> str | None:
        """Why what came in cannot be combined; for a mean there is no reason."""
        return None

    def finish(self) -> tuple[dict[str, Tensor], dict[str, dict[str, float]]]:
        """The new values of the names that were sent, and the drift by group. Ends this object's use.

        RMS drift is √(Σ wᵢ‖uᵢ‖² − ‖Σ wᵢuᵢ‖²), beside the norm of the mean update.
        """
        self._close_block()
        spread: dict[str, float] = {}
        common: dict[str, float] = {}
        merged = self._sum
        if self._zero_fill:
            self._weight = dict.fromkeys(merged, self._all)
        weights, bases = [self._weight[name] for name in merged], [self._model[name] for name in merged]
        norms = add_means(list(merged.values()), weights, bases, self._scratch)
        # One look at the device for all names.
        figures = torch.stack([*norms, *self._square.values()]).tolist() if norms else []
        for name, norm, square in zip(merged, figures, figures[len(merged) :], strict=False):
            group = self._group(name)
            if group is not None:
                common[group] = common.get(group, 0.0) + norm**2
                spread[group] = spread.get(group, 0.0) + square / self._weight[name] - norm**2
        self._sum = {}
        drift = {
            group: {
                "rms": math.sqrt(max(spread[group], 0.0)),
                "mean_update": math.sqrt(common[group]),
            }
            for group in common
        }
        return merged, drift
