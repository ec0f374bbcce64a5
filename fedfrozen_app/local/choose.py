"""Choose a client's layers from the round's plan: score them on its data, and take the best."""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.seeds import torch_generator
from fedfrozen_app.exchange.choice import Choice, top_k
from fedfrozen_app.exchange.plan import Plan, layers_of
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.local.algorithm import Start
from fedfrozen_app.privacy.noise import Noise
from fedfrozen_app.privacy.vote import noisy_sum

if TYPE_CHECKING:
    from fedfrozen_app.local.worker import Worker

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Chosen:
    plan: Plan
    scores: Tensor | None = None  # (layers, parts), mean over the rows that were scored


def choose(worker: "Worker", client: str, request: TrainRequest, start: Start) -> Chosen:
    """The layers that this client trains; the plan itself if the request leaves no choice."""
    choice = request.chooser
    if choice is None:
        return Chosen(request.plan)
    scores, count = None, len(layers_of(request.plan.trained, worker.roles))
    if choice.looks_at_data:
        worker.load(start.model, request.base)
        scores = score(worker, client, request, choice)
    if count == choice.top_k:  # the group's layers are already chosen
        picked = tuple(range(count))
    elif scores is not None:
        picked = top_k(scores.sum(dim=1), choice.top_k)
    else:
        generator = torch_generator(worker.config.seed, "layers", client, request.round)
        picked = choice.pick(count, generator)
    return Chosen(choice.part(request.plan, picked, worker.roles), scores)


def score(worker: "Worker", client: str, request: TrainRequest, choice: Choice) -> Tensor:
    """(layers, parts): mean scores of the round's model on a subset of the client's rows."""
    rows = worker.rows(client).train
    generator = torch_generator(worker.config.seed, "profile", client, request.round)
    count = choice.rows_to_score(len(rows))
    index = rows[torch.randperm(len(rows), generator=generator)[:count]].to(worker.device)
    scores = choice.scores(worker, index)
    if not scores.any():
        log.warning(
            "Client %s: %s, so every layer scores 0 and the last are taken.", client, choice.all_zero_means
        )
    return scores.mean(dim=0)


# Choices covered by differential privacy ---------------------------------------------------


def choose_noisily(
    worker: "Worker", request: TrainRequest, choice: Choice, rows: Tensor, noise: float, source: Noise
) -> tuple[list[int], Tensor | None]:
    """Positions among the plan's layers, from a noisy sum over `rows`, which may be none.

    Also returns the mean scores without noise, which must not leave the site.
    """
    count = len(layers_of(request.plan.trained, worker.roles))
    scores, parts = torch.zeros(0, count, device=worker.device), None
    choice.check(worker)  # also for an empty sample: a failure must not reveal whether it was empty
    if len(rows):
        each = choice.scores(worker, rows, private=True)
        scores, parts = each.mean(dim=2), each.mean(dim=0)
    return list(top_k(noisy_sum(scores, noise, source), choice.top_k)), parts


def choose_publicly(worker: "Worker", choice: Choice) -> list[int]:
    """Choose from rows that the server holds: no client data are used."""
    if not len(worker.shares.validation):
        raise UserError(
            "privacy.selection=public chooses layers on the rows that the server keeps, and there are none "
            "here: raise dataset.validation, or use privacy.selection=noisy."
        )
    rows = torch.from_numpy(worker.shares.validation).to(worker.device)[: choice.examples]
    return list(top_k(choice.scores(worker, rows).mean(dim=2).sum(dim=0), choice.top_k))
