"""SAFL's client: Li and Zhang, Selective Attention Federated Learning, arXiv 2504.11793.

It scores the layers on its own data by formula (1) and takes its own top K (fedfrozen_app/models/profile.py):

    A_l = Σ_h Σ_i Σ_j α^l_{h,i,j} · I(t_j ∈ T)        L_i = the K layers with the largest A_l
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.exchange.choice import Choice
from fedfrozen_app.exchange.plan import layers_of
from fedfrozen_app.models.chunks import chunks_together
from fedfrozen_app.models.profile import CHUNK, Tokens, check_tokens, head_scores
from fedfrozen_app.models.roles import is_causal
from fedfrozen_app.models.task import Batch

if TYPE_CHECKING:
    from fedfrozen_app.local.worker import Worker

SHARE, LEAST = 0.1, 8  # profile a tenth of a client's rows, at least eight if it has them


@dataclass(frozen=True)
class Profiled(Choice):
    """Base of the rules that profile a subset of the client's rows; all rules have the same settings."""

    tokens: Tokens | None = None  # tokens to which attention is measured; None: chosen by model and task

    def rows_to_score(self, count: int) -> int:
        return min(self.examples, max(round(SHARE * count), LEAST), count)

    def metrics(self, scores: Tensor) -> dict[str, float]:
        """Mean score of each layer; scores per head never leave the client."""
        return {f"layer_score_{layer}": score for layer, score in enumerate(scores.mean(dim=1).tolist())}


@dataclass(frozen=True)
class ByAttention(Profiled):
    all_zero_means: ClassVar[str] = "none of its profiled texts has a token of strategy.tokens"

    def check(self, worker: "Worker") -> None:
        self._token_set(worker)

    def scores(self, worker: "Worker", rows: Tensor, *, private: bool = False) -> Tensor:
        """(rows, layers, heads)."""
        inputs, labels = worker.take(rows)
        batch = Batch(worker.task.prepare(inputs), labels)
        found = head_scores(worker.model, batch, self._token_set(worker), private=private)
        # Of LoRA: the layers with adapters.
        return chunks_together(found, inputs)[:, layers_of(worker.exchanged, worker.roles)]

    def _token_set(self, worker: "Worker") -> Tokens:
        causal = is_causal(worker.model)
        default = "no_sink" if causal else "entity" if worker.corpus.task == "tokens" else "cls"
        tokens = self.tokens or default
        check_tokens(tokens, causal=causal)
        known = range(worker.corpus.vocab_size)
        if not known or isinstance(tokens, str):
            return tokens
        if strange := [token for token in tokens if token not in known]:
            raise UserError(
                f"strategy.tokens names {strange[0]}, which no text can have: token ids here go from 0 to "
                f"{len(known) - 1}."
            )
        if len(set(tokens)) == len(known):
            raise UserError(
                "strategy.tokens names every token id: all layers would score the same. Name fewer."
            )
        return tokens


@dataclass(frozen=True)
class ByGradient(Profiled):
    """A baseline: the layers with the largest gradient norm, ‖∂loss/∂θ_l‖ over all rows together."""

    def check(self, worker: "Worker") -> None:
        """Called for private choices only: one row's effect on the norm of a sum is not bounded."""
        raise UserError(
            "strategy.select=gradient scores all rows together, and privacy needs a score of each: choose "
            "strategy.select=attention, or privacy.selection=public."
        )

    def scores(self, worker: "Worker", rows: Tensor, *, private: bool = False) -> Tensor:
        """(1, layers, 1): each layer's share of the squared norm."""
        named, roles = worker.exchanged, worker.roles
        layers = layers_of(named, roles)
        places = {name: layers.index(layer) for name in named if (layer := roles[name].layer) is not None}
        own = {name: named[name].detach().requires_grad_() for name in places}
        sums = [torch.zeros_like(value) for value in own.values()]
        for part in rows.split(CHUNK):
            loss = worker.task.loss(own, Batch(*worker.take(part))) * len(part)
            gradients = torch.autograd.grad(loss, list(own.values()), materialize_grads=True)
            torch._foreach_add_(sums, list(gradients))
        found = torch.zeros(len(layers), dtype=torch.float64)
        for place, value in zip(places.values(), sums, strict=True):
            found[place] += value.double().square().sum().cpu()
        return (found / found.sum().clamp(min=1e-300)).view(1, -1, 1)


@dataclass(frozen=True)
class AtRandom(Choice):
    """The baseline: K random layers in every round."""

    tokens: Tokens | None = None  # sent to both rules; this one ignores it
    looks_at_data: ClassVar[bool] = False
