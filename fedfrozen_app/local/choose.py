"""A client's own part of the round's plan: score the layers on its data, and take the best."""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedfrozen_app.errors import UserError
from fedfrozen_app.exchange.choice import Choice, top_k
from fedfrozen_app.exchange.order import Order
from fedfrozen_app.exchange.plan import Plan, layers_of
from fedfrozen_app.local.algorithm import Start
from fedfrozen_app.privacy.noise import Noise
from fedfrozen_app.privacy.vote import noisy_sum
from fedfrozen_app.seeds import torch_generator

if TYPE_CHECKING:
    from fedfrozen_app.local.resident import Resident

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Chosen:
    plan: Plan
    scores: Tensor | None = None  # (layers, parts), mean over the rows that were looked at


def choose(resident: "Resident", client: str, order: Order, start: Start) -> Chosen:
    """The plan itself where the order leaves no choice."""
    choice = order.chooser
    if choice is None:
        return Chosen(order.plan)
    scores, count = None, len(layers_of(order.plan.trained, resident.roles))
    if choice.looks_at_data:
        resident.load(start.model, order.base)
        scores = score(resident, client, order, choice)
    if count == choice.top_k:  # chosen already, by all of a group
        picked = tuple(range(count))
    elif scores is not None:
        picked = top_k(scores.sum(dim=1), choice.top_k)
    else:
        generator = torch_generator(resident.config.seed, "layers", client, order.round)
        picked = choice.pick(count, generator)
    return Chosen(choice.part(order.plan, picked, resident.roles), scores)


def score(resident: "Resident", client: str, order: Order, choice: Choice) -> Tensor:
    """(layers, parts): mean scores of the round's model on a subset of the client's rows."""
    rows = resident.rows(client).train
    generator = torch_generator(resident.config.seed, "profile", client, order.round)
    count = choice.rows_to_score(len(rows))
    index = rows[torch.randperm(len(rows), generator=generator)[:count]].to(resident.device)
    scores = choice.scores(resident, index)
    if not scores.any():
        log.warning(
            "Client %s: %s, so every layer scores 0 and the last are taken.", client, choice.all_zero_means
        )
    return scores.mean(dim=0)


# So that differential privacy covers the choice itself ---------------------------------------------------


def choose_noisily(
    resident: "Resident", order: Order, choice: Choice, rows: Tensor, noise: float, source: Noise
) -> tuple[list[int], Tensor | None]:
    """Positions among the plan's layers, from a noisy sum over `rows`, which may be none.

    Beside it the mean scores without noise: they must not leave the site.
    """
    count = len(layers_of(order.plan.trained, resident.roles))
    scores, parts = torch.zeros(0, count, device=resident.device), None
    choice.check(resident)  # also where the sample is empty: nobody must see from a failure whether it was
    if len(rows):
        each = choice.scores(resident, rows, private=True)
        scores, parts = each.mean(dim=2), each.mean(dim=0)
    return list(top_k(noisy_sum(scores, noise, source), choice.top_k)), parts


def choose_publicly(resident: "Resident", choice: Choice) -> list[int]:
    """From rows that the server holds anyway: no client's data have a say."""
    if not len(resident.shares.validation):
        raise UserError(
            "privacy.selection=public chooses layers on the rows that the server keeps, and there are none "
            "here: raise dataset.validation, or use privacy.selection=noisy."
        )
    rows = torch.from_numpy(resident.shares.validation).to(resident.device)[: choice.examples]
    return list(top_k(choice.scores(resident, rows).mean(dim=2).sum(dim=0), choice.top_k))
