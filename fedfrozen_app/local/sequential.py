"""The sequential runner: one client after another on one resident model."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from fedfrozen_app.config import ClientConfig
from fedfrozen_app.data.augment import with_codes
from fedfrozen_app.exchange.names import by_namespace, flattened, parameter_of, parameters_in
from fedfrozen_app.exchange.order import Order
from fedfrozen_app.fairness.groups import flat
from fedfrozen_app.local.algorithm import ByNamespace, Finished, Start
from fedfrozen_app.local.fair import fair_figures
from fedfrozen_app.models.meanwhile import training
from fedfrozen_app.models.task import Batch
from fedfrozen_app.seeds import seed_for, seeded, torch_generator

if TYPE_CHECKING:
    from fedfrozen_app.local.resident import Resident


@dataclass(frozen=True)
class LocalResult:
    """What a client has after its local work: copies, free to leave."""

    trained: dict[str, Tensor]
    examples: int
    metrics: dict[str, float]
    own: dict[str, Tensor] = field(default_factory=dict)  # that the algorithm keeps, as namespace/name
    reply: dict[str, Tensor] = field(
        default_factory=dict
    )  # that it sends beside parameters, and in their place

    def sent(self, shared: tuple[str, ...]) -> dict[str, Tensor]:
        """The arrays of the reply. An algorithm may have made some for all that trains: the rest stays."""
        names = set(shared)
        own = {name: self.trained[name] for name in shared if name in self.trained}
        return own | {name: value for name, value in self.reply.items() if parameter_of(name) in names}


@dataclass(frozen=True)
class Stepped:
    """What local steps leave beside the trained parameters, which are in the resident model."""

    loss: Tensor  # the mean over the steps
    count: int
    own: ByNamespace = field(default_factory=dict)  # what the algorithm trained beside parameters


class LocalSteps(Protocol):
    """Take a client's local steps with the model as it is loaded, which is `start.model`."""

    def __call__(self, resident: "Resident", client: str, order: Order, start: Start) -> Stepped: ...


def train_client(
    resident: "Resident", client: str, order: Order, start: Start, steps: LocalSteps | None = None
) -> LocalResult:
    """Train one client for one round. Of `start`, what trains lies on the device."""
    began = time.perf_counter()
    rows = resident.rows(client)
    resident.load(start.model, order.base)
    metrics = resident.judge_validation(client, "before")
    if order.method.looks():
        start = replace(start, own={**start.own, **look_at_first(resident, client, order, start)})
    resident.mark_changed(order.plan.trained)
    stepped = (steps or eager_steps)(resident, client, order, start)
    # Looked at here, once: no wait for the device between the steps.
    metrics["train_loss"] = float(stepped.loss)
    metrics |= resident.judge_validation(client, "after")
    trained = {name: resident.parameters[name].detach().clone() for name in order.plan.trained}
    finished = Finished()
    if not order.method.adds_nothing():
        count = torch.tensor(float(stepped.count), dtype=resident.task.dtype, device=resident.device)
        rate = learning_rate(resident.config.client, order.round, resident)
        with torch.no_grad():
            finished = order.method.finish(start, trained, count, rate)
    own = {**start.own, **stepped.own, **finished.own}
    if order.is_personal and resident.evaluates_after(order.round):
        # A personal model exists only here, so the client judges it where it can.
        resident.load(order.method.personal(trained, own), {})
        metrics |= resident.judge_personal(client, shares_model=not order.plan.private)
    metrics |= resident.figures()
    metrics |= {name: float(value) for name, value in finished.figures.items()}
    metrics["client_seconds"] = time.perf_counter() - began
    # Copies: what is sent becomes the server's, which turns it into an update in place.
    kept = {name: value.clone() for name, value in (flattened(stepped.own) | flattened(finished.own)).items()}
    reply = {**finished.model, **flattened(finished.reply)}
    return LocalResult(trained, len(rows.train), metrics, kept, reply)


def look_at_first(resident: "Resident", client: str, order: Order, start: Start) -> ByNamespace:
    """What the algorithm makes of the round's first batch."""
    settings, rows = resident.config.client, resident.rows(client)
    drawn, sizes = drawn_examples(resident, client, order.round, 0, order.plan.steps[0].epochs)
    weights = resident.class_weights(rows.train) if settings.class_weights else None
    batch = Batch(*resident.take(drawn[: sizes[0]].to(resident.device)), weights)
    shift = torch.zeros((), dtype=resident.task.dtype, device=resident.device, requires_grad=True)
    (slope,) = torch.autograd.grad(order.method.seen(shift, batch, resident.task, start), shift)
    with torch.no_grad():
        return order.method.look(slope, start, learning_rate(settings, order.round, resident))


def eager_steps(resident: "Resident", client: str, order: Order, start: Start) -> Stepped:
    """Step by step, as torch is usually used."""
    method = order.method
    live = {
        space: {name: value.detach().clone() for name, value in start.own[space].items()}
        for space in method.trains
    }
    if live:
        start = replace(start, own={**start.own, **live})
    losses: list[Tensor] = []
    seed = seed_for(resident.config.seed, "dropout", client, order.round)
    with training(resident.model), seeded(seed, resident.device):
        for number, phase in enumerate(order.plan.steps):
            other_arrays = {space: {name: own[name] for name in phase.trained} for space, own in live.items()}
            trained = {name: resident.parameters[name] for name in phase.trained} | flattened(other_arrays)
            losses += _phase_steps(resident, client, order, start, trained, number, phase.epochs)
    kept = {space: {name: value.detach() for name, value in own.items()} for space, own in live.items()}
    return Stepped(torch.stack(losses).double().mean(), len(losses), kept)


def _phase_steps(
    resident: "Resident",
    client: str,
    order: Order,
    start: Start,
    trained: dict[str, Tensor],
    phase: int,
    epochs: int | None,
) -> list[Tensor]:
    """The losses of the steps in which these arrays train, with an optimiser of their own."""
    settings, rows = resident.config.client, resident.rows(client)
    for name, parameter in resident.parameters.items():
        parameter.requires_grad_(name in trained)
    for value in trained.values():
        value.requires_grad_(True)
    # Only trained names enter: decoupled weight decay would move a frozen one even with a zero gradient.
    optimizer = optimizer_for(resident, trained, learning_rate(settings, order.round, resident))
    weights = resident.class_weights(rows.train) if settings.class_weights else None
    losses = []
    drawn, sizes = drawn_examples(resident, client, order.round, phase, epochs)
    for index in drawn.to(resident.device).split(sizes):
        batch = Batch(*resident.take(index), weights)
        loss = order.method.loss(resident.parameters, batch, resident.task, start)
        for value in trained.values():
            value.grad = None
        loss.backward()
        if settings.clip is not None:  # what trains beside the parameters does not shorten their step
            for part in [parameters_in(trained), *by_namespace(trained).values()]:
                torch.nn.utils.clip_grad_norm_(part.values(), settings.clip)
        optimizer.step()
        losses.append(loss.detach())
    for value in trained.values():
        value.grad = None  # its memory is the next client's
        value.requires_grad_(False)
    return losses


def judge_client(
    resident: "Resident",
    client: str,
    order: Order,
    start: Start,
    steps: LocalSteps | None = None,
) -> dict[str, float]:
    """The headline figure on the client's own test rows: of the global model, of its own, and that after
    one more round of local training, of which nothing is kept."""
    test_rows = resident.client_test_rows(client)
    figures: dict[str, float] = {"test_rows": len(test_rows), "train_rows": len(resident.rows(client).train)}
    if not len(test_rows):
        return figures
    resident.load(start.model, order.base)
    if not order.plan.private or resident.has_global:
        with resident.only_global():
            figures["global"] = resident.task.evaluate(test_rows)[resident.task.headline]
            figures |= flat("global", fair_figures(resident, client))
    resident.load(order.method.personal(start.anchor, start.own), {})
    figures["personal"] = resident.task.evaluate(test_rows)[resident.task.headline]
    figures |= flat("personal", fair_figures(resident, client))
    if resident.has_novel:  # what a model gained on its own rows it may have lost elsewhere
        figures["base"] = resident.evaluate_test()[resident.task.headline]
        figures["novel"] = resident.evaluate_novel()[resident.task.headline]
    if order.plan.trained:
        result = train_client(resident, client, order, start, steps)
        own = {**start.own, **by_namespace(result.own)}
        resident.load({**result.trained, **order.method.personal(result.trained, own)}, {})
        figures["after"] = resident.task.evaluate(test_rows)[resident.task.headline]
        figures |= flat("after", fair_figures(resident, client))
    return figures


def drawn_examples(
    resident: "Resident", client: str, server_round: int, phase: int, epochs: int | None
) -> tuple[Tensor, list[int]]:
    """What `Resident.take` is to give for all steps of a phase, and how many each step takes: row numbers,
    and what becomes of their pictures where these are augmented."""
    config = resident.config
    rows = resident.rows(client).train
    drawn, sizes = drawn_rows(rows, config.client, config.seed, client, server_round, phase, epochs)
    if resident.augments:  # from a generator of its own: the same rows as without
        generator = torch_generator(config.seed, "augment", client, server_round, phase)
        drawn = with_codes(drawn, len(resident.train_table), generator)
    return drawn, sizes


def drawn_rows(
    rows: Tensor,
    settings: ClientConfig,
    seed: int,
    client: str,
    server_round: int,
    phase: int = 0,
    epochs: int | None = None,
) -> tuple[Tensor, list[int]]:
    """The row numbers of all steps one after another, shuffled for every epoch by the client's own
    generator, and how many of them each step takes. `epochs` of a phase, where it has a number of its own."""
    later = (phase,) if phase else ()  # a round without phases draws what it always drew
    generator = torch_generator(seed, "batches", client, server_round, *later)
    times = settings.local_epochs if epochs is None else epochs
    numbers, count = rows.numpy(), rows.numel()  # numpy's indexing: there are many small clients
    orders = [numbers[torch.randperm(count, generator=generator).numpy()] for _ in range(times)]
    whole, rest = divmod(count, settings.batch_size)
    sizes = ([settings.batch_size] * whole + [rest] * (rest > 0)) * times
    sizes = sizes[: settings.local_steps]
    drawn = np.concatenate(orders) if times > 1 else orders[0]
    return torch.from_numpy(drawn[: sum(sizes)]), sizes


def batches(rows: Tensor, settings: ClientConfig, seed: int, client: str, server_round: int) -> list[Tensor]:
    """The row numbers of each step."""
    drawn, sizes = drawn_rows(rows, settings, seed, client, server_round)
    return list(drawn.split(sizes))


def make_optimizer(
    settings: ClientConfig,
    parameters: Sequence[Tensor] | Sequence[dict[str, Any]],
    lr: float | Tensor,
    *,
    capturable: bool = False,
) -> Optimizer:
    """`parameters` may be torch's groups. `capturable` keeps every state on the device, where a CUDA graph
    can replay it."""
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
    groups = [
        {"params": [trained[name] for name in names], "lr": rate * scale}
        for scale, names in rate_groups(resident, trained)
    ]
    return make_optimizer(resident.config.client, groups, rate)


def rate_groups(resident: "Resident", names: Iterable[str]) -> list[tuple[float, list[str]]]:
    """Names of one rate, and that in units of `client.lr`: those whose kind has none of its own first."""
    scales = rate_scales(resident.config.client)
    kinds: dict[str, list[str]] = {kind: [] for kind in ("", *scales)}
    for name in names:
        kind = resident.roles[parameter_of(name)].kind
        kinds[kind if kind in scales else ""].append(name)
    return [(scales.get(kind, 1.0), own) for kind, own in kinds.items() if own]


def rate_scales(settings: ClientConfig) -> dict[str, float]:
    """The kinds of parameters with a learning rate of their own, in units of `client.lr`."""
    rates = {"head": settings.head_lr, "fusion": settings.fusion_lr}
    return {kind: rate / settings.lr for kind, rate in rates.items() if rate not in (None, settings.lr)}


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
