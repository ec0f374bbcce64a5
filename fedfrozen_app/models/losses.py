"""Per-example losses and predictions from logits, by kind of task."""

import math

import torch
from torch import Tensor
from torch.nn import functional

from fedfrozen_app.data.table import IGNORED


def example_losses(kind: str, logits: Tensor, labels: Tensor) -> Tensor:
    """(examples,): each example's own loss, whatever else is in the batch."""
    if kind == "multilabel":
        every = functional.binary_cross_entropy_with_logits(logits, labels.to(logits), reduction="none")
        return every.mean(dim=1)
    if kind == "tokens":
        scored = labels >= 0  # (examples, tokens)
        target = labels.clamp(min=IGNORED)
        every = functional.cross_entropy(logits.transpose(1, 2), target, reduction="none")
        return every.sum(dim=1) / scored.sum(dim=1).clamp(min=1)
    if kind == "language":
        target = labels[:, 1:]  # (examples, tokens − 1): each is predicted from those before it
        scores = logits[:, :-1].reshape(-1, logits.shape[-1])
        every = functional.cross_entropy(scores, target.reshape(-1), reduction="none")
        return every.view(target.shape).sum(dim=1) / token_counts(labels, logits.dtype).clamp(min=1)
    return functional.cross_entropy(logits, labels, reduction="none")


def token_counts(labels: Tensor, dtype: torch.dtype) -> Tensor:
    """(examples,): how many tokens of each are scored, for a language model."""
    return (labels[:, 1:] >= 0).sum(dim=1).to(dtype)


def predictions(kind: str, logits: Tensor) -> Tensor:
    """The predictions from these logits, shaped like the labels."""
    if kind == "language":  # at each token's place, what was predicted for it
        return functional.pad(logits[:, :-1].argmax(dim=-1), (1, 0))
    return logits > 0 if kind == "multilabel" else logits.argmax(dim=-1)


def perplexity(loss: float) -> float:
    """Of a mean loss over tokens, capped where it would overflow."""
    return math.exp(min(loss, 700.0))
