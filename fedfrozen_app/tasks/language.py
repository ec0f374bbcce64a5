"""Language models: each token is predicted from those before it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fedfrozen_app.tasks.target import Target


class Language(Target):
    """The share of scored tokens that are predicted correctly, how many were scored, and the perplexity."""

    metric_names = ("accuracy", "tokens", "perplexity")
    has_classes = fair = False
    exact_scores = over_tokens = True  # a loss over a large vocabulary has no digits left in bfloat16

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        target = labels[:, 1:]  # (examples, tokens − 1): each is predicted from those before it
        scores = logits[:, :-1].reshape(-1, logits.shape[-1])
        every = functional.cross_entropy(scores, target.reshape(-1), reduction="none")
        return every.view(target.shape).sum(dim=1) / self.weights(labels, logits.dtype).clamp(min=1)

    def weights(self, labels: Tensor, dtype: torch.dtype) -> Tensor:
        """(examples,): how many tokens of each are scored; a mean is over tokens."""
        return (labels[:, 1:] >= 0).sum(dim=1).to(dtype)

    def predictions(self, logits: Tensor) -> Tensor:
        """At each token's place, what was predicted for it."""
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
        """A row's label says what kind of text it is."""
        return tuple(sorted(set(found)))

    def numbered(self, labels: Sequence[Any], places: Mapping[str, int]) -> Any:
        """They are the tokens: there is nothing to number."""
        return None


def scored_tokens(labels: Tensor) -> Tensor:
    """Which tokens of a language model's rows count, (rows, tokens): all but a row's first can."""
    scored = labels >= 0
    scored[:, :1] = False
    return scored


def perplexity(loss: float) -> float:
    """Of a mean loss over tokens, capped where it would overflow."""
    return math.exp(min(loss, 700.0))
