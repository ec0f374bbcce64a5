"""A lower bound on epsilon from planted canaries: Steinke, Nasr and Jagielski 2023, arXiv 2305.08846.

Each of m canaries is planted by the toss of a coin. The client's private steps are taken as in a run, and an
adversary who sees every noisy gradient guesses which canaries were there. Under (ε, 0)-privacy the number of
right guesses among r is at most binomial with chance e^ε/(1 + e^ε), so many right guesses rule out a small ε.
For δ = 0 the bound is Clopper and Pearson's. Privacy holds for every data set and every way to use the
gradients, so the auditor may choose both: canaries are random inputs, and the weights stay where they are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.stats import binom
from torch import Tensor
from torch.optim import Optimizer

from fedfrozen_app.data.table import Table
from fedfrozen_app.models.roles import is_embedding
from fedfrozen_app.privacy.dpsgd import Clipping, ExampleGradients, Recipe, plain_loss, train_steps
from fedfrozen_app.privacy.ghost import GhostClipping
from fedfrozen_app.privacy.noise import Noise
from fedfrozen_app.seeds import numpy_generator

if TYPE_CHECKING:
    from fedfrozen_app.local.resident import Resident

CONFIDENCE = 0.95
MOST_PARAMETERS = 2_000_000  # a larger model is audited on its head and last layer
REAL_ROWS = 100  # of the client, beside the canaries
MOST_EPSILON = 50.0


@dataclass(frozen=True)
class CanaryResult:
    canaries: int
    planted: int
    guesses: int
    right: int
    epsilon_lower: float  # with 95 % confidence


class Recorder(Optimizer):
    """Adds the gradients up and leaves the weights alone: what an adversary sees of all steps."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__(parameters, {})
        self.total = [torch.zeros_like(value, dtype=torch.float64) for value in parameters]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for total, parameter in zip(self.total, self.param_groups[0]["params"], strict=True):
            total += parameter.grad.detach().double()


def rehearse(
    resident: "Resident", rows: Tensor, recipe: Recipe, *, canaries: int, delta: float, seed: int
) -> CanaryResult:
    """Plant, take the recipe's steps on the model as it is loaded, guess, and bound ε."""
    generator = numpy_generator(seed, "audit canaries")
    names = audited_names(resident)
    parameters = {name: resident.parameters[name] for name in names}
    gradients = ExampleGradients(resident.model, resident.task, names, plain_loss)
    clipping: Clipping = gradients
    if uses_ghost_clipping(resident):
        clipping = GhostClipping(resident.model, resident.task, names, recipe.max_grad_norm)
    real = resident.train_table.take(rows[:REAL_ROWS].to(resident.device))
    planted_table = random_rows(resident, canaries, generator)
    table = Table(
        {name: torch.cat([real.inputs[name], planted_table.inputs[name]]) for name in real.inputs},
        torch.cat([real.labels, planted_table.labels]),
    )
    coins = generator.random(canaries) < 0.5
    present = [*range(len(real)), *(len(real) + np.flatnonzero(coins)).tolist()]
    recorder = Recorder(list(parameters.values()))
    resident.model.eval()
    units = [np.array([row]) for row in present]
    # A sum of its own scale: nothing is divided by the expected size.
    train_steps(
        clipping,
        parameters,
        recorder,
        table,
        units,
        replace(recipe, batch=1.0),
        Noise(resident.device, (seed, "audit", 0)),
    )
    seen = torch.cat([total.flatten() for total in recorder.total])
    scores = estimate_coefficients(seen, directions(gradients, table, recipe.physical_batch))[len(real) :]
    guesses = 2 * (canaries // 4)
    ranked = np.argsort(scores)
    right = int(coins[ranked[-(guesses // 2) :]].sum() + (~coins[ranked[: guesses // 2]]).sum())
    bound = epsilon_lower(canaries, guesses, right, delta)
    return CanaryResult(canaries, int(coins.sum()), guesses, right, bound)


def uses_ghost_clipping(resident: "Resident") -> bool:
    """Whether the run clipped without the gradients of single examples; then so does its rehearsal."""
    return resident.config.privacy.name != "none" and resident.config.privacy.clipping == "ghost"


def audited_names(resident: "Resident") -> list[str]:
    if sum(value.numel() for value in resident.parameters.values()) <= MOST_PARAMETERS:
        unserved = uses_ghost_clipping(resident)  # it cannot read an embedding's gradient norm
        return [n for n in resident.parameters if not (unserved and is_embedding(resident.roles[n]))]
    last = max((role.layer for role in resident.roles.values() if role.layer is not None), default=None)
    return [name for name, role in resident.roles.items() if role.kind == "head" or role.layer == last]


def random_rows(resident: "Resident", count: int, generator: np.random.Generator) -> Table:
    """Noise pictures or random words, with the labels of random rows: unlike the data, and each other."""
    table = resident.train_table
    inputs = {}
    for name, values in table.inputs.items():
        shape = (count, *values.shape[1:])
        if name == "pixel_values":
            drawn = torch.from_numpy(generator.integers(0, 256, shape, dtype=np.uint8))
        elif name == "input_ids":
            drawn = torch.from_numpy(generator.integers(1, max(resident.corpus.vocab_size, 2), shape))
        else:
            drawn = torch.ones(shape) if name == "attention_mask" else torch.zeros(shape)
        inputs[name] = drawn.to(values)
    rows = torch.from_numpy(generator.integers(0, len(table), count)).to(table.labels.device)
    return Table(inputs, table.labels[rows])


def directions(gradients: ExampleGradients, table: Table, size: int) -> Tensor:
    """(rows, elements): each row's gradient at unit length."""
    parts = []
    for index in torch.arange(len(table), device=table.labels.device).split(size):
        part = table.take(index)
        _, slopes = gradients(part.inputs, part.labels)
        flat = torch.cat([value.flatten(1) for value in slopes.values()], dim=1).double()
        parts.append(flat / torch.linalg.vector_norm(flat, dim=1, keepdim=True).clamp(min=1e-12))
    return torch.cat(parts)


def estimate_coefficients(seen: Tensor, basis: Tensor) -> np.ndarray:
    """How much of each row's direction is in the sum: the best linear guess, as gradients are alike.

    What lies outside all directions is noise, so the sum itself says how much noise to reckon with.
    """
    rows, elements = basis.shape
    gram = basis @ basis.T
    inside, outside = _split(seen, basis)
    noise = outside / max(elements - rows, 1)  # variance of one element
    signal = max(inside - rows * noise, 1e-12 * inside) / rows  # and of one row's coefficient
    gram.diagonal().add_(max(noise / signal, 1e-9))
    return torch.linalg.solve(gram, basis @ seen).cpu().numpy()


def _split(seen: Tensor, basis: Tensor) -> tuple[float, float]:
    """The squared length of the part within the directions' span, and of the rest."""
    span, _ = torch.linalg.qr(basis.T)
    inside = float((span.T @ seen).square().sum())
    return inside, max(float(seen.square().sum()) - inside, 0.0)


def p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """At most this is the chance of so many right guesses under (ε, δ)-privacy (theorem 5.2 of the paper)."""
    chance = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(right - 1, guesses, chance))
    if not delta or not right:
        return tail
    # α = max over i of P(right − i ≤ B < right) / i
    below = binom.pmf(np.arange(right - 1, -1, -1), guesses, chance).cumsum()
    alpha = float((below / np.arange(1, right + 1)).max())
    return min(1.0, tail + 2 * canaries * delta * alpha)


def epsilon_lower(canaries: int, guesses: int, right: int, delta: float) -> float:
    """The largest ε that so many right guesses rule out at 95 %; 0 when they rule out none."""

    def excess(epsilon: float) -> float:
        return p_value(canaries, guesses, right, epsilon, delta) - (1 - CONFIDENCE)

    if excess(0.0) >= 0:
        return 0.0
    return MOST_EPSILON if excess(MOST_EPSILON) < 0 else float(brentq(excess, 0.0, MOST_EPSILON))
