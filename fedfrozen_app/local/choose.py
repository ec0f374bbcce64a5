"""A client's own part of the round's plan: profile the layers on its data, and take the best."""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedfrozen_app.errors import UserError
from fedfrozen_app.exchange.plan import Order, Plan, layers_of
from fedfrozen_app.models.profile import Tokens, default_tokens, head_scores
from fedfrozen_app.models.select import select_layers
from fedfrozen_app.models.task import Batch
from fedfrozen_app.seeds import torch_generator

if TYPE_CHECKING:
    from fedfrozen_app.local.resident import Resident

log = logging.getLogger(__name__)
SHARE, LEAST = 0.1, 8  # a tenth of a client's rows is profiled, and no fewer than eight where it has them


@dataclass(frozen=True)
class Choice:
    plan: Plan
    scores: Tensor | None = None  # (layers, heads), mean over the profiled examples


def choose(resident: "Resident", client: str, order: Order, start: dict[str, Tensor]) -> Choice:
    """The plan itself where the order leaves no choice. `start` holds every parameter."""
    if order.selection is None:
        return Choice(order.plan)
    layers = layers_of(order.plan.trained, resident.roles)
    scores = profile(resident, client, order, start) if order.selection.rule == "attention" else None
    chosen = select_layers(
        order.selection.rule,
        order.selection.top_k,
        len(layers),
        scores=None if scores is None else scores.sum(dim=1),
        generator=torch_generator(resident.config.seed, "layers", client, order.round),
    )
    plan = order.plan.keep_layers([layers[number] for number in chosen], resident.roles)
    return Choice(plan, scores)


def profile(resident: "Resident", client: str, order: Order, start: dict[str, Tensor]) -> Tensor:
    """(layers, heads): mean attention scores of the round's model on a subset of the client's rows."""
    assert order.selection is not None
    resident.load(start, order.base)
    rows = resident.rows(client).train
    count = min(order.selection.examples, max(round(SHARE * len(rows)), LEAST), len(rows))
    generator = torch_generator(resident.config.seed, "profile", client, order.round)
    index = rows[torch.randperm(len(rows), generator=generator)[:count]].to(resident.device)
    scores = head_scores(resident.model, profile_batch(resident, index), token_set(resident, order))
    if not scores.any():
        log.warning(
            "Client %s: none of its profiled texts has a token of strategy.tokens, so every layer scores "
            "0 and the last are taken.",
            client,
        )
    return scores.mean(dim=0)


def profile_batch(resident: "Resident", index: Tensor) -> Batch:
    inputs, labels = resident.take(index)
    return Batch(resident.task.prepare(inputs), labels)


def token_set(resident: "Resident", order: Order) -> Tokens:
    assert order.selection is not None
    tokens = order.selection.tokens or default_tokens(resident.model, resident.corpus.task)
    known = range(resident.corpus.vocab_size)
    if not known or isinstance(tokens, str):
        return tokens
    if strange := [token for token in tokens if token not in known]:
        raise UserError(
            f"strategy.tokens names {strange[0]}, which no text can have: token ids here go from 0 to "
            f"{len(known) - 1}."
        )
    if len(set(tokens)) == len(known):
        raise UserError("strategy.tokens names every token id: all layers would score the same. Name fewer.")
    return tokens
