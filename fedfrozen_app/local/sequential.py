"""The sequential runner: one client after another on one worker model."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from fedfrozen_app.core.seeds import seed_for, seeded
from fedfrozen_app.exchange.names import by_namespace, flattened, namespace_of, parameter_of, parameters_in
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.local.algorithm import ByNamespace, Finished, Start
from fedfrozen_app.local.batches import drawn_examples
from fedfrozen_app.local.client_optimizer import learning_rate, optimizer_for
from fedfrozen_app.local.loss_errors import LossErrors, checked_finish, checked_losses
from fedfrozen_app.local.model_evaluation import (
    evaluate_client_validation,
    evaluate_personal,
    evaluates_after,
)
from fedfrozen_app.local.own_step import OwnStep, starting_state
from fedfrozen_app.local.start_values import start_loss_and_gradient
from fedfrozen_app.models.task import Batch
from fedfrozen_app.vmap.model_modes import training

if TYPE_CHECKING:
    from fedfrozen_app.local.worker import Worker


@dataclass(frozen=True)
class LocalResult:
    """A client's result after local training: copies, safe to send."""

    trained: dict[str, Tensor]
    examples: int
    metrics: dict[str, float]
    own: dict[str, Tensor] = field(default_factory=dict)  # kept by the algorithm, as namespace/name
    # Sent in addition to the trained parameters, or in place of them.
    reply: dict[str, Tensor] = field(default_factory=dict)

    def sent(self, shared: tuple[str, ...]) -> dict[str, Tensor]:
        """The arrays of the reply. An algorithm may return some for every trained name: only the shared ones
        are sent."""
        names = set(shared)
        own = {name: self.trained[name] for name in shared if name in self.trained}
        return own | {name: value for name, value in self.reply.items() if parameter_of(name) in names}


@dataclass(frozen=True)
class Stepped:
    """The result of local steps besides the trained parameters, which are in the worker's model."""

    losses: Tensor  # (reported losses,) means over the steps
    count: int
    own: ByNamespace = field(default_factory=dict)  # the algorithm's trained state


class LocalSteps(Protocol):
    """Take a client's local steps from the loaded model, which is `start.model`."""

    def __call__(self, worker: "Worker", client: str, request: TrainRequest, start: Start) -> Stepped: ...


def train_client(
    worker: "Worker", client: str, request: TrainRequest, start: Start, steps: LocalSteps | None = None
) -> LocalResult:
    """Train one client for one round. The trained arrays of `start` are on the device."""
    began = time.perf_counter()
    config, rows = worker.config, worker.data.rows(client)
    worker.load(start.model, request.base)
    metrics = evaluate_client_validation(worker, client, "before")
    if request.method.evaluates_start():
        loss, gradient = start_loss_and_gradient(worker, client, start.anchor, request.method, start.trained)
        start = replace(start, loss=loss, gradient=gradient)
    if request.method.adapts():
        adapted = adapt_to_first_batch(worker, client, request, start)
        start = replace(start, client_state={**start.client_state, **adapted})
    worker.mark_changed(request.plan.trained)
    stepped = (steps or eager_steps)(worker, client, request, start)
    # Read here, once: the steps themselves never synchronise with the device.
    metrics |= zip(request.method.losses_reported(), stepped.losses.tolist(), strict=True)
    metrics |= evaluate_client_validation(worker, client, "after")
    trained = {name: worker.parameters[name].detach().clone() for name in request.plan.trained}
    if request.method.has_step():
        start = replace(start, client_state={**start.client_state, **stepped.own})
    finished = Finished()
    if not request.method.adds_nothing():
        count = torch.tensor(float(stepped.count), dtype=worker.task.dtype, device=worker.device)
        rate = learning_rate(config.client, request.round, config.num_rounds)
        with torch.no_grad():
            finished = checked_finish(request.method, start, trained, count, rate)
    own = {**start.client_state, **stepped.own, **finished.client_state}
    if request.is_personal and evaluates_after(config, request.round):
        # A personal model exists only on the client, so the client evaluates it.
        worker.load(request.method.personal(trained, own), {})
        metrics |= evaluate_personal(worker, client, shares_model=not request.plan.private)
    metrics |= worker.figures()
    metrics |= {name: float(value) for name, value in finished.metrics.items()}
    metrics["client_seconds"] = time.perf_counter() - began
    # Copies: the server turns received arrays into updates in place.
    kept = {
        name: value.clone()
        for name, value in (flattened(stepped.own) | flattened(finished.client_state)).items()
        if namespace_of(name) not in request.method.transient_state()
    }
    reply = {**finished.model, **flattened(finished.to_server)}
    return LocalResult(trained, len(rows.train), metrics, kept, reply)


def adapt_to_first_batch(worker: "Worker", client: str, request: TrainRequest, start: Start) -> ByNamespace:
    """The client state that the algorithm's `adapt` returns for the round's first batch."""
    config, data = worker.config, worker.data
    drawn, sizes = drawn_examples(data, client, request.round, 0, request.plan.steps[0].epochs)
    weights = data.class_weights(data.rows(client).train) if config.client.class_weights else None
    batch = Batch(*data.take(drawn[: sizes[0]].to(worker.device)), weights)
    shift = torch.zeros((), dtype=worker.task.dtype, device=worker.device, requires_grad=True)
    (gradient,) = torch.autograd.grad(
        request.method.first_batch_loss(shift, batch, worker.task, start), shift
    )
    rate = learning_rate(config.client, request.round, config.num_rounds)
    with torch.no_grad():
        return request.method.adapt(gradient, start, rate)


def eager_steps(worker: "Worker", client: str, request: TrainRequest, start: Start) -> Stepped:
    """The steps in plain PyTorch, one by one."""
    method = request.method
    live = {
        space: {name: value.detach().clone() for name, value in start.client_state[space].items()}
        for space in method.trainable_state
    }
    live |= starting_state(method, start)
    if live:
        start = replace(start, client_state={**start.client_state, **live})
    losses: list[Tensor] = []
    seed = seed_for(worker.config.seed, "dropout", client, request.round)
    with training(worker.model), seeded(seed, worker.device):
        for number, phase in enumerate(request.plan.steps):
            other_arrays = {
                space: {name: live[space][name] for name in phase.trained} for space in method.trainable_state
            }
            trained = {name: worker.parameters[name] for name in phase.trained} | flattened(other_arrays)
            losses += _phase_steps(worker, client, request, start, trained, number, phase.epochs)
    kept = {space: {name: value.detach() for name, value in own.items()} for space, own in live.items()}
    reported = torch.stack(losses).double().view(len(losses), -1)
    means = [own.contiguous().mean() for own in reported.unbind(dim=1)]
    return Stepped(torch.stack(means), len(losses), kept)


def _phase_steps(
    worker: "Worker",
    client: str,
    request: TrainRequest,
    start: Start,
    trained: dict[str, Tensor],
    phase: int,
    epochs: int | None,
) -> list[Tensor]:
    """Take the steps of one phase, which trains these arrays with a fresh optimiser. Yields each step's
    losses: (reported losses,), or the one loss of a plain algorithm."""
    config, data = worker.config, worker.data
    for name, parameter in worker.parameters.items():
        parameter.requires_grad_(name in trained)
    for value in trained.values():
        value.requires_grad_(True)
    # Only trained names: decoupled weight decay would change a frozen one even with a zero gradient.
    rate = learning_rate(config.client, request.round, config.num_rounds)
    optimizer: Optimizer | OwnStep
    if request.method.has_step():
        optimizer = OwnStep(request.method, worker.parameters, start, rate, trained)
    else:
        optimizer = optimizer_for(config.client, worker.roles, trained, rate)
    weights = data.class_weights(data.rows(client).train) if config.client.class_weights else None
    method, parameters, task = request.method, worker.parameters, worker.task
    losses, plain, errors = [], method.is_plain(), LossErrors(method)
    limit = request.most_steps.get(client)
    drawn, sizes = drawn_examples(data, client, request.round, phase, epochs, limit)
    for index in drawn.to(worker.device).split(sizes):
        batch = Batch(*data.take(index), weights)
        if plain:
            loss = method.loss(parameters, batch, task, start)
            losses.append(loss.detach())
        else:
            loss, own = checked_losses(method, parameters, batch, task, start)
            losses.append(torch.stack([own, loss.detach() - own]))
        for value in trained.values():
            value.grad = None
        try:
            loss.backward()
        except (KeyError, RuntimeError) as error:  # a nested gradient in the loss may fail only here
            errors.explain(error)
            raise
        if config.client.clip is not None:
            clip_gradients(trained, config.client.clip)
        optimizer.step()
    for value in trained.values():
        value.grad = None  # free its memory for the next client
        value.requires_grad_(False)
    return losses


def clip_gradients(trained: Mapping[str, Tensor], clip: float) -> None:
    """Clip the gradients of the trained arrays. Each namespace is clipped separately: trainable state does
    not shorten the parameters' step."""
    for part in [parameters_in(trained), *by_namespace(trained).values()]:
        torch.nn.utils.clip_grad_norm_(part.values(), clip)
