"""The weighted mean of the clients' updates, one reply at a time."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor


class RunningMean:
    """w ← w + Σ nᵢ uᵢ / Σ nᵢ with uᵢ = wᵢ − w, one weight sum per name, in a running sum.

    It holds one sum whatever the number of replies, and turns each reply into its update in place: with the
    model and the reply at hand that is three models in memory. Names that only some clients send are averaged
    over those that sent them; a name that nobody sent keeps its value.

    `group` names the part of the model that a parameter's drift counts for, or None to leave it out.
    """

    def __init__(self, model: Mapping[str, Tensor], group: Callable[[str], str | None]) -> None:
        self._model = model
        self._group = group
        self._sum: dict[str, Tensor] = {}
        self._weight: dict[str, float] = {}
        self._square: dict[str, Tensor] = {}  # Σ nᵢ‖uᵢ‖² in float64

    def add(self, arrays: dict[str, Tensor], weight: float) -> str | None:
        """Fold one reply in; the reason when it is refused, in which case nothing was added."""
        norms: dict[str, Tensor] = {}
        for name, tensor in arrays.items():
            tensor.sub_(self._model[name])  # the reply becomes the update
            norms[name] = torch.linalg.vector_norm(tensor, dtype=torch.float64)
        # A NaN or an infinity anywhere shows in its tensor's norm: one look for the whole reply.
        if norms and not torch.isfinite(torch.stack(list(norms.values()))).all():
            bad = next(name for name, norm in norms.items() if not math.isfinite(norm))
            return f"holds values that are not finite in {bad}"
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

    def finish(self) -> tuple[dict[str, Tensor], dict[str, dict[str, float]]]:
        """The new values of the names that were sent, and the drift by group. Ends this object's use.

        RMS drift is √(Σ wᵢ‖uᵢ‖² − ‖Σ wᵢuᵢ‖²), beside the norm of the mean update.
        """
        spread: dict[str, float] = {}
        common: dict[str, float] = {}
        merged: dict[str, Tensor] = {}
        for name, total in self._sum.items():
            mean = total.div_(self._weight[name])
            group = self._group(name)
            if group is not None:
                square = float(torch.linalg.vector_norm(mean, dtype=torch.float64)) ** 2
                common[group] = common.get(group, 0.0) + square
                apart = float(self._square[name]) / self._weight[name] - square
                spread[group] = spread.get(group, 0.0) + apart
            merged[name] = mean.add_(self._model[name])
        self._sum = {}
        drift = {
            group: {
                "rms": math.sqrt(max(spread[group], 0.0)),
                "mean_update": math.sqrt(common[group]),
            }
            for group in common
        }
        return merged, drift
