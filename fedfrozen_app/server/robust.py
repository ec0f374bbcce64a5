"""Robust aggregation, by configuration: a single poisoned update cannot dominate the result.

Trimmed mean and median: Yin et al., "Byzantine-Robust Distributed Learning", arXiv 1803.01498.
Krum: Blanchard et al., "Machine Learning with Adversaries", arXiv 1703.02757: the score of update i is
Σ‖uᵢ − uⱼ‖² over its n − f − 2 nearest neighbours j; the n − f updates with the smallest scores are averaged.

Each name is combined over the clients that sent it. All replies of a round are held until its end.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedfrozen_app.config import AggregationConfig
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.flower_internals import trim_mean
from fedfrozen_app.exchange.names import is_parameter
from fedfrozen_app.server.aggregate import RunningMean, Update
from fedfrozen_app.server.norms import NormGate


def replies_needed(settings: AggregationConfig) -> int:
    return settings.malicious + 3 if settings.name == "krum" else 1


def check_cohort(settings: AggregationConfig, size: int) -> None:
    """Raise a `UserError` if the cohort is smaller than the rule's minimum of replies."""
    if size < (needed := replies_needed(settings)):
        raise UserError(
            f"Krum with aggregation.malicious={settings.malicious} needs {needed} clients in a "
            f"round, and there are {size}: raise num_clients or participation, or lower it."
        )


class HeldReplies(RunningMean):
    """Holds every reply, and also the mean of all for its checks and drift."""

    def __init__(
        self,
        settings: AggregationConfig,
        model: Mapping[str, Tensor],
        group: Callable,
        gate: NormGate | None,
        equal: Collection[str] = (),
    ) -> None:
        super().__init__(model, group, gate, equal=equal)
        self._settings = settings
        self._held: list[tuple[dict[str, Tensor], float]] = []

    def expect(self, arrays: Mapping[str, Tensor]) -> None:
        """Does nothing: each reply is held unchanged."""

    def add(self, arrays: Mapping[str, Tensor], weight: float) -> str | None:
        refused = super().add(copied(arrays), weight)
        if refused is None:
            self._held.append((dict(arrays), weight))
        return refused

    def problem(self) -> str | None:
        needed = replies_needed(self._settings)
        if 0 < len(self._held) < needed:
            return f"{len(self._held)} sound replies came, and Krum needs {needed}"
        return None

    def finish(self) -> Update:
        if self._settings.name == "krum" and self._held:
            mean = RunningMean(self._model, self._group, equal=self._equal)
            for number in closest(self._held, self._settings.malicious):
                arrays, weight = self._held[number]
                mean.add(copied(arrays), weight)
            return replace(mean.finish(), replies=len(self._held))
        update = super().finish()
        values = {name: self._combine(name) for name in update.model}
        extra = {
            space: {name: self._combine(f"{space}/{name}") for name in arrays}
            for space, arrays in update.extra.items()
        }
        differences = {name: value - self._model[name] for name, value in values.items()}
        return replace(update, model=differences, extra=extra, values=values)

    def _combine(self, name: str) -> Tensor:
        values = [arrays[name] for arrays, _ in self._held if name in arrays]
        stacked = np.stack([value.double().cpu().numpy() for value in values])  # (clients, *shape)
        found = (
            np.median(stacked, axis=0)
            if self._settings.name == "median"
            else trim_mean(stacked, self._settings.trim)
        )
        return torch.from_numpy(np.asarray(found)).to(values[0])


def copied(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies for a mean, which turns arrays into updates in place."""
    return {name: tensor.clone() for name, tensor in arrays.items()}


def closest(held: list[tuple[dict[str, Tensor], float]], malicious: int) -> list[int]:
    """The indices of the n − f replies with the smallest Krum scores, over the parameters that all sent."""
    names = [name for name in filter(is_parameter, held[0][0]) if all(name in arrays for arrays, _ in held)]
    if not names:  # clients share no parameters: none is an outlier
        return list(range(len(held)))
    rows = torch.stack([torch.cat([arrays[n].double().flatten() for n in names]) for arrays, _ in held])
    squares = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").square()  # (n, n)
    near = squares.sort(dim=1).values[:, 1 : len(held) - malicious - 1]  # n − f − 2 others
    ranked = near.sum(dim=1).argsort(stable=True)
    return sorted(ranked[: len(held) - malicious].tolist())


def make_aggregator(
    settings: AggregationConfig,
    model: Mapping[str, Tensor],
    group: Callable[[str], str | None],
    median_norm: float | None,
    *,
    zero_fill: bool = False,
    equal: Collection[str] = (),
) -> RunningMean:
    """The aggregator of this round's replies; `zero_fill` is for the mean alone."""
    gate = None if settings.far_out is None else NormGate(settings.far_out, median_norm)
    if settings.name == "mean":
        return RunningMean(model, group, gate, zero_fill=zero_fill, equal=equal)
    return HeldReplies(settings, model, group, gate, equal)
