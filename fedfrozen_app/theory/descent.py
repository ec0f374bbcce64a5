"""FedAvg on the laboratory's problem, and FedFrozen for every warm-up length at once.

The full-model stage has to be computed step by step, once. The frozen stage does not: under a fixed kernel a
client's τ gradient steps on its ridge problem are one affine map of the value block,

    W → Gᵢ W + (I − Gᵢ) Wᵢ*        Gᵢ = (I − η(Aᵢ + λI))^τ,  Wᵢ* = (Aᵢ + λI)⁻¹ Bᵢ

so freezing after 0, 1, …, T rounds of one walk costs less than the walk itself. The rate η is constant within
a round: if it decays, the map changes from round to round.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from typing import Any, TypeVar

import torch
from rich.progress import track
from torch import Tensor

from fedfrozen_app.core.terminal import Console
from fedfrozen_app.server.agreement import Rule, follow, freeze_after
from fedfrozen_app.theory.attention_loss import Moments, gradients, moments
from fedfrozen_app.theory.problem import Problem, Setting, make

T = TypeVar("T")
FEW = 8  # jobs: fewer finish before other processes would have started
CLIENTS_AT_ONCE = 24  # across seeds; measured: a step's data then fit in a core's cache


@dataclass(frozen=True)
class Walk:
    """Rounds of FedAvg: the global model, and the clients' drift and common movement in each round."""

    kernel: Tensor  # (seeds, T+1, d, 2r)
    value: Tensor  # (seeds, T+1, d, o)
    kernel_drift: Tensor  # (seeds, T) D² = mean ‖uᵢ‖² − ‖ū‖² of the round's clients
    kernel_common: Tensor  # (seeds, T) ‖ū‖²
    value_drift: Tensor
    value_common: Tensor


def walk(
    problem: Problem,
    *,
    start: int = 0,
    until: int | None = None,
    origin: Walk | None = None,
    train: str = "all",
    watched: bool = False,
) -> Walk:
    """FedAvg for all seeds at once; starts from round `start` of `origin` if given.

    `train` may be "kernel" or "value", which freezes the other block. `watched`: show a progress bar.
    """
    setting, seeds = problem.setting, len(problem.seeds)
    kernel = problem.kernel if origin is None else origin.kernel[:, start]
    value = problem.value if origin is None else origin.value[:, start]
    kernels, values, movements = [kernel], [value], []
    rounds = range(start, setting.rounds if until is None else until)
    for number in shown(rounds, len(rounds)) if watched else rounds:
        cohort = problem.cohorts[:, number]  # (seeds, m)
        rows = (cohort + setting.clients * torch.arange(seeds).unsqueeze(1)).flatten()
        data = problem.data if len(rows) == len(problem.data.inputs) else problem.data[rows]
        size, rate = cohort.shape[1], setting.rate(number)
        own_kernel, own_value = (part.repeat_interleave(size, dim=0) for part in (kernel, value))
        for _ in range(setting.local_steps):
            to_kernel, to_value = gradients(data, own_kernel, own_value)
            if train != "value":
                own_kernel = own_kernel - rate * (to_kernel + setting.ridge * own_kernel)
            if train != "kernel":
                own_value = own_value - rate * (to_value + setting.ridge * own_value)
        new_kernel, *of_kernel = _average(kernel, own_kernel)
        new_value, *of_value = _average(value, own_value)
        kernel, value = new_kernel, new_value
        kernels.append(kernel)
        values.append(value)
        movements.append(torch.stack([*of_kernel, *of_value]))
    stacked = torch.stack(movements, dim=2) if movements else torch.zeros(4, seeds, 0, dtype=kernel.dtype)
    return Walk(torch.stack(kernels, 1), torch.stack(values, 1), *stacked)


def agreements(walked: Walk) -> Tensor:
    """The agreement that `warmup_rounds=auto` observes on each seed's walk, (seeds, T)."""
    updates = walked.kernel.diff(dim=1)
    found = []
    for seed in updates:
        direction: dict[str, Tensor] = {}
        found.append([follow(direction, {"kernel": update}) for update in seed])
    return torch.tensor(found, dtype=updates.dtype)


def auto_stops(setting: Setting, walked: Walk, losses: Tensor, rule: Rule) -> list[int | None]:
    """The round in which `auto` freezes each seed's walk. `losses`, (seeds, T+1), replace clients'
    reports."""
    if setting.local_steps == 1:
        return [None] * len(losses)
    seen = zip(agreements(walked).tolist(), walked.kernel_drift.tolist(), losses[:, 1:].tolist(), strict=True)
    return [freeze_after(agreed, drift, own, rule) for agreed, drift, own in seen]


def _average(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(seeds, …) and its clients' (seeds · m, …) -> the mean, D² and ‖ū‖² of each seed."""
    updates = after.unflatten(0, (len(before), -1)) - before.unsqueeze(1)
    mean = updates.mean(1)
    common = mean.square().sum((-2, -1))
    return before + mean, (updates - mean.unsqueeze(1)).square().sum((1, 2, 3)) / updates.shape[1], common


@dataclass(frozen=True)
class Measures:
    """Measures of a walk per round from 0 to T: (seeds, T+1) each."""

    objective: Tensor  # F(Φ, W)
    profile: Tensor  # P(Φ)
    slope: Tensor  # ‖∇P(Φ)‖, by its key in metrics.jsonl
    value_gap: Tensor  # ‖W − W*(Φ)‖


def moments_along(problem: Problem, kernels: Tensor) -> Moments:
    """Moments of every client under each of (seeds, k, d, 2r) kernels; leading axes (seeds, k, clients)."""
    seeds, count = kernels.shape[:2]
    found = []
    for place in range(count):  # one kernel at a time: the data are read in place
        found.append(moments(problem.data, kernels[:, place].repeat_interleave(problem.setting.clients, 0)))
    parts = (
        torch.stack([getattr(each, name).unflatten(0, (seeds, -1)) for each in found], dim=1)
        for name in ("square", "cross", "target")
    )
    return Moments(*parts)


def pooled_along(problem: Problem, kernels: Tensor) -> Moments:
    """Moments of all clients pooled: (seeds, k). Every client's would not fit in memory for long walks."""
    found = [moments_along(problem, part).mean(2) for part in kernels.split(1, dim=1)]
    return Moments(*(torch.cat([getattr(each, f.name) for each in found], dim=1) for f in fields(Moments)))


def objective(problem: Problem, walked: Walk) -> Tensor:
    """F(Φ, W) along a walk: (seeds, rounds + 1)."""
    pooled = pooled_along(problem, walked.kernel)
    return _objective(pooled, walked.kernel, walked.value, problem.setting.ridge)


def measure(problem: Problem, walked: Walk) -> Measures:
    setting = problem.setting
    pooled = pooled_along(problem, walked.kernel)
    best = pooled.best_value(setting.ridge)
    norms = []
    for place in range(best.shape[1]):
        own = (part[:, place].repeat_interleave(setting.clients, 0) for part in (walked.kernel, best))
        to_kernel, _ = gradients(problem.data, *own)
        mean = to_kernel.unflatten(0, (-1, setting.clients)).mean(1)
        norms.append((mean + setting.ridge * walked.kernel[:, place]).square().sum((1, 2)).sqrt())
    return Measures(
        objective=_objective(pooled, walked.kernel, walked.value, setting.ridge),
        profile=_objective(pooled, walked.kernel, best, setting.ridge),
        slope=torch.stack(norms, dim=1),
        value_gap=(walked.value - best).square().sum((-2, -1)).sqrt(),
    )


def _objective(pooled: Moments, kernel: Tensor, value: Tensor, ridge: float) -> Tensor:
    penalty = kernel.square().sum((-2, -1)) + value.square().sum((-2, -1))
    return pooled.loss(value) + ridge / 2 * penalty


def freeze(problem: Problem, walked: Walk, after: list[int], along: Tensor | None = None) -> Tensor:
    """F after every round, (seeds, len(after), T+1), of runs that freeze the kernel after `after` rounds.

    `along`: the walk's own F, if already computed.
    """
    setting = problem.setting
    kernels, value = walked.kernel[:, after], walked.value[:, after].clone()  # (seeds, k, …)
    each = moments_along(problem, kernels)  # (seeds, k, clients, …)
    pooled = each.mean(2)
    eye = torch.eye(setting.width, dtype=value.dtype)
    best, rate = each.best_value(setting.ridge), None
    along = objective(problem, walked) if along is None else along
    curves = along.unsqueeze(1).repeat(1, len(after), 1)
    starts = torch.tensor(after)
    full = setting.cohort == setting.clients
    for number in range(min(after), setting.rounds):
        if setting.rate(number) != rate:
            rate = setting.rate(number)
            steps = eye - rate * (each.square + setting.ridge * eye)
            shrink = torch.linalg.matrix_power(steps, setting.local_steps)
            shift = (eye - shrink) @ best
            mean_shrink, mean_shift = shrink.mean(2), shift.mean(2)
        if not full:
            drawn = problem.cohorts[:, number]  # (seeds, m)
            seeds = torch.arange(len(drawn)).unsqueeze(1)
            mean_shrink = shrink[seeds, :, drawn].mean(1)
            mean_shift = shift[seeds, :, drawn].mean(1)
        frozen = number >= starts  # (k,)
        value = torch.where(frozen[:, None, None], mean_shrink @ value + mean_shift, value)
        now = _objective(pooled, kernels, value, setting.ridge)
        curves[:, frozen, number + 1] = now[:, frozen]
    return curves


# Many settings ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """All seeds of one setting: the walk that never freezes, and F of freezing after each of its rounds."""

    walk: Walk
    measures: Measures
    curves: Tensor  # (seeds, warm-up 0..T, round 0..T)

    @property
    def final(self) -> Tensor:
        """(seeds, warm-up 0..T)."""
        return self.curves[..., -1]


def explore(settings: Iterable[Setting], seeds: Sequence[int]) -> dict[Setting, Outcome]:
    """Every setting once, for all seeds."""
    # The longest first, so that no long job runs alone at the end.
    order = sorted(set(settings), key=lambda s: -s.local_steps * s.cohort * s.rounds)
    jobs = [(setting, some) for setting in order for some in split(seeds, setting.cohort)]
    parts: dict[Setting, list[Outcome]] = {setting: [] for setting in order}
    for (setting, _), found in zip(jobs, in_processes(_explore_one, jobs), strict=True):
        parts[setting].append(found)
    return {setting: _join(found) for setting, found in parts.items()}


def split(seeds: Sequence[int], clients: int) -> list[tuple[int, ...]]:
    """Split the seeds evenly into groups of at most CLIENTS_AT_ONCE clients."""
    groups = min(len(seeds), -(-len(seeds) * clients // CLIENTS_AT_ONCE))
    ends = [round(number * len(seeds) / groups) for number in range(groups + 1)]
    return [tuple(seeds[start:end]) for start, end in pairwise(ends)]


def in_processes(work: Callable[..., T], jobs: Sequence[tuple]) -> list[T]:
    """Run jobs with one process per core: with arrays this small threads would wait for the GIL. Few jobs run
    in this process."""
    threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    torch.set_num_threads(1)  # more threads would only wait
    try:
        if len(jobs) < FEW or cores == 1:
            return [work(*job) for job in shown(jobs, len(jobs))]
        start = partial(torch.set_num_threads, 1)
        with ProcessPoolExecutor(cores, get_context("spawn"), start) as pool:
            return list(shown(pool.map(work, *zip(*jobs, strict=True)), len(jobs)))
    finally:
        torch.set_num_threads(threads)


def shown(found: Iterable[T], total: int) -> Iterator[T]:
    """Yield the items, with a progress bar and the time left on a terminal."""
    console = Console(stderr=True)
    yield from track(found, "walking", total=total, console=console, disable=not console.is_terminal)


def _explore_one(setting: Setting, seeds: tuple[int, ...]) -> Outcome:
    problem = make(setting, seeds)
    walked = walk(problem)
    measures = measure(problem, walked)
    curves = freeze(problem, walked, list(range(setting.rounds + 1)), measures.objective)
    return Outcome(walked, measures, curves)


def _join(parts: list[Outcome]) -> Outcome:
    """Concatenate outcomes of groups of seeds."""

    def joined(found: list[Any]) -> list[Tensor]:
        return [torch.cat([getattr(part, name.name) for part in found]) for name in fields(found[0])]

    return Outcome(
        Walk(*joined([part.walk for part in parts])),
        Measures(*joined([part.measures for part in parts])),
        torch.cat([part.curves for part in parts]),
    )
