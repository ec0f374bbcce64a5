"""Local optimisers and their learning rates."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from fedfrozen_app.config import ClientConfig
from fedfrozen_app.exchange.names import parameter_of
from fedfrozen_app.exchange.role import Role

Roles = Mapping[str, Role]


def learning_rate(settings: ClientConfig, server_round: int, num_rounds: int) -> float:
    """The learning rate of a round. The schedule runs over rounds: each round has a fresh optimiser, which
    counts only its own steps."""
    last = max(num_rounds - 1, 1)
    done = min((server_round - 1) / last, 1.0)  # 0 in the first round, 1 in the last
    share = {
        "constant": 1.0,
        "linear": 1 - (1 - settings.lr_final) * done,
        "cosine": settings.lr_final + (1 - settings.lr_final) * (1 + math.cos(math.pi * done)) / 2,
    }[settings.lr_schedule]
    return settings.lr * share


def make_optimizer(
    settings: ClientConfig,
    parameters: Sequence[Tensor] | Sequence[dict[str, Any]],
    lr: float | Tensor,
    *,
    capturable: bool = False,
) -> Optimizer:
    """Make the local optimiser. `parameters` may be torch parameter groups. `capturable` keeps all state on
    the device, where a CUDA graph can replay it."""
    if settings.optimizer == "adamw":
        decay = settings.weight_decay
        return AdamW(parameters, lr=lr, weight_decay=decay, fused=True, capturable=capturable)
    return SGD(
        parameters,
        lr=lr,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def optimizer_for(
    settings: ClientConfig, roles: Roles, trained: Mapping[str, Tensor], rate: float
) -> Optimizer:
    """A fresh optimiser for one client. Head and fusion may have their own learning rates, on the same
    schedule."""
    groups = [
        {"params": [trained[name] for name in names], "lr": rate * scale}
        for scale, names in rate_groups(settings, roles, trained)
    ]
    return make_optimizer(settings, groups, rate)


def rate_groups(settings: ClientConfig, roles: Roles, names: Iterable[str]) -> list[tuple[float, list[str]]]:
    """Names grouped by learning rate, in units of `client.lr`; those with the default rate come first."""
    scales = rate_scales(settings)
    kinds: dict[str, list[str]] = {kind: [] for kind in ("", *scales)}
    for name in names:
        kind = roles[parameter_of(name)].kind
        kinds[kind if kind in scales else ""].append(name)
    return [(scales.get(kind, 1.0), own) for kind, own in kinds.items() if own]


def rate_scales(settings: ClientConfig) -> dict[str, float]:
    """Learning rates of the parameter kinds that have their own, in units of `client.lr`."""
    rates = {"head": settings.head_lr, "fusion": settings.fusion_lr}
    return {kind: rate / settings.lr for kind, rate in rates.items() if rate not in (None, settings.lr)}
