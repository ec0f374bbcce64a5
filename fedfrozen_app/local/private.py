"""A client's private round: pay, choose, train with noise, keep the reply; or decline.

What a reply holds with privacy on: noised arrays, a number of examples that the client has declared once, and
the ε and δ spent. Losses and scores are written to the site's own disk.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import nn

from fedfrozen_app.config import Config
from fedfrozen_app.errors import UserError
from fedfrozen_app.exchange.order import Order
from fedfrozen_app.exchange.plan import Plan, layers_of
from fedfrozen_app.local.algorithm import Start
from fedfrozen_app.local.choose import choose, choose_noisily, choose_publicly
from fedfrozen_app.local.course import Course, Keeping, Payment, Trained, by_itself
from fedfrozen_app.local.sequential import LocalResult, learning_rate, optimizer_for
from fedfrozen_app.models.meanwhile import training
from fedfrozen_app.privacy.accountant import epsilon_of, solve_noise
from fedfrozen_app.privacy.budget import Budget, BudgetFile, Declined
from fedfrozen_app.privacy.cover import cannot_cover, cannot_cover_model, noise_in_sum
from fedfrozen_app.privacy.dpsgd import Clipping, ExampleGradients, Loss, Recipe, draw_rows, train_steps
from fedfrozen_app.privacy.ghost import GhostClipping
from fedfrozen_app.privacy.noise import Noise, SecretNoise, SeededNoise
from fedfrozen_app.privacy.steps import SLACK, Steps
from fedfrozen_app.privacy.watched import Canaries, Figures, Watch, record_folder
from fedfrozen_app.secure.work import NOISE, SENSITIVITY

if TYPE_CHECKING:
    from fedfrozen_app.local.resident import Resident


@dataclass(frozen=True)
class Training:
    """Steps that a client has paid for and not yet taken, by itself or beside others (private_stack.py)."""

    client: "PrivateClient"
    start: Start
    recipe: Recipe
    budget: Budget
    paid_for: Steps

    def by_itself(self) -> Trained:
        return self.client.train(self.start, self.recipe, self.budget, self.paid_for)

    def look_ahead(self) -> None:
        """Work out what another such round would come to, which the client will ask before it."""
        self.client.epsilon_after(self.budget, [*self.budget.steps, self.paid_for])


class PrivateClient:
    """One client's view of one round.

    `folder` is the site's own; `declared` its public number of units, and `limit` the largest ε it agrees to,
    where the site has set them.
    """

    def __init__(
        self,
        resident: "Resident",
        client: str,
        order: Order,
        folder: Path,
        *,
        declared: int | None = None,
        limit: float | None = None,
    ) -> None:
        if (reason := cannot_cover(order) or cannot_cover_model(resident.model)) is not None:
            raise UserError(reason)
        self.resident, self.client, self.order, self.folder = resident, client, order, folder
        self.file = BudgetFile(folder, client)
        self.units = units_of(resident, client)
        self._declared = declared
        self._limit = min(resident.config.privacy.epsilon, math.inf if limit is None else limit)
        self.source = self._new_source()
        self.rounds = 0  # paid for, once it has taken part

    def _new_source(self) -> Noise:
        config = self.resident.config
        if config.privacy.seeded_noise:
            return SeededNoise(self.resident.device, config.seed, self.client, self.order.round)
        return SecretNoise(self.resident.device)

    def take_part(self, start: Start, paid: int = 0) -> LocalResult | Declined:
        """Train and reply, resend what was sent for the very same order, or decline.

        `paid`: the rounds that this client is known to have paid for, whatever its record says.
        """
        return by_itself(self.course(start, paid))

    def course(self, start: Start, paid: int = 0) -> Course[LocalResult | Declined]:
        """The same, but for its steps: it stops there, and goes on with what they came to."""
        self.rounds = paid
        if self._limit <= 0:
            return Declined("declines: of its privacy budget of epsilon 0 nothing can be spent")
        with self.file.alone():
            return (yield from self._course(start, paid))

    def _course(self, start: Start, paid: int) -> Course[LocalResult | Declined]:
        recorded = self.file.read()
        if (known := recorded.rounds if recorded else 0) < paid:
            raise UserError(
                f"Client {self.client} has paid for {paid} rounds, and its privacy record in {self.folder} "
                f"knows of {known}, so that what it has spent is unknown: put the record back; on a Ray "
                "cluster, set output_dir to a folder that all its machines share."
            )
        budget = recorded or self._open()
        budget.delta = min(budget.delta, self.resident.config.privacy.delta or budget.delta)
        self.rounds = budget.rounds
        if budget.unit != (unit := self.resident.config.privacy.unit):
            raise UserError(
                f"Client {self.client} has spent privacy per {budget.unit}, which does not add up with "
                f"privacy.unit={unit}: go on with privacy.unit={budget.unit}."
            )
        if (kept := self.file.kept_reply(self.order.digest)) is not None:
            arrays = {
                name: kept[name].to(self.resident.device) for name in self.order.plan.trained if name in kept
            }
            return LocalResult(arrays, budget.declared, self._metrics(budget))
        recipe = self._recipe(budget)
        due = [Steps(budget.noise, recipe.rate, recipe.steps)]  # in the sum, where the noise is there
        if chooses := self._chooses(budget):
            assert budget.selection_noise is not None
            due.append(Steps(budget.selection_noise, self.resident.config.privacy.selection_rate, 1))
        if self.epsilon_after(budget, [*budget.steps, *due]) > self._limit * (1 + SLACK):
            spent = self.epsilon_after(budget, budget.steps)
            return Declined(
                f"declines: of its privacy budget of epsilon {self._limit:g} per {budget.unit}, "
                f"{spent:.3f} is spent, and another round would take it beyond"
            )
        yield Payment(partial(self._pay, budget, due))
        self.resident.load(start.model, self.order.base)
        if chooses:
            self._choose(budget)
        plan = self._plan(budget, start)
        trained = yield Training(self, replace(start, trained=plan.trained), recipe, budget, due[0])
        assert trained is not None
        arrays, loss = trained
        figures = {"round": self.order.round, "train_loss": loss}
        yield Keeping(partial(self.file.keeping, self.order.digest, arrays, figures))
        return LocalResult(arrays, budget.declared, self._metrics(budget))

    # Money -----------------------------------------------------------------------------------------------

    def _open(self) -> Budget:
        """A fresh budget: this client's noise, solved for the rounds in which it will take part."""
        config = self.resident.config
        privacy = config.privacy
        declared = self._declared or privacy.examples or len(self.units)
        delta = privacy.delta or min(1e-5, 0.1 / declared)
        rounds = self.order.participations[self.client]
        rate, steps = sampling(config, declared)
        solve = partial(solve_noise, delta=delta, kind=self._accountant)
        budget = Budget(self.client, privacy.unit, delta, declared, noise=0.0)
        other_steps: tuple[Steps, ...] = ()
        if self._noisy:
            choices = math.ceil(rounds / privacy.selection_every)
            share = privacy.selection_share * self._limit
            budget.selection_noise = solve(privacy.selection_rate, choices, epsilon=share)
            other_steps = (Steps(budget.selection_noise, privacy.selection_rate, choices),)
        budget.noise = solve(rate, steps * rounds, epsilon=self._limit, other_steps=other_steps)
        return budget

    def _pay(self, budget: Budget, due: list[Steps]) -> None:
        budget.steps += due
        budget.rounds += 1
        budget.last_order = self.order.digest
        budget.seeded |= self.resident.config.privacy.seeded_noise
        self.file.write(budget)
        self.rounds = budget.rounds

    def epsilon_after(self, budget: Budget, steps: list[Steps]) -> float:
        return epsilon_of(steps, budget.delta, self._accountant, self._limit)

    @property
    def _accountant(self) -> str:
        """Of whole numbers only Rényi's bound is known to be that of the continuous Gaussian."""
        config = self.resident.config
        return "rdp" if noise_in_sum(config) else config.privacy.accountant

    def _metrics(self, budget: Budget) -> dict[str, float]:
        spent = {"epsilon": self.epsilon_after(budget, budget.steps), "delta": budget.delta}
        config = self.resident.config
        if not noise_in_sum(config):
            return spent
        # What one unit can change in examples · update, which is −lr · Σ clipped gradients.
        rate = learning_rate(config.client, self.order.round, self.resident)
        return spent | {NOISE: budget.noise, SENSITIVITY: rate * config.privacy.max_grad_norm}

    # Layers ----------------------------------------------------------------------------------------------

    @property
    def _noisy(self) -> bool:
        """Whether this client chooses layers from its private data, and pays for it."""
        choice = self.order.chooser
        return (
            choice is not None and choice.looks_at_data and self.resident.config.privacy.selection == "noisy"
        )

    def _chooses(self, budget: Budget) -> bool:
        """Whether the choice is made again in this round."""
        if not self._noisy:
            return False
        assert self.order.chooser is not None
        if budget.selection_noise is None:
            raise UserError(
                f"Client {self.client} has a privacy record in which no budget was set aside for choosing "
                "layers: start a new run, or use privacy.selection=public."
            )
        count = len(layers_of(self.order.plan.trained, self.resident.roles))
        known = [number for number in budget.layers or () if number < count]  # a run before may have had more
        fits = len(known) == self.order.chooser.top_k
        return not fits or budget.rounds % self.resident.config.privacy.selection_every == 0

    def _choose(self, budget: Budget) -> None:
        """On the disk before training: after a crash the choice, once paid for, is still there."""
        assert budget.selection_noise is not None and self.order.chooser is not None
        sample = self.source.poisson(len(self.units), self.resident.config.privacy.selection_rate)
        rows = draw_rows(self.units, sample, self.source).to(self.resident.device)
        budget.layers, parts = choose_noisily(
            self.resident, self.order, self.order.chooser, rows, budget.selection_noise, self.source
        )
        self.file.write(budget)
        if parts is not None:
            self.file.note({"round": self.order.round, "head_scores": parts.tolist()})

    def _plan(self, budget: Budget, start: Start) -> Plan:
        choice, plan, roles = self.order.chooser, self.order.plan, self.resident.roles
        if choice is None:
            return plan
        if self._noisy:
            assert budget.layers is not None
            return choice.part(plan, budget.layers, roles)
        if choice.looks_at_data and self.resident.config.privacy.selection == "public":
            return choice.part(plan, choose_publicly(self.resident, choice), roles)
        # Rules that look at no data; or privacy.selection=unaccounted, of which the run has warned.
        return choose(self.resident, self.client, self.order, start).plan

    # Work ------------------------------------------------------------------------------------------------

    def _recipe(self, budget: Budget) -> Recipe:
        config = self.resident.config
        rate, steps = sampling(config, budget.declared)
        return Recipe(
            rate=rate,
            steps=steps,
            noise=0.0 if noise_in_sum(config) else budget.noise,
            max_grad_norm=config.privacy.max_grad_norm,
            batch=rate * budget.declared,
            physical_batch=config.privacy.physical_batch,
        )

    def train(self, start: Start, recipe: Recipe, budget: Budget, paid_for: Steps) -> Trained:
        """Take its steps, from the model that is loaded."""
        resident = self.resident
        config = resident.config
        trained = {name: resident.parameters[name] for name in start.trained}
        resident.mark_changed(trained)
        gradients: Clipping
        if config.privacy.clipping == "ghost":
            gradients = self._ghost(list(trained))
        else:
            gradients = self.gradients(start)
        rate = learning_rate(config.client, self.order.round, resident)
        optimizer, units = optimizer_for(resident, trained, rate), self.units
        watch = None
        if self.is_watched:
            gradients = watch = self._watch(gradients, trained, rate, recipe, budget, paid_for)
            units = [*units, *watch.canaries.units(len(resident.train_table))]
            watch.attach(optimizer, len(units))
        with training(resident.model):
            with self.source.dropout():
                mean = train_steps(
                    gradients, trained, optimizer, resident.train_table, units, recipe, self.source
                )
            if watch is not None:
                watch.close(self._new_source)
                watch.write(record_folder(self.folder, self.client) / f"{budget.rounds}.safetensors")
        return {name: parameter.detach().clone() for name, parameter in trained.items()}, mean

    def gradients(self, start: Start) -> ExampleGradients:
        return example_gradients(self.resident, start.trained, partial(self.order.method.loss, start=start))

    @property
    def is_watched(self) -> bool:
        return self.resident.config.privacy.audited == self.client

    def _watch(
        self,
        gradients: Clipping,
        trained: dict[str, nn.Parameter],
        rate: float,
        recipe: Recipe,
        budget: Budget,
        paid_for: Steps,
    ) -> Watch:
        """For `fedfrozen audit`, against what this round has paid for and what the client tells of it."""
        config = self.resident.config.privacy
        folder = record_folder(self.folder, self.client)
        canaries = Canaries.of_run(folder, trained, config.canaries)
        figures = Figures(self.order.round, paid_for, config.max_grad_norm, unit=budget.unit)
        figures.epsilon, figures.delta = self._metrics(budget)["epsilon"], budget.delta
        make = partial(optimizer_for, self.resident, rate=rate)
        return Watch(gradients, canaries, trained, make, recipe, figures, self.resident.device)

    def _ghost(self, trained: list[str]) -> Clipping:
        if not self.order.method.is_plain():
            raise UserError(
                f"privacy.clipping=ghost knows the plain loss alone, not that of {self.order.algorithm}: use "
                "privacy.clipping=per_example."
            )
        resident = self.resident
        return GhostClipping(resident.model, resident.task, trained, resident.config.privacy.max_grad_norm)


def example_gradients(resident: "Resident", names: Sequence[str], loss: Loss) -> ExampleGradients:
    ways = partial(resident.own_weights.used, names)
    return ExampleGradients(
        resident.model, resident.task, names, loss, ways, resident.own_weights.shared_norms
    )


def sampling(config: Config, declared: int) -> tuple[float, int]:
    """(q, steps a round), from the declared size alone: the true one must not show in either."""
    if noise_in_sum(config):  # all rows, once: whole numbers have no bound for samples that is as good
        return 1.0, 1
    batch = min(config.client.batch_size, declared)
    steps = config.client.local_epochs * math.ceil(declared / batch)
    return batch / declared, min(steps, config.client.local_steps or steps)


def units_of(resident: "Resident", client: str) -> list[np.ndarray]:
    """The client's rows by example, document or patient: whatever one unit of privacy is."""
    privacy = resident.config.privacy
    rows = resident.rows(client).train.numpy()
    if privacy.unit == "example":
        return list(rows[:, None])
    column = privacy.unit_column or privacy.unit
    if column not in resident.corpus.columns:
        raise UserError(
            f"privacy.unit={privacy.unit} needs a column that says whose each row is, and the data have no "
            f"column '{column}': set privacy.unit_column, or use privacy.unit=example."
        )
    values = resident.corpus.columns[column]
    names = values[rows]
    if not all(str(name).strip() for name in names):  # they would be one unit, and nobody in it covered alone
        raise UserError(
            f"A row of client {client} names no {privacy.unit} in its column '{column}', so that epsilon "
            f"cannot cover its {privacy.unit}: fill the column, or leave such rows out."
        )
    parts = resident.shares.partition
    elsewhere = [] if parts is None else [part for n, part in enumerate(parts.indices) if str(n) != client]
    if shared := sorted(set(names) & {name for part in elsewhere for name in values[part]}):
        raise UserError(
            f"The {privacy.unit} {shared[0]} has rows at client {client} and at another, so no client's "
            f"epsilon would cover it: partition the data by it (partition=natural partition.column={column})."
        )
    return [rows[names == name] for name in np.unique(names)]
