"""Clients whose kernels, values and inputs differ by adjustable amounts, and the starting point."""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy.special import softmax
from torch import Tensor

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.theory.attention_loss import FEATURE_MAPS, SOFTMAX, Data

KERNEL_PART, INPUT_PART = 0.7, 0.5  # shares of heterogeneity: of true kernels, of inputs' means
TRUTH, START, COHORT, VALUES = 0, 77, 177, 277  # generators: added to the seed
SCHEDULES = ("constant", "cosine")


@dataclass(frozen=True)
class Setting:
    """One experiment of the laboratory."""

    heterogeneity: float = 1.0
    local_steps: int = 40
    clients: int = 8
    participation: float = 1.0
    feature_map: str = "identity"
    rounds: int = 150
    lr: float = 0.02
    ridge: float = 0.01
    sequences: int = 32
    tokens: int = 8
    width: int = 8
    rank: int = 4
    outputs: int = 4
    noise: float = 0.1
    lr_schedule: str = "constant"
    lr_final: float = 0.01  # cosine: the last round's rate, as a share of lr
    kernel_spread: float | None = None  # None, here and below: derived from heterogeneity
    value_spread: float | None = None
    input_spread: float | None = None

    def __post_init__(self) -> None:
        if self.feature_map not in FEATURE_MAPS:
            raise UserError(
                f"feature_map={self.feature_map} is unknown: choose one of {', '.join(FEATURE_MAPS)}."
            )
        if self.lr_schedule not in SCHEDULES:
            raise UserError(
                f"lr_schedule={self.lr_schedule} is unknown: choose one of {', '.join(SCHEDULES)}."
            )
        if not 0 < self.lr_final <= 1:
            raise UserError(f"lr_final={self.lr_final:g} must be above 0 and at most 1.")
        for name in ("kernel_spread", "value_spread", "input_spread"):
            if (getattr(self, name) or 0) < 0:
                raise UserError(f"{name}={getattr(self, name):g} must not be negative.")
        if not 0 < self.participation <= 1:
            raise UserError(f"participation={self.participation:g} must be above 0 and at most 1.")
        for name in ("local_steps", "clients", "rounds", "sequences", "tokens", "width", "rank", "outputs"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} must be at least 1.")
        if min(self.heterogeneity, self.noise) < 0 or min(self.lr, self.ridge) <= 0:
            raise UserError("heterogeneity and noise must not be negative; lr and ridge must be above 0.")

    @property
    def cohort(self) -> int:
        return max(1, round(self.participation * self.clients))

    @property
    def spreads(self) -> tuple[float, float, float]:
        """The spread of clients' true kernels, true values and inputs' means."""
        parts = (KERNEL_PART * self.heterogeneity, 0.0, INPUT_PART * self.heterogeneity)
        own = (self.kernel_spread, self.value_spread, self.input_spread)
        kernel, value, inputs = (
            part if dial is None else dial for dial, part in zip(own, parts, strict=True)
        )
        return kernel, value, inputs

    def rate(self, number: int) -> float:
        """The learning rate of a round, counted from 0."""
        if self.lr_schedule == "constant" or self.rounds == 1:
            return self.lr
        fall = (1 + math.cos(math.pi * number / (self.rounds - 1))) / 2  # from 1 to 0
        return self.lr * (self.lr_final + (1 - self.lr_final) * fall)


@dataclass(frozen=True)
class Problem:
    """A setting's data for several seeds: client c of seed s is row s · clients + c of `data`."""

    setting: Setting
    seeds: tuple[int, ...]
    data: Data
    kernel: Tensor = field(repr=False)  # (seeds, d, 2r) where training starts
    value: Tensor = field(repr=False)  # (seeds, d, o)
    cohorts: Tensor = field(repr=False)  # (seeds, rounds, cohort) client numbers


def make(setting: Setting, seeds: tuple[int, ...]) -> Problem:
    parts = [_draw(setting, seed) for seed in seeds]
    inputs, targets, kernel, value, cohorts = (
        torch.from_numpy(np.stack(arrays)) for arrays in zip(*parts, strict=True)
    )
    # (seeds, clients, n, tokens, d) -> (seeds · clients, d, tokens, n)
    rows, wanted = (part.flatten(0, 1).permute(0, 3, 2, 1).contiguous() for part in (inputs, targets))
    return Problem(setting, seeds, Data(rows, wanted, setting.feature_map), kernel, value, cohorts)


def _draw(setting: Setting, seed: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed + TRUTH)
    d, r, o = setting.width, setting.rank, setting.outputs
    query, key, value = (rng.normal(size=(d, size)) / np.sqrt(d) for size in (r, r, o))
    kernel_spread, value_spread, input_spread = setting.spreads
    shift = kernel_spread / np.sqrt(d)
    # A separate generator: the spread of values must not change the other draws.
    of_values = np.random.default_rng(seed + VALUES)
    inputs, targets = [], []
    for _ in range(setting.clients):
        mean = input_spread * rng.normal(size=d)
        h = rng.normal(size=(setting.sequences, setting.tokens, d)) + mean
        h /= np.sqrt(np.mean(h**2))
        own_query = query + shift * rng.normal(size=(d, r))
        own_key = key + shift * rng.normal(size=(d, r))
        own_value = value + value_spread / np.sqrt(d) * of_values.normal(size=(d, o))
        y = _attend(setting, h, own_query, own_key) @ own_value
        inputs.append(h)
        targets.append(y / np.sqrt(np.mean(y**2)) + setting.noise * rng.normal(size=y.shape))
    start = np.random.default_rng(seed + START)
    kernel = np.concatenate([start.normal(size=(d, r)) / np.sqrt(d) for _ in range(2)], axis=1)
    drawing = np.random.default_rng(seed + COHORT)
    cohorts = [
        np.sort(drawing.choice(setting.clients, setting.cohort, replace=False)) for _ in range(setting.rounds)
    ]
    return (np.stack(inputs), np.stack(targets), kernel, start.normal(size=(d, o)) * 0.1, np.stack(cohorts))


def _attend(setting: Setting, h: np.ndarray, query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Z by its formula, for (n, tokens, d) of one client."""
    if setting.feature_map == SOFTMAX:
        return softmax(h @ query @ (h @ key).transpose(0, 2, 1) / np.sqrt(setting.rank), axis=2) @ h

    def phi(x: np.ndarray) -> np.ndarray:
        if setting.feature_map == "identity":
            return x
        if setting.feature_map == "relu":
            return np.maximum(x, 0)
        return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))

    scale = setting.tokens * np.sqrt(setting.rank)
    return phi(h @ query) @ (phi(h @ key).transpose(0, 2, 1) @ h) / scale
