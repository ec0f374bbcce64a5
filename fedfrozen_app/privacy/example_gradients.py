"""The gradient of every single example, from the clients' own pure loss under `vmap`.

This supports every architecture, position embeddings included. ghost.py needs less memory, and supports
layers and heads.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.utils._pytree import tree_map

from fedfrozen_app.data.table import Table
from fedfrozen_app.models.attention_mask import with_attention_mask
from fedfrozen_app.models.frozen_backbone import backbone_output, can_precompute, frozen_backbone, returning
from fedfrozen_app.models.task import Batch, Inputs, Parameters, Task, call_model
from fedfrozen_app.privacy.dpsgd import NoisyOptimizer
from fedfrozen_app.vmap.attention import PLAIN, attention_by, folded, with_gpu_kernels
from fedfrozen_app.vmap.per_client_products import per_client_products
from fedfrozen_app.vmap.shared_linears import shared_linears

Loss = Callable[[Parameters, Batch, Task], Tensor]
Ways = Callable[[], AbstractContextManager[None]]
Below = Callable[[Sequence[nn.Module]], AbstractContextManager[None]]
BACKBONE = "backbone"  # key next to a row's inputs: the frozen backbone's output for them


def plain_loss(parameters: Parameters, batch: Batch, task: Task) -> Tensor:
    return task.loss(parameters, batch)


@dataclass(frozen=True)
class Packed:
    """Clients' examples without the padding that equalizes their sample sizes."""

    rows: Table  # of all clients, one after another
    places: Tensor  # (clients, examples) each example's index in `rows`; any index for padding


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
        """`ways`: a context in which the model computes for several clients at once; `below`: the same for
        the modules of its frozen backbone."""
        self._model, self._loss, self._ways, self._below = model, loss, ways, below
        self._held = dict(model.named_parameters())
        self._trained = list(trained)
        self._plain, self._task = task, task.with_call(self._call)
        self._together = task.with_call(partial(self._call, adds=False))
        self._backbone = frozen_backbone(model, self._trained)

    def load(self, table: Table, index: Tensor, parameters: Mapping[str, nn.Parameter]) -> Tensor:
        part = table.take(index)
        losses, gradients = self(part.inputs, part.labels)
        for name, parameter in parameters.items():
            parameter.grad_sample = gradients[name]  # type: ignore[attr-defined]
        return losses

    def each(self, part: Table, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        return self(part.inputs, part.labels)[1]

    def _call(self, parameters: Parameters, inputs: Inputs, *, adds: bool = True) -> Tensor:
        own = {key: value for key, value in inputs.items() if key != BACKBONE}
        given = with_attention_mask(own, self._model)
        if adds and given is not own:  # plain attention adds its mask to the scores
            given["attention_mask"] = tree_map(self._added, given["attention_mask"])
        read = inputs.get(BACKBONE)
        with (
            nullcontext() if self._backbone is None or read is None else returning(self._backbone.parts, read)
        ):
            return call_model(self._model, parameters, given)

    def _added(self, seen: Tensor) -> Tensor:
        hidden = torch.finfo(self._task.dtype).min
        return torch.zeros_like(seen, dtype=self._task.dtype).masked_fill(~seen, hidden)

    def __call__(self, inputs: Inputs, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Losses (examples,), and for each name (examples, *shape)."""
        if not len(labels):  # a Poisson sample may be empty
            empty = {name: self._held[name].new_zeros(0, *self._held[name].shape) for name in self._trained}
            return torch.zeros(0, device=labels.device), empty
        trained = {name: self._held[name].detach() for name in self._trained}
        inputs = self._with_backbone(inputs, labels, 1)
        # Plain attention by matrix products: fused attention has no rule for a gradient within a vmap.
        with attention_by(self._model, PLAIN):
            each = vmap(grad_and_value(self._one), in_dims=(None, 0, 0), randomness="different")
            gradients, losses = each(trained, inputs, labels)
        return losses, gradients

    @property
    def has_backbone(self) -> bool:
        """Whether the frozen backbone's output is computed for all rows at once."""
        return self._backbone is not None

    def of_clients(
        self,
        rows: Parameters,
        inputs: Inputs,
        labels: Tensor,
        packed: "Packed | None" = None,
        *,
        recorded: bool = False,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The same for several clients at once, which have `rows` (clients, *shape) of what they train:
        losses (clients, examples), and for each name (clients, examples, *shape). `packed`: the same
        examples, for the frozen backbone.

        `recorded`: the step is captured as a CUDA graph, so that costly Python runs once."""
        # One view per example, so that each gets its own gradient; they share memory.
        own = {name: _for_each(row, labels.shape[1]).requires_grad_() for name, row in rows.items()}
        one = partial(self._one, task=self._together)
        over_all = vmap(vmap(one, randomness="different"), randomness="different")
        shared = shared_linears(self._model, self._trained) if recorded else nullcontext()
        products = per_client_products(self._model, self._trained)
        with folded(self._model), with_gpu_kernels(labels.device):
            inputs = self._with_backbone(inputs, labels, 2, packed)
            # Gradients are taken around both vmaps: within them fused attention has no rule for them.
            with shared, products, self._ways(), torch.enable_grad():
                losses = over_all(own, inputs, labels)
                gradients = torch.autograd.grad(losses.sum(), list(own.values()), materialize_grads=True)
        return losses.detach(), dict(zip(own, gradients, strict=True))

    def _with_backbone(
        self, inputs: Inputs, labels: Tensor, lead: int, packed: "Packed | None" = None
    ) -> Inputs:
        """Add the output of the frozen backbone for all these rows, which have `lead` axes."""
        if self._backbone is None:
            return inputs
        if packed is None:
            rows = {key: value.flatten(0, lead - 1) for key, value in inputs.items()}
            batch = Batch(rows, labels.flatten(0, lead - 1))
        else:
            batch = Batch(packed.rows.inputs, packed.rows.labels)
        if not can_precompute(self._backbone, self._model, self._plain, batch, self._trained):
            self._backbone = None
            return inputs
        if lead > 1:  # whether there is a mask must not depend on any row
            batch = Batch(with_attention_mask(batch.inputs, self._model), batch.labels)
        with self._below(self._backbone.parts) if lead > 1 else nullcontext():
            read = backbone_output(self._backbone, self._plain, batch)

        def by_row(value: Tensor) -> Tensor:
            return value.unflatten(0, labels.shape[:lead]) if packed is None else value[packed.places]

        return inputs | {BACKBONE: tree_map(by_row, read)}

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
    """(clients, *shape) -> (clients, examples, *shape), a view on the same memory."""
    return row.detach().unsqueeze(1).expand(-1, examples, *(-1 for _ in row.shape[1:]))
