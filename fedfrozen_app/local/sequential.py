"""The sequential runner: one client after another on one resident model."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from fedfrozen_app import registry
from fedfrozen_app.config import ClientConfig
from fedfrozen_app.exchange.plan import Order
from fedfrozen_app.models.task import Batch
from fedfrozen_app.seeds import seed_for, seeded, torch_generator

if TYPE_CHECKING:
    from fedfrozen_app.local.resident import Resident


@dataclass(frozen=True)
class LocalResult:
    """What a client has after its local work; `trained` are copies, free to leave."""

    trained: dict[str, Tensor]
    examples: int
    metrics: dict[str, float]


class LocalSteps(Protocol):
    """Take a client's local steps with the model as it is loaded, and say their mean loss.

    `start` holds the values the model was loaded with.
    """

    def __call__(
        self, resident: "Resident", client: str, order: Order, start: Mapping[str, Tensor]
    ) -> Tensor: ...


def train_client(
    resident: "Resident", client: str, order: Order, start: dict[str, Tensor], steps: LocalSteps | None = None
) -> LocalResult:
    """Train one client for one round. `start` holds every parameter; those that train lie on the device."""
    began = time.perf_counter()
    rows = resident.rows(client)
    resident.load(start, order.base)
    metrics: dict[str, float] = {}
    if len(rows.validation):
        metrics["client_val_before"] = resident.evaluate_rows(rows.validation)[resident.task.headline]

    resident.touched(order.plan.trained)
    # Looked at here, once: no wait for the device between the steps.
    metrics["train_loss"] = float((steps or eager_steps)(resident, client, order, start))
    if len(rows.validation):
        metrics["client_val_after"] = resident.evaluate_rows(rows.validation)[resident.task.headline]
    if order.plan.private and resident.judges(order.round):
        # A personal model exists only here, so the client judges it where it can.
        metrics |= resident.judge_personal(client)
    metrics |= resident.figures()
    metrics["client_seconds"] = time.perf_counter() - began
    result = {name: resident.parameters[name].detach().clone() for name in order.plan.trained}
    return LocalResult(result, len(rows.train), metrics)


def eager_steps(resident: "Resident", client: str, order: Order, start: Mapping[str, Tensor]) -> Tensor:
    """Step by step, as torch is usually used."""
    settings, seed, rows = resident.config.client, resident.config.seed, resident.rows(client)
    trained = {name: resident.parameters[name] for name in order.plan.trained}
    wanted = set(trained)
    for name, parameter in resident.parameters.items():
        parameter.requires_grad_(name in wanted)
    anchor = {name: start[name] for name in trained}
    algorithm = registry.find("algorithms", order.algorithm)
    loss_of = partial(algorithm, task=resident.task, anchor=anchor, **order.settings)
    # Only trained names enter: decoupled weight decay would move a frozen one even with a zero gradient.
    optimizer = optimizer_for(resident, trained, learning_rate(settings, order.round, resident))
    weights = resident.class_weights(rows.train) if settings.class_weights else None

    losses: list[Tensor] = []
    resident.model.train()
    with seeded(seed_for(seed, "dropout", client, order.round), resident.device):
        drawn, sizes = drawn_rows(rows.train, settings, seed, client, order.round)
        for index in drawn.to(resident.device).split(sizes):
            batch = Batch(*resident.take(index), weights)
            loss = loss_of(resident.parameters, batch)
            for parameter in trained.values():
                parameter.grad = None
            loss.backward()
            if settings.clip is not None:
                torch.nn.utils.clip_grad_norm_(trained.values(), settings.clip)
            optimizer.step()
            losses.append(loss.detach())
    for parameter in trained.values():
        parameter.grad = None  # its memory is the next client's
    resident.model.eval()
    return torch.stack(losses).double().mean()


def judge_client(
    resident: "Resident",
    client: str,
    order: Order,
    start: dict[str, Tensor],
    steps: LocalSteps | None = None,
) -> dict[str, float]:
    """The headline figure on the client's own test rows: of the global model, of its own, and that after
    one more round of local training, of which nothing is kept."""
    own = resident.own_test(client)
    figures: dict[str, float] = {"test_rows": len(own), "train_rows": len(resident.rows(client).train)}
    if not len(own):
        return figures
    resident.load(start, order.base)
    if not order.plan.private or resident.has_global:
        with resident.only_global():
            figures["global"] = resident.task.evaluate(own)[resident.task.headline]
    figures["personal"] = resident.task.evaluate(own)[resident.task.headline]
    if order.plan.trained:
        train_client(resident, client, order, start, steps)
        figures["after"] = resident.task.evaluate(own)[resident.task.headline]
    return figures


def drawn_rows(
    rows: Tensor, settings: ClientConfig, seed: int, client: str, server_round: int
) -> tuple[Tensor, list[int]]:
    """The row numbers of all steps one after another, shuffled anew every epoch by the client's own
    generator, and how many of them each step takes."""
    generator = torch_generator(seed, "batches", client, server_round)
    own, count = rows.numpy(), len(rows)  # numpy's indexing: there are many small clients
    epochs = [own[torch.randperm(count, generator=generator).numpy()] for _ in range(settings.local_epochs)]
    whole, rest = divmod(count, settings.batch_size)
    sizes = ([settings.batch_size] * whole + [rest] * (rest > 0)) * settings.local_epochs
    sizes = sizes[: settings.local_steps]
    return torch.from_numpy(np.concatenate(epochs)[: sum(sizes)]), sizes


def batches(rows: Tensor, settings: ClientConfig, seed: int, client: str, server_round: int) -> list[Tensor]:
    """The row numbers of each step."""
    drawn, sizes = drawn_rows(rows, settings, seed, client, server_round)
    return list(drawn.split(sizes))


def make_optimizer(
    settings: ClientConfig, parameters: list[Tensor], lr: float | Tensor, *, capturable: bool = False
) -> Optimizer:
    """`capturable` keeps every state on the device, where a CUDA graph can replay it."""
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


def optimizer_for(resident: "Resident", trained: Mapping[str, Tensor], rate: float) -> Optimizer:
    """A fresh one for one client; head and fusion may have rates of their own, on the same schedule."""
    settings = resident.config.client
    optimizer = make_optimizer(settings, list(trained.values()), rate)
    (others,) = optimizer.param_groups
    for kind, scale in rate_scales(settings).items():
        own = [value for name, value in trained.items() if resident.roles[name].kind == kind]
        if own:
            inside = {id(value) for value in own}
            others["params"] = [value for value in others["params"] if id(value) not in inside]
            optimizer.add_param_group({"params": own, "lr": rate * scale})
    return optimizer


def rate_scales(settings: ClientConfig) -> dict[str, float]:
    """The kinds of parameters with a learning rate of their own, in units of `client.lr`."""
    own = {"head": settings.head_lr, "fusion": settings.fusion_lr}
    return {kind: rate / settings.lr for kind, rate in own.items() if rate not in (None, settings.lr)}


def learning_rate(settings: ClientConfig, server_round: int, resident: "Resident") -> float:
    """The schedule runs over rounds: a fresh optimiser every round knows only its own steps."""
    last = max(resident.config.num_rounds - 1, 1)
    done = min((server_round - 1) / last, 1.0)  # 0 in the first round, 1 in the last
    share = {
        "constant": 1.0,
        "linear": 1 - (1 - settings.lr_final) * done,
        "cosine": settings.lr_final + (1 - settings.lr_final) * (1 + math.cos(math.pi * done)) / 2,
    }[settings.lr_schedule]
    return settings.lr * share
