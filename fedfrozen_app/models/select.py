"""Which layers a client trains, given their scores: SAFL's rule and the baselines with the same K.

Pure functions of their arguments: profiling, noise and seeds are the caller's.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedfrozen_app.errors import UserError

RULES = ("attention", "random", "fixed", "all", "none")


def select_layers(
    rule: str,
    k: int,
    num_layers: int,
    *,
    scores: Tensor | None = None,  # (layers,), summed over examples: only their order counts
    generator: torch.Generator | None = None,
    fixed: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """K layer numbers in ascending order.

    attention: the K largest scores. random: K drawn from `generator`. fixed: the layers named, or the last K.
    all and none: every layer and no layer, whatever K.
    """
    if rule in ("all", "none"):
        return tuple(range(num_layers)) if rule == "all" else ()
    if not 1 <= k <= num_layers:
        raise UserError(f"strategy.top_k={k} must lie between 1 and the model's {num_layers} layers.")
    if rule == "attention":
        if scores is None or scores.shape != (num_layers,):
            raise ValueError("the attention rule needs one score for each layer")
        return top_k(scores, k)
    if rule == "random":
        if generator is None:
            raise ValueError("the random rule needs a generator")
        return tuple(sorted(torch.randperm(num_layers, generator=generator)[:k].tolist()))
    if rule == "fixed":
        named = tuple(sorted(set(fixed))) if fixed is not None else tuple(range(num_layers - k, num_layers))
        if len(named) != k or not all(0 <= layer < num_layers for layer in named):
            raise UserError(
                f"strategy.layers={list(fixed or ())} must name {k} different layers "
                f"from 0 to {num_layers - 1}, as strategy.top_k={k} says."
            )
        return named
    raise UserError(f"strategy.select={rule} is unknown: choose one of {', '.join(RULES)}.")


def top_k(scores: Tensor, k: int) -> tuple[int, ...]:
    """The positions of the K largest scores, in ascending order; of equal scores the higher layer."""
    values = scores.tolist()
    ranked = sorted(range(len(values)), key=lambda layer: (values[layer], layer), reverse=True)
    return tuple(sorted(ranked[:k]))
