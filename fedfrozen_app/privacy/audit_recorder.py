"""Records an audited client's private steps, which `fedfrozen audit` then checks.

With `privacy.audited=CLIENT` that client's real rounds are recorded. The noisy gradients are read where the
optimiser receives them. Their noiseless value is computed independently: each example's gradient, clipped
here by its definition and summed in float64. The difference must be the noise that was paid for.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fedfrozen_app.core.seeds import generators_of
from fedfrozen_app.data.table import Table
from fedfrozen_app.files.seal import save_arrays
from fedfrozen_app.privacy.audit_record import AuditTotals
from fedfrozen_app.privacy.canaries import LENGTH, Canaries
from fedfrozen_app.privacy.dpsgd import Clipping, NoisyOptimizer, Recipe, exact_products
from fedfrozen_app.privacy.noise import Noise

MakeOptimizer = Callable[[Mapping[str, nn.Parameter]], Optimizer]


class ShadowModel:
    """Replays the steps from the recorded gradients: the client must send exactly their result."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], make_optimizer: MakeOptimizer) -> None:
        self.parameters = {
            name: nn.Parameter(value.detach().clone(), requires_grad=False)
            for name, value in parameters.items()
        }
        self._optimizer = make_optimizer(self.parameters)

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            self.parameters[name].grad = gradient.detach().clone()
        self._optimizer.step()


@dataclass
class Observations:
    """The observations of a round's steps."""

    seen: list[np.ndarray] = field(default_factory=list)  # a step's sum at each canary's element
    there: list[np.ndarray] = field(default_factory=list)  # whether the canary was in the step's sample
    first: Tensor | None = None  # the first step's noise
    last: Tensor | None = None
    first_state: list[Tensor] | None = None  # of torch's generators, before the first step


class AuditRecorder:
    """Wraps the `Clipping` that it records, and plants canaries in every sample."""

    def __init__(
        self,
        clipping: Clipping,
        canaries: Canaries,
        parameters: Mapping[str, nn.Parameter],
        make_optimizer: MakeOptimizer,
        recipe: Recipe,
        figures: AuditTotals,
        device: torch.device,
    ) -> None:
        self.optimizer: type[NoisyOptimizer] = clipping.optimizer
        self.figures, self.canaries = figures, canaries
        self._clipping, self._parameters, self._recipe = clipping, dict(parameters), recipe
        self._device = device
        self._elements = canaries.elements(parameters)
        self._shadow = ShadowModel(parameters, make_optimizer)
        self._observed = Observations()
        self._begin_step()

    def _begin_step(self) -> None:
        self._sum = {
            name: torch.zeros_like(value, dtype=torch.float64) for name, value in self._parameters.items()
        }
        self._present = np.zeros(len(self.canaries), dtype=bool)

    def load(self, table: Table, index: Tensor, parameters: Mapping[str, nn.Parameter]) -> Tensor:
        rows, planted = index[index < len(table)], index[index >= len(table)] - len(table)
        before = [generator.get_state() for generator in generators_of(self._device)]
        self._observed.first_state = self._observed.first_state or before
        losses = self._clipping.load(table, rows, parameters)
        self._add(table.take(rows), before)
        if len(planted):
            self._plant(planted.cpu().numpy())
        self.figures.sampled += len(index)
        return losses

    def each(self, part: Table, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        return self._clipping.each(part, parameters)

    def _add(self, part: Table, states: list[Tensor]) -> None:
        """Add these rows' expected part of the sum, with the dropout masks that they had."""
        generators = generators_of(self._device)
        after = [generator.get_state() for generator in generators]
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        with exact_products():
            gradients = self._clipping.each(part, self._parameters)
        for generator, state in zip(generators, after, strict=True):
            generator.set_state(state)
        if not len(part):
            return
        flat = [value.flatten(1).double().square().sum(dim=1) for value in gradients.values()]
        norms = torch.stack(flat).sum(dim=0).sqrt()
        factors = (self._recipe.max_grad_norm / norms).clamp(max=1.0)
        sound = torch.isfinite(norms)
        for name, value in gradients.items():
            self._sum[name] += torch.einsum("i,i...->...", factors[sound], value[sound].double())

    def _plant(self, numbers: np.ndarray) -> None:
        """Append canaries to the rows' gradients, so that the optimiser clips and sums them like rows."""
        self._present[numbers] = True
        arrays = np.array(self.canaries.names)[self.canaries.places[numbers, 0]]
        for name, parameter in self._parameters.items():
            here = np.flatnonzero(arrays == name)
            planted = parameter.new_zeros(len(numbers), parameter.numel())
            planted[here, self.canaries.places[numbers[here], 1]] = LENGTH * self._recipe.max_grad_norm
            rows = parameter.grad_sample  # type: ignore[attr-defined]
            parameter.grad_sample = torch.cat([rows, planted.view(-1, *parameter.shape)])  # type: ignore[attr-defined]

    def attach(self, optimizer: Optimizer, units: int) -> None:
        """Record every gradient that this optimiser receives."""
        self.figures.units = units
        optimizer.register_step_pre_hook(lambda *_: self._before_step())

    def _before_step(self) -> None:
        figures, bound, observed = self.figures, self._recipe.max_grad_norm, self._observed
        gradients: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            assert parameter.grad is not None
            gradients[name] = parameter.grad
        self._shadow.step(gradients)
        sent = [value.detach().double().flatten() * self._recipe.batch for value in gradients.values()]
        made_of = [self._sum[name].flatten() for name in gradients]
        rest = (torch.cat(sent) - torch.cat(made_of)) / bound
        known = self._elements >= 0
        seen = np.full(len(self.canaries), np.nan)
        seen[known] = rest[self._elements[known]].cpu().numpy()
        observed.seen.append(seen)
        observed.there.append(self._present & known)
        rest[self._elements[self._present & known]] -= 1
        rows_sum = torch.cat(made_of) / bound
        figures.along += float(rest @ rows_sum)
        figures.length += float(rows_sum.square().sum())
        noise = rest / figures.claimed.noise
        figures.squares += float(noise.square().sum())
        figures.elements += len(noise)
        if observed.last is None:
            observed.first = noise
        else:
            figures.products += float(noise @ observed.last)
            figures.pairs += len(noise)
        observed.last = noise
        figures.steps += 1
        self._begin_step()

    def close(self, fresh: Callable[[], Noise]) -> None:
        """Record whether a noise source that is rebuilt for this round repeats its numbers."""
        first_state = self._observed.first_state
        with fresh().dropout():
            states = [generator.get_state() for generator in generators_of(self._device)]
        zeros = torch.zeros(64, device=self._device)
        same = {
            "dropout": first_state is not None
            and all(torch.equal(*both) for both in zip(states, first_state, strict=True)),
            "samples": np.array_equal(fresh().poisson(256, 0.5), fresh().poisson(256, 0.5)),
            "noise": torch.equal(fresh().added_to(zeros, 1.0), fresh().added_to(zeros, 1.0)),
        }
        self.figures.repeats = tuple(name for name, equal in same.items() if equal)

    def write(self, path: Path) -> None:
        tensors = {
            f"made/{name}": value.detach().cpu().contiguous()
            for name, value in self._shadow.parameters.items()
        }
        tensors["seen"] = torch.from_numpy(np.array(self._observed.seen))
        tensors["there"] = torch.from_numpy(np.array(self._observed.there))
        if self._observed.first is not None:
            tensors["first"] = self._observed.first.float().cpu()
        part = path.with_suffix(".part")
        save_arrays(tensors, part, {"figures": json.dumps(asdict(self.figures))})
        part.replace(path)
