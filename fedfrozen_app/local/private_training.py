"""A private client's steps on the loaded model: clipped per-example gradients, plus noise."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from torch import nn

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.local.algorithm import Start
from fedfrozen_app.local.client_coroutine import Trained
from fedfrozen_app.local.client_optimizer import learning_rate, optimizer_for
from fedfrozen_app.local.loss_errors import checked_loss
from fedfrozen_app.local.own_step import OwnStep, OwnStepOptimizer, kept_state, starting_state
from fedfrozen_app.privacy.audit_record import AuditTotals, record_folder
from fedfrozen_app.privacy.audit_recorder import AuditRecorder
from fedfrozen_app.privacy.budget import Budget
from fedfrozen_app.privacy.canaries import Canaries
from fedfrozen_app.privacy.dpsgd import Clipping, Recipe, train_steps
from fedfrozen_app.privacy.example_gradients import ExampleGradients, Loss
from fedfrozen_app.privacy.ghost import GhostClipping
from fedfrozen_app.privacy.noise import Noise
from fedfrozen_app.privacy.steps import Steps
from fedfrozen_app.vmap.model_modes import training

if TYPE_CHECKING:
    from fedfrozen_app.local.worker import Worker


class PayingClient(Protocol):
    """The attributes of a client (local/private.py) that these steps read."""

    worker: "Worker"
    client: str
    request: TrainRequest
    folder: Path
    units: list[np.ndarray]
    source: Noise

    def new_source(self) -> Noise: ...

    def metrics(self, budget: Budget) -> dict[str, float]: ...

    def epsilon_after(self, budget: Budget, steps: list[Steps]) -> float: ...


@dataclass(frozen=True)
class Training:
    """Steps that a client has paid for and not yet taken, alone or stacked with others (private_stack.py)."""

    client: PayingClient
    start: Start
    recipe: Recipe
    budget: Budget
    paid_for: Steps

    def look_ahead(self) -> None:
        """Compute the cost of another such round, which the client will need before it."""
        self.client.epsilon_after(self.budget, [*self.budget.steps, self.paid_for])

    @property
    def is_audited(self) -> bool:
        """Whether `fedfrozen audit` records this client's steps."""
        return self.client.worker.config.privacy.audited == self.client.client

    def started(self) -> Start:
        """The start with copies of the `step_state`, which the algorithm's own steps change in place."""
        state = starting_state(self.client.request.method, self.start)
        return replace(self.start, client_state={**self.start.client_state, **state})

    def gradients(self) -> ExampleGradients:
        loss = partial(checked_loss, self.client.request.method, start=self.start)
        return example_gradients(self.client.worker, self.start.trained, loss)

    def run_alone(self) -> Trained:
        """Take the steps, from the loaded model."""
        client, worker = self.client, self.client.worker
        config = worker.config
        trained = {name: worker.parameters[name] for name in self.start.trained}
        worker.mark_changed(trained)
        ghost = config.privacy.clipping == "ghost"
        gradients: Clipping = self._ghost(list(trained)) if ghost else self.gradients()
        rate = learning_rate(config.client, client.request.round, config.num_rounds)
        method, start = client.request.method, self.started()
        optimizer, units = optimizer_for(config.client, worker.roles, trained, rate), client.units
        if method.has_step():
            own = OwnStep(method, trained, start, rate, start.trained)
            optimizer = OwnStepOptimizer(own, trained, rate)
        recorder = None
        if self.is_audited:
            gradients = recorder = self._recorder(gradients, trained, rate)
            units = [*units, *recorder.canaries.units(len(worker.train_table))]
            recorder.attach(optimizer, len(units))
        with training(worker.model):
            with client.source.dropout():
                mean = train_steps(
                    gradients, trained, optimizer, worker.train_table, units, self.recipe, client.source
                )
            if recorder is not None:
                recorder.close(client.new_source)
                folder = record_folder(client.folder, client.client)
                recorder.write(folder / f"{self.budget.rounds}.safetensors")
        arrays = {name: parameter.detach().clone() for name, parameter in trained.items()}
        return {**arrays, **kept_state(method, start)}, mean

    def _recorder(self, gradients: Clipping, trained: dict[str, nn.Parameter], rate: float) -> AuditRecorder:
        """For `fedfrozen audit`: compares the steps with what this round has paid for and what it reports."""
        client, worker, budget = self.client, self.client.worker, self.budget
        config = worker.config.privacy
        folder = record_folder(client.folder, client.client)
        canaries = Canaries.of_run(folder, trained, config.canaries)
        totals = AuditTotals(client.request.round, self.paid_for, config.max_grad_norm, unit=budget.unit)
        totals.epsilon, totals.delta = client.metrics(budget)["epsilon"], budget.delta
        make = partial(optimizer_for, worker.config.client, worker.roles, rate=rate)
        return AuditRecorder(gradients, canaries, trained, make, self.recipe, totals, worker.device)

    def _ghost(self, trained: list[str]) -> Clipping:
        request, worker = self.client.request, self.client.worker
        if not request.method.is_plain():
            raise UserError(
                f"privacy.clipping=ghost knows the plain loss alone, not that of "
                f"{request.algorithm}: use "
                "privacy.clipping=per_example."
            )
        return GhostClipping(worker.model, worker.task, trained, worker.config.privacy.max_grad_norm)


def example_gradients(worker: "Worker", names: Sequence[str], loss: Loss) -> ExampleGradients:
    ways = partial(worker.per_client_kernels.used, names)
    return ExampleGradients(
        worker.model, worker.task, names, loss, ways, worker.per_client_kernels.shared_norms
    )
