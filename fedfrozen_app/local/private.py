"""A client's private round: pay, choose layers, train with noise, store the reply; or decline.

With privacy on, a reply holds noised arrays, a number of examples that the client has declared once, and the
ε and δ spent. Losses and scores are written to the site's own disk.
"""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.exchange.names import is_parameter, parameters_in
from fedfrozen_app.exchange.plan import Plan, layers_of
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.local.algorithm import Start
from fedfrozen_app.local.choose import choose, choose_noisily, choose_publicly
from fedfrozen_app.local.client_coroutine import ClientCoroutine, Payment, ReplyToStore, run_alone
from fedfrozen_app.local.owed_noise import owed_noise
from fedfrozen_app.local.private_training import Training
from fedfrozen_app.local.private_units import sampling, units_of
from fedfrozen_app.local.sequential import LocalResult
from fedfrozen_app.privacy.accountant import epsilon_of, solve_noise
from fedfrozen_app.privacy.budget import Budget, BudgetFile, Declined
from fedfrozen_app.privacy.coverage import noise_in_sum, reason_model_not_covered, reason_not_covered
from fedfrozen_app.privacy.dpsgd import Recipe, draw_rows
from fedfrozen_app.privacy.noise import Noise, SecretNoise, SeededNoise
from fedfrozen_app.privacy.steps import SLACK, Steps
from fedfrozen_app.privacy.sum_noise import ACCOUNTANT, noise_of_run
from fedfrozen_app.secure.work import problem_of_noise

if TYPE_CHECKING:
    from fedfrozen_app.local.worker import Worker


def _paid_before() -> None:
    """The payment of an attempt that has sent nothing."""


class PrivateClient:
    """One client's view of one round.

    `folder` is the site's own; `declared` is its public number of units and `limit` the largest ε it agrees
    to, if the site has set them. `proposal`: the hash of the accepted proposal, to which a stored reply
    belongs. `cohort`: of a masked round, how many clients it has and how many of them carry its noise.
    """

    def __init__(
        self,
        worker: "Worker",
        client: str,
        request: TrainRequest,
        folder: Path,
        *,
        declared: int | None = None,
        limit: float | None = None,
        proposal: str = "",
        cohort: tuple[int, int] | None = None,
    ) -> None:
        if (reason := reason_not_covered(request) or reason_model_not_covered(worker.model)) is not None:
            raise UserError(reason)
        self.worker, self.client, self.request, self.folder = worker, client, request, folder
        self.file = BudgetFile(folder, client)
        self.units = units_of(worker, client)
        self._declared, self._cohort = declared, cohort
        self._reply_key = f"{proposal}/{request.digest}" if proposal else request.digest
        self._limit = min(worker.config.privacy.epsilon, math.inf if limit is None else limit)
        self.source = self.new_source()
        self.rounds = 0  # paid rounds, after it has taken part

    def new_source(self) -> Noise:
        config = self.worker.config
        if config.privacy.seeded_noise:
            return SeededNoise(self.worker.device, config.seed, self.client, self.request.round)
        return SecretNoise(self.worker.device)

    def take_part(self, start: Start, paid: int = 0, *, unsent: bool = False) -> LocalResult | Declined:
        """Train and reply, resend the reply to the same request, or decline.

        `paid`: the rounds that this client is known to have paid for, whatever its record shows. `unsent`: no
        reply to this round was sent, as a site knows from its own record. A process killed during training
        has then paid for a reply that nobody received, and does not pay again for the same request.
        """
        return run_alone(self.coroutine(start, paid, unsent=unsent))

    def coroutine(
        self, start: Start, paid: int = 0, *, unsent: bool = False
    ) -> ClientCoroutine[LocalResult | Declined]:
        """The same as a coroutine that yields its payment, its steps and the reply to store."""
        self.rounds = paid
        if self._limit <= 0:
            return Declined("declines: of its privacy budget of epsilon 0 nothing can be spent")
        with self.file.alone():
            return (yield from self._with_record_locked(start, paid, unsent))

    def _with_record_locked(
        self, start: Start, paid: int, unsent: bool
    ) -> ClientCoroutine[LocalResult | Declined]:
        budget = self._budget(paid)
        self.rounds = budget.rounds
        in_sum = noise_in_sum(self.worker.config)
        # With noise in the sum, single arrays have no noise yet: never write them to disk.
        if (kept := None if in_sum else self.file.kept_reply(self._reply_key)) is not None:
            arrays = {
                name: kept[name].to(self.worker.device) for name in self.request.plan.trained if name in kept
            }
            return LocalResult(arrays, budget.declared, self.metrics(budget))
        recipe = self._recipe(budget)
        due = [Steps(budget.noise, recipe.rate, recipe.steps)]  # the noise of the sum, if any
        if chooses := self._chooses(budget):
            assert budget.selection_noise is not None
            due.append(Steps(budget.selection_noise, self.worker.config.privacy.selection_rate, 1))
        # The number of paid rounds decides when layers are chosen with noise, and that choice is paid too.
        stands = unsent and budget.last_order == self._reply_key and not self._noisy
        if not stands and self.epsilon_after(budget, [*budget.steps, *due]) > self._limit * (1 + SLACK):
            spent = self.epsilon_after(budget, budget.steps)
            return Declined(
                f"declines: of its privacy budget of epsilon {self._limit:g} per {budget.unit}, "
                f"{spent:.3f} is spent, and another round would take it beyond"
            )
        if in_sum and (problem := self._problem_of_noise(budget, start)):
            return Declined(f"declines: {problem}")
        yield Payment(partial(self._pay, budget, due) if not stands else _paid_before)
        self.worker.load(start.model, self.request.base)
        if chooses:
            self._choose(budget)
        plan = self._plan(budget, start)
        trained = yield Training(self, replace(start, trained=plan.trained), recipe, budget, due[0])
        assert trained is not None
        every, loss = trained
        arrays, own = parameters_in(every), {name: every[name] for name in every if not is_parameter(name)}
        metrics = {"round": self.request.round, "train_loss": loss}
        if in_sum:
            self.file.note(metrics)
        else:
            yield ReplyToStore(partial(self.file.keeping, self._reply_key, arrays, metrics))
        return LocalResult(arrays, budget.declared, self.metrics(budget), own)

    # Budget -----------------------------------------------------------------------------------------------

    def _budget(self, paid: int) -> Budget:
        """The recorded budget, or a fresh one; `UserError` if the record contradicts what is known."""
        recorded = self.file.read()
        if (known := recorded.rounds if recorded else 0) < paid:
            raise UserError(
                f"Client {self.client} has paid for {paid} rounds, and its privacy record in {self.folder} "
                f"knows of {known}, so that what it has spent is unknown: put the record back; on a Ray "
                "cluster, set output_dir to a folder that all its machines share."
            )
        budget = recorded or self._open()
        budget.delta = min(budget.delta, self.worker.config.privacy.delta or budget.delta)
        if budget.unit != (unit := self.worker.config.privacy.unit):
            raise UserError(
                f"Client {self.client} has spent privacy per {budget.unit}, which does not add up with "
                f"privacy.unit={unit}: continue with privacy.unit={budget.unit}."
            )
        if noise_in_sum(self.worker.config):
            budget.noise = noise_of_run(self.worker.config).multiplier  # overrides an older record
        return budget

    def _open(self) -> Budget:
        """A fresh budget with this client's noise, solved for the rounds in which it will take part; with
        noise in the sum, with the run's noise."""
        config = self.worker.config
        privacy = config.privacy
        declared = self._declared or privacy.examples or len(self.units)
        if noise_in_sum(config):
            run = noise_of_run(config)
            return Budget(self.client, privacy.unit, run.delta, declared, run.multiplier)
        delta = privacy.delta or min(1e-5, 0.1 / declared)
        rounds = self.request.participations[self.client]
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
        budget.last_order = self._reply_key
        budget.seeded |= self.worker.config.privacy.seeded_noise
        self.file.write(budget)
        self.rounds = budget.rounds

    def _problem_of_noise(self, budget: Budget, start: Start) -> str | None:
        if self._cohort is None:
            return "its noise goes into a sum, and the request names no cohort"
        return problem_of_noise(self.request, start.model, *self._cohort, self.metrics(budget))

    def epsilon_after(self, budget: Budget, steps: list[Steps]) -> float:
        return epsilon_of(steps, budget.delta, self._accountant, self._limit)

    @property
    def _accountant(self) -> str:
        config = self.worker.config
        return ACCOUNTANT if noise_in_sum(config) else config.privacy.accountant

    def metrics(self, budget: Budget) -> dict[str, float]:
        spent = {"epsilon": self.epsilon_after(budget, budget.steps), "delta": budget.delta}
        config = self.worker.config
        if not noise_in_sum(config):
            return spent
        return spent | owed_noise(config, self.request.round)

    # Layers ----------------------------------------------------------------------------------------------

    @property
    def _noisy(self) -> bool:
        """Whether this client chooses layers from its private data, and pays for it."""
        choice = self.request.chooser
        return choice is not None and choice.looks_at_data and self.worker.config.privacy.selection == "noisy"

    def _chooses(self, budget: Budget) -> bool:
        """Whether the choice is made again in this round."""
        if not self._noisy:
            return False
        assert self.request.chooser is not None
        if budget.selection_noise is None:
            raise UserError(
                f"Client {self.client} has a privacy record in which no budget was set aside for choosing "
                "layers: start a new run, or use privacy.selection=public."
            )
        count = len(layers_of(self.request.plan.trained, self.worker.roles))
        known = [number for number in budget.layers or () if number < count]  # an earlier run may have more
        fits = len(known) == self.request.chooser.top_k
        return not fits or budget.rounds % self.worker.config.privacy.selection_every == 0

    def _choose(self, budget: Budget) -> None:
        """Choose layers, and save the choice before training: after a crash a paid choice is not lost."""
        assert budget.selection_noise is not None and self.request.chooser is not None
        sample = self.source.poisson(len(self.units), self.worker.config.privacy.selection_rate)
        rows = draw_rows(self.units, sample, self.source).to(self.worker.device)
        budget.layers, parts = choose_noisily(
            self.worker, self.request, self.request.chooser, rows, budget.selection_noise, self.source
        )
        self.file.write(budget)
        if parts is not None:
            self.file.note({"round": self.request.round, "head_scores": parts.tolist()})

    def _plan(self, budget: Budget, start: Start) -> Plan:
        choice, plan, roles = self.request.chooser, self.request.plan, self.worker.roles
        if choice is None:
            return plan
        if self._noisy:
            assert budget.layers is not None
            return choice.part(plan, budget.layers, roles)
        if choice.looks_at_data and self.worker.config.privacy.selection == "public":
            return choice.part(plan, choose_publicly(self.worker, choice), roles)
        # Rules that read no data, or privacy.selection=unaccounted, about which the run has warned.
        return choose(self.worker, self.client, self.request, start).plan

    # Steps -----------------------------------------------------------------------------------------------

    def _recipe(self, budget: Budget) -> Recipe:
        config = self.worker.config
        rate, steps = sampling(config, budget.declared)
        return Recipe(
            rate=rate,
            steps=steps,
            noise=0.0 if noise_in_sum(config) else budget.noise,
            max_grad_norm=config.privacy.max_grad_norm,
            batch=rate * budget.declared,
            physical_batch=config.privacy.physical_batch,
        )
