"""Ghost clipping: Li et al., Large Language Models Can Be Strong Differentially Private Learners, 2022.

    ‖g_i‖² = Σ_{t,u} (a_t · a_u)(b_t · b_u)        a linear layer's inputs a, gradients b at its outputs

over pairs of tokens t, u. So an example's norm is known without its gradient, and a second backward pass over
Σ c_i · loss_i, with c_i = min(1, C/‖g_i‖), gives the clipped sum. Memory grows with the activations, not with
examples times parameters. Opacus' hooks do this; its optimiser noises and scales. They observe a layer's
inputs and outputs, so everything that is trained must be a layer that is called once and treats every example
alike.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.table import Table
from fedfrozen_app.models.task import Task
from fedfrozen_app.privacy.dpsgd import NoisyOptimizer, exact_products
from fedfrozen_app.privacy.opacus_parts import (
    DPOptimizerFastGradientClipping,
    GradSampleHooksFastGradientClipping,
)

SERVED = ("Linear", "LayerNorm", "RMSNorm", "Conv1D", "LlamaRMSNorm", "Dinov2LayerScale")  # and tested


class GhostOptimizer(NoisyOptimizer, DPOptimizerFastGradientClipping):
    """The gradients on the parameters are already clipped and summed."""


class GhostClipping:
    """The clipped sum of a batch's gradients, for the names that are trained."""

    optimizer: type[NoisyOptimizer] = GhostOptimizer

    def __init__(self, model: nn.Module, task: Task, trained: Sequence[str], max_grad_norm: float) -> None:
        self._model, self._task, self._bound = model, task, max_grad_norm
        self._trained = set(trained)
        self._owners = [model.get_submodule(name.rpartition(".")[0]) for name in trained]
        for name, owner in zip(trained, self._owners, strict=True):
            if (kind := type(owner).__name__) not in SERVED:
                raise UserError(
                    f"privacy.clipping=ghost cannot read the gradient norm of {name} off its layer "
                    f"({kind}): freeze it, as some strategies do, or use privacy.clipping=per_example."
                )

    def load(self, table: Table, index: Tensor, parameters: Mapping[str, nn.Parameter]) -> Tensor:
        part = table.take(index)
        if not len(part):  # a Poisson sample may be empty
            for parameter in parameters.values():
                parameter.grad = torch.zeros_like(parameter)
            return torch.zeros(0, device=part.labels.device)
        with self._hooked() as hooks:
            losses = self._task.losses_of(part)
            slots = list(parameters.values())
            torch.autograd.backward(losses.sum(), inputs=slots, retain_graph=True)
            factors = hooks.get_clipping_coef()
            sound = torch.isfinite(hooks.per_sample_gradient_norms)
            hooks.disable_hooks()
            for parameter in slots:
                parameter.grad = None
            if whole := bool(sound.all()):
                torch.autograd.backward((factors * losses).sum(), inputs=slots)
        if not whole:  # drop such examples: a sum that is not finite would reveal them
            return self.load(table, index[sound], parameters)
        return losses.detach()

    def each(self, part: Table, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """One backward pass for every example."""
        slots = list(parameters.values())
        with self._only_trained():
            losses = self._task.losses_of(part) if len(part) else torch.zeros(0)
            found = [
                torch.autograd.grad(loss, slots, retain_graph=True, materialize_grads=True) for loss in losses
            ]
        return {
            name: torch.stack(rows) for name, rows in zip(parameters, zip(*found, strict=True), strict=False)
        }

    @contextmanager
    def _only_trained(self) -> Iterator[None]:
        """Compute gradients for what is trained and nothing else; restores everything afterwards."""
        wanted = {name: value.requires_grad for name, value in self._model.named_parameters()}
        for name, value in self._model.named_parameters():
            value.requires_grad_(name in self._trained)
        try:
            yield
        finally:
            for name, value in self._model.named_parameters():
                value.requires_grad_(wanted[name])

    @contextmanager
    def _hooked(self) -> Iterator[GradSampleHooksFastGradientClipping]:
        """Put hooks on what is trained and nothing else; removes them afterwards."""
        modes = [owner.training for owner in self._owners]
        for owner in self._owners:  # hooks ignore layers in eval mode; these are mode-independent
            owner.training = True
        with self._only_trained():
            hooks = GradSampleHooksFastGradientClipping(
                self._model, loss_reduction="sum", strict=False, max_grad_norm=self._bound
            )
            try:
                with exact_products(), warnings.catch_warnings():
                    # The first trained layer's input needs no gradient.
                    warnings.filterwarnings("ignore", message="Full backward hook is firing")
                    yield hooks
            finally:
                hooks.cleanup()
                for owner, mode in zip(self._owners, modes, strict=True):
                    owner.training = mode
