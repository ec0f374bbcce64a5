"""DP-SGD: Abadi et al., Deep Learning with Differential Privacy, 2016.

    g̃ = (1/B) (Σ_{i ∈ Poisson sample} g_i · min(1, C/‖g_i‖) + N(0, σ²C²))        B: the expected sample size

The norm runs over all trained names together. Gradients of single examples come from example_gradients.py or
ghost.py. Opacus' optimiser clips, sums and scales them. A new one is built for every client and round,
because what is trained changes.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fedfrozen_app.data.table import Table
from fedfrozen_app.privacy.noise import Noise
from fedfrozen_app.privacy.opacus_parts import DPOptimizer
from fedfrozen_app.vmap.load_gpu_kernels import gpu_kernels_on


@dataclass(frozen=True)
class Recipe:
    """The settings of one round's private steps."""

    rate: float  # q, the probability that a unit is in a step's sample
    steps: int
    noise: float  # σ
    max_grad_norm: float  # C
    batch: float  # B, what the noisy sum is divided by
    physical_batch: int  # examples whose gradients are in memory at once


@contextmanager
def exact_products() -> Iterator[None]:
    """Norms and clipped sums must agree to the last digits, or the bound would not hold: no TF32 here."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


class NoisyOptimizer(DPOptimizer):
    """Opacus' optimiser, with noise from our own source (see noise.py)."""

    def __init__(self, optimizer: Optimizer, recipe: Recipe, source: Noise) -> None:
        super().__init__(
            optimizer,
            noise_multiplier=recipe.noise,
            max_grad_norm=recipe.max_grad_norm,
            expected_batch_size=recipe.batch,  # type: ignore[arg-type]
        )
        self.source = source

    def clip_and_accumulate(self) -> None:
        if len(self.grad_samples[0]):
            broken = ~torch.isfinite(norms_of(self.grad_samples, 1))
            if broken.any():  # dropped: a sum that is not finite would reveal the example
                for parameter in self.params:
                    parameter.grad_sample[broken] = 0
        with exact_products():
            super().clip_and_accumulate()

    def add_noise(self) -> None:
        std = self.noise_multiplier * self.max_grad_norm if self.noise_multiplier else 0.0
        noisy = with_noise(self.source, [parameter.summed_grad for parameter in self.params], std)
        for parameter, gradient in zip(self.params, noisy, strict=True):
            parameter.grad = gradient


def norms_of(gradients: Sequence[Tensor], lead: int) -> Tensor:
    """The norm of every example's gradient over all its arrays, which have `lead` axes of examples."""
    each = [
        _norms(gradient.flatten(lead)) if gradient.dim() > lead else gradient.abs() for gradient in gradients
    ]
    return torch.stack(each).norm(dim=0)


def _norms(rows: Tensor) -> Tensor:
    """(…, width) -> (…)"""
    kernels = gpu_kernels_on(rows.device, "privacy.gpu_kernels")
    if kernels is None or rows.dtype != torch.float32:
        return rows.norm(dim=-1)
    found: Tensor = kernels.norms(rows)
    return found


def with_noise(source: Noise, sums: Sequence[Tensor], std: float) -> list[Tensor]:
    """One draw for all arrays: on a GPU one draw per array would take longer than their gradients."""
    if std == 0:
        return list(sums)
    whole = torch.cat([value.reshape(-1) for value in sums])
    parts = source.added_to(whole, std).split([value.numel() for value in sums])
    return [part.view(value.shape) for part, value in zip(parts, sums, strict=True)]


class Clipping(Protocol):
    """How a chunk's clipped sum of gradients is computed, and the optimiser that adds the noise."""

    optimizer: type[NoisyOptimizer]

    def load(self, table: Table, index: Tensor, parameters: Mapping[str, nn.Parameter]) -> Tensor:
        """Store on the parameters what the optimiser reads for these rows; returns the losses,
        (examples,)."""

    def each(self, part: Table, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Every example's gradient before clipping, (examples, *shape), for an audit."""


def draw_rows(units: Sequence[np.ndarray], sample: np.ndarray, source: Noise) -> Tensor:
    """One row of every unit in the sample."""
    rows = [units[unit] for unit in sample.tolist()]
    drawn = [trained.item(source.one_of(len(trained)) if len(trained) > 1 else 0) for trained in rows]
    return torch.from_numpy(np.array(drawn, dtype=np.int64))


def train_steps(
    gradients: Clipping,
    parameters: Mapping[str, nn.Parameter],
    optimizer: Optimizer,
    table: Table,
    units: Sequence[np.ndarray],
    recipe: Recipe,
    source: Noise,
) -> float | None:
    """Take the recipe's steps on `parameters`. Returns the mean loss, which must not leave the site.

    `units` holds the rows of each example, document or patient. A unit in the sample gives one of its rows,
    so that clipping that row's gradient bounds the influence of the whole unit.
    """
    private = gradients.optimizer(optimizer, recipe, source)
    losses: list[Tensor] = []
    for _ in range(recipe.steps):
        sample = source.poisson(len(units), recipe.rate)
        index = draw_rows(units, sample, source).to(table.labels.device)
        chunks = index.split(recipe.physical_batch) if len(index) else (index,)
        for number, chunk in enumerate(chunks, start=1):
            losses.append(gradients.load(table, chunk, parameters))
            private.signal_skip_step(number < len(chunks))
            private.step()
            private.zero_grad(set_to_none=True)
    for parameter in parameters.values():
        parameter.grad = parameter.grad_sample = parameter.summed_grad = None  # type: ignore[attr-defined]
    seen = torch.cat(losses)
    return float(seen.double().mean()) if len(seen) else None
