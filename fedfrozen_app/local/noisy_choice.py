"""The layers a client trains, chosen so that the choice itself is private.

Which layers a client sends shows everyone what its data score, so the choice is a release like any other:

    s = Σ_{i ∈ Poisson sample} clip(a_i − mean(a_i), 1) + N(0, σ²)        a_i: example i's score of each layer

The top K of s is post-processing. Taking off an example's own mean changes no ranking and leaves its bounded
norm to the differences between layers. The sum is never divided by the number of examples, which is private.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedfrozen_app.errors import UserError
from fedfrozen_app.exchange.plan import Order, Plan, layers_of
from fedfrozen_app.local.choose import profile_batch, token_set
from fedfrozen_app.models.profile import head_scores, layer_scores
from fedfrozen_app.models.select import top_k
from fedfrozen_app.privacy.noise import Noise

if TYPE_CHECKING:
    from fedfrozen_app.local.resident import Resident


def noisy_sum(scores: Tensor, noise: float, source: Noise) -> Tensor:
    """(examples, layers) -> (layers,): one example changes the sum by at most 1 before the noise.

    One with scores that are not finite gives nothing, or the sum would tell that it is there.
    """
    apart = scores - scores.mean(dim=1, keepdim=True)
    apart = torch.where(torch.isfinite(apart).all(dim=1, keepdim=True), apart, 0.0)
    length = torch.linalg.vector_norm(apart, dim=1, keepdim=True)
    total = (apart / length.clamp(min=1.0)).sum(dim=0)
    return total + source.normal(total, noise)


def choose_privately(
    resident: "Resident", order: Order, rows: Tensor, noise: float, source: Noise
) -> tuple[list[int], Tensor | None]:
    """Positions among the plan's layers, from a noisy sum over `rows`, which may be none.

    Beside it the mean scores by layer and head, without noise: they must not leave the site.
    """
    assert order.selection is not None
    count = len(layers_of(order.plan.trained, resident.roles))
    tokens = token_set(resident, order)
    scores, heads = torch.zeros(0, count, device=resident.device), None
    if len(rows):
        each = head_scores(resident.model, profile_batch(resident, rows), tokens, private=True)
        scores, heads = each.mean(dim=2), each.mean(dim=0)
    return list(top_k(noisy_sum(scores, noise, source), order.selection.top_k)), heads


def choose_publicly(resident: "Resident", order: Order) -> list[int]:
    """The same from rows that the server holds anyway: no client's data have a say."""
    assert order.selection is not None
    if not len(resident.shares.validation):
        raise UserError(
            "privacy.selection=public chooses layers on the rows that the server keeps, and there are none "
            "here: raise dataset.validation, or use privacy.selection=noisy."
        )
    rows = torch.from_numpy(resident.shares.validation).to(resident.device)
    rows = rows[: order.selection.examples]
    scores = layer_scores(resident.model, profile_batch(resident, rows), token_set(resident, order))
    return list(top_k(scores.sum(dim=0), order.selection.top_k))


def plan_of(order: Order, chosen: list[int], resident: "Resident") -> Plan:
    layers = layers_of(order.plan.trained, resident.roles)
    return order.plan.keep_layers([layers[number] for number in chosen], resident.roles)
