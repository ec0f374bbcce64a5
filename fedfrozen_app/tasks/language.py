"""Causal language modelling: each token is predicted from those before it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fedfrozen_app.tasks.target import Target


class Language(Target):
    """Next-token prediction, measured by token accuracy, the number of scored tokens, and perplexity."""

    metric_names = ("accuracy", "tokens", "perplexity")
    has_classes = fair = False
    exact_scores = over_tokens = True  # bfloat16 is too coarse for a loss over a large vocabulary

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        target = labels[:, 1:]  # (examples, tokens − 1): each is predicted from those before it
        scores = logits[:, :-1].reshape(-1, logits.shape[-1])
        every = functional.cross_entropy(scores, target.reshape(-1), reduction="none")
        return every.view(target.shape).sum(dim=1) / self.weights(labels, logits.dtype).clamp(min=1)

    def weights(self, labels: Tensor, dtype: torch.dtype) -> Tensor:
        """(examples,): the number of scored tokens of each; means are over tokens."""
        return (labels[:, 1:] >= 0).sum(dim=1).to(dtype)

    def predictions(self, logits: Tensor) -> Tensor:
        """The prediction for each token, at its place."""
        return functional.pad(logits[:, :-1].argmax(dim=-1), (1, 0))

    def measure(self, predicted: Tensor, labels: Tensor, classes: tuple[str, ...]) -> dict[str, float]:
        labels = labels.to(predicted.device)
        scored = scored_tokens(labels)
        right, tokens = int(((predicted == labels) & scored).sum()), int(scored.sum())
        return {"accuracy": right / max(tokens, 1), "tokens": tokens}

    def of_loss(self, loss: float) -> dict[str, float]:
        return {"perplexity": perplexity(loss)}

    def names_in(self, label: Any) -> list[str]:
        return []

    def class_names(self, named: Any, *, in_order: bool) -> tuple[str, ...]:
        return ()

    def stratum_names(self, classes: tuple[str, ...], found: Iterable[str]) -> tuple[str, ...]:
        """The kinds of texts, which rows' labels name."""
        return tuple(sorted(set(found)))

    def numbered(self, labels: Sequence[Any], places: Mapping[str, int]) -> Any:
        """Nothing to number: the labels are the tokens."""
        return None


def scored_tokens(labels: Tensor) -> Tensor:
    """(rows, tokens): which tokens of a language model's rows are scored; never a row's first."""
    scored = labels >= 0
    scored[:, :1] = False
    return scored


def perplexity(loss: float) -> float:
    """The perplexity of a mean loss over tokens, capped against overflow."""
    return math.exp(min(loss, 700.0))
