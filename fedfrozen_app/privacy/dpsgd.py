"""DP-SGD: Abadi et al., Deep Learning with Differential Privacy, 2016.

    g̃ = (1/B) (Σ_{i ∈ Poisson sample} g_i · min(1, C/‖g_i‖) + N(0, σ²C²))        B: the expected sample size

The norm runs over all trained names together. Gradients of single examples come from the clients' own pure
loss under `vmap`, which serves every supported architecture, position embeddings and all (ghost.py needs less
memory, and serves layers and heads). Opacus' optimiser clips, sums and scales them. A new one
is built for every client and round, because what is trained changes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from fedfrozen_app.data.table import Table
from fedfrozen_app.models.attention import PLAIN, attention_by, by_kernels, folded
from fedfrozen_app.models.kernels import kernels_on
from fedfrozen_app.models.masks import with_ready_mask
from fedfrozen_app.models.own_products import own_products
from fedfrozen_app.models.shared import shared_linears
from fedfrozen_app.models.task import Batch, Inputs, Parameters, Task, called
from fedfrozen_app.models.trunk import answering, frozen_trunk, holds, read_by
from fedfrozen_app.privacy.noise import Noise
from fedfrozen_app.privacy.opacus_parts import DPOptimizer

Loss = Callable[[Parameters, Batch, Task], Tensor]
Ways = Callable[[], AbstractContextManager[None]]
Below = Callable[[Sequence[nn.Module]], AbstractContextManager[None]]
TRUNK = "trunk"  # beside a row's inputs: what the model under all that trains has made of them already


def plain_loss(parameters: Parameters, batch: Batch, task: Task) -> Tensor:
    return task.loss(parameters, batch)


@dataclass(frozen=True)
class Recipe:
    """How one round's private steps are taken."""

    rate: float  # q, the chance of a unit to be in a step's sample
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
            if broken.any():  # it gives nothing: a sum that is not finite would tell that it is there
                for parameter in self.params:
                    parameter.grad_sample[broken] = 0
        with exact_products():
            super().clip_and_accumulate()

    def add_noise(self) -> None:
        std = self.noise_multiplier * self.max_grad_norm if self.noise_multiplier else 0.0
        noisy = with_noise(self.source, [parameter.summed_grad for parameter in self.params], std)
        for parameter, slope in zip(self.params, noisy, strict=True):
            parameter.grad = slope


def norms_of(slopes: Sequence[Tensor], lead: int) -> Tensor:
    """The norm of every example's gradient over all its arrays, which have `lead` axes of examples."""
    each = [_norms(slope.flatten(lead)) if slope.dim() > lead else slope.abs() for slope in slopes]
    return torch.stack(each).norm(dim=0)


def _norms(rows: Tensor) -> Tensor:
    """(…, width) -> (…)"""
    kernels = kernels_on(rows.device, "privacy.gpu_kernels")
    if kernels is None or rows.dtype != torch.float32:
        return rows.norm(dim=-1)
    found: Tensor = kernels.norms(rows)
    return found


def with_noise(source: Noise, sums: Sequence[Tensor], std: float) -> list[Tensor]:
    """One draw for all arrays: on a GPU a draw for each would take longer than their gradients."""
    if std == 0:
        return list(sums)
    whole = torch.cat([value.reshape(-1) for value in sums])
    parts = source.added_to(whole, std).split([value.numel() for value in sums])
    return [part.view(value.shape) for part, value in zip(parts, sums, strict=True)]


class Clipping(Protocol):
    """A way to the clipped sum of a chunk's gradients, and the optimiser that takes it from there."""

    optimizer: type[NoisyOptimizer]

    def load(self, table: Table, index: Tensor, parameters: Mapping[str, nn.Parameter]) -> Tensor:
        """Leave on the parameters what the optimiser reads of these rows; the losses, (examples,)."""

    def each(self, part: Table, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Every example's gradient as it is before clipping, (examples, *shape): for an audit."""


@dataclass(frozen=True)
class Packed:
    """Clients' examples without those that only make their samples equally long."""

    rows: Table  # of all clients, one after another
    places: Tensor  # (clients, examples) where each is there; of those that are not, any


class ExampleGradients:
    """The gradient of every single example of a batch, for the names that are trained."""

    optimizer: type[NoisyOptimizer] = NoisyOptimizer

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        trained: Sequence[str],
        loss: Loss,
        ways: Ways = nullcontext,
        below: Below = lambda parts: nullcontext(),
    ) -> None:
        """`ways`: in which the model computes, within them, for clients side by side; and `below` those for
        its modules under all that trains."""
        self._model, self._loss, self._ways, self._below = model, loss, ways, below
        self._held = dict(model.named_parameters())
        self._trained = list(trained)
        self._plain, self._task = task, task.with_call(self._call)
        self._together = task.with_call(partial(self._call, adds=False))
        self._trunk = frozen_trunk(model, self._trained)

    def load(self, table: Table, index: Tensor, parameters: Mapping[str, nn.Parameter]) -> Tensor:
        part = table.take(index)
        losses, slopes = self(part.inputs, part.labels)
        for name, parameter in parameters.items():
            parameter.grad_sample = slopes[name]  # type: ignore[attr-defined]
        return losses

    def each(self, part: Table, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        return self(part.inputs, part.labels)[1]

    def _call(self, parameters: Parameters, inputs: Inputs, *, adds: bool = True) -> Tensor:
        own = {key: value for key, value in inputs.items() if key != TRUNK}
        given = with_ready_mask(own, self._model)
        if adds and given is not own:  # plain attention adds its mask to the scores
            given["attention_mask"] = tree_map(self._added, given["attention_mask"])
        read = inputs.get(TRUNK)
        with nullcontext() if self._trunk is None or read is None else answering(self._trunk.parts, read):
            return called(self._model, parameters, given)

    def _added(self, seen: Tensor) -> Tensor:
        hidden = torch.finfo(self._task.dtype).min
        return torch.zeros_like(seen, dtype=self._task.dtype).masked_fill(~seen, hidden)

    def __call__(self, inputs: Inputs, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Losses (examples,), and for each name (examples, *shape)."""
        if not len(labels):  # a Poisson sample may be empty
            empty = {name: self._held[name].new_zeros(0, *self._held[name].shape) for name in self._trained}
            return torch.zeros(0, device=labels.device), empty
        trained = {name: self._held[name].detach() for name in self._trained}
        inputs = self._with_trunk(inputs, labels, 1)
        # The plain attention of matrix products: fused kernels have no rule for a gradient within a vmap.
        with attention_by(self._model, PLAIN):
            each = vmap(grad_and_value(self._one), in_dims=(None, 0, 0), randomness="different")
            slopes, losses = each(trained, inputs, labels)
        return losses, slopes

    @property
    def has_trunk(self) -> bool:
        """Whether something is read for all rows at once."""
        return self._trunk is not None

    def of_clients(
        self,
        rows: Parameters,
        inputs: Inputs,
        labels: Tensor,
        packed: "Packed | None" = None,
        *,
        recorded: bool = False,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The same for clients side by side, which have `rows` (clients, *shape) of what they train: losses
        (clients, examples), and for each name (clients, examples, *shape). `packed`: the same examples, for
        what is read for all at once.

        `recorded`: what takes Python long is taken once, and is worth a GPU's while."""
        # Each example's own, by name, and so with a slope of its own; in memory they are one for all.
        own = {name: _for_each(row, labels.shape[1]).requires_grad_() for name, row in rows.items()}
        one = partial(self._one, task=self._together)
        over_all = vmap(vmap(one, randomness="different"), randomness="different")
        shared = shared_linears(self._model, self._trained) if recorded else nullcontext()
        products = own_products(self._model, self._trained)
        with folded(self._model), by_kernels(labels.device):
            inputs = self._with_trunk(inputs, labels, 2, packed)
            # Gradients are taken around both maps: within them fused kernels have no rule for any.
            with shared, products, self._ways(), torch.enable_grad():
                losses = over_all(own, inputs, labels)
                slopes = torch.autograd.grad(losses.sum(), list(own.values()), materialize_grads=True)
        return losses.detach(), dict(zip(own, slopes, strict=True))

    def _with_trunk(
        self, inputs: Inputs, labels: Tensor, lead: int, packed: "Packed | None" = None
    ) -> Inputs:
        """With what a trunk that does not train makes of all these rows, which have `lead` axes."""
        if self._trunk is None:
            return inputs
        if packed is None:
            rows = {key: value.flatten(0, lead - 1) for key, value in inputs.items()}
            batch = Batch(rows, labels.flatten(0, lead - 1))
        else:
            batch = Batch(packed.rows.inputs, packed.rows.labels)
        if not holds(self._trunk, self._model, self._plain, batch, self._trained):
            self._trunk = None
            return inputs
        if lead > 1:  # whether there is a mask must not go by what any of these rows is
            batch = Batch(with_ready_mask(batch.inputs, self._model), batch.labels)
        with self._below(self._trunk.parts) if lead > 1 else nullcontext():
            read = read_by(self._trunk, self._plain, batch)

        def by_row(value: Tensor) -> Tensor:
            return value.unflatten(0, labels.shape[:lead]) if packed is None else value[packed.places]

        return inputs | {TRUNK: tree_map(by_row, read)}

    @torch.no_grad()
    def losses(self, inputs: Inputs, labels: Tensor) -> Tensor:
        """The losses alone: (examples,)."""
        with attention_by(self._model, PLAIN):
            return vmap(self._one, in_dims=(None, 0, 0), randomness="different")({}, inputs, labels)

    def _one(self, parameters: Parameters, inputs: Inputs, label: Tensor, task: Task | None = None) -> Tensor:
        frozen = {name: value.detach() for name, value in self._held.items() if name not in parameters}
        rows = {key: tree_map(lambda each: each.unsqueeze(0), value) for key, value in inputs.items()}
        batch = Batch(rows, label.unsqueeze(0))
        return self._loss({**parameters, **frozen}, batch, task or self._task)


def _for_each(row: Tensor, examples: int) -> Tensor:
    """(clients, *shape) -> (clients, examples, *shape), which are the same numbers in memory."""
    return row.detach().unsqueeze(1).expand(-1, examples, *(-1 for _ in row.shape[1:]))


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
    """Take the recipe's steps on `parameters`; the mean loss, which must not leave the site.

    `units` holds the rows of each example, document or patient. A unit in the sample gives one of its rows,
    so that clipping that row's gradient bounds what the whole unit can do.
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
