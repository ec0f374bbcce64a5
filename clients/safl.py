"""SAFL's client: Li and Zhang, Selective Attention Federated Learning, arXiv 2504.11793.

It scores the layers on its own data by formula (1) and takes its own top K (fedfrozen_app/models/profile.py):

    A_l = Σ_h Σ_i Σ_j α^l_{h,i,j} · I(t_j ∈ T)        L_i = the K layers with the largest A_l
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from fedfrozen_app.errors import UserError
from fedfrozen_app.exchange.choice import Choice
from fedfrozen_app.models.profile import TOKEN_SETS, Tokens, head_scores
from fedfrozen_app.models.roles import is_causal
from fedfrozen_app.models.task import Batch

if TYPE_CHECKING:
    from fedfrozen_app.local.resident import Resident

SHARE, LEAST = 0.1, 8  # a tenth of a client's rows is profiled, and no fewer than eight where it has them


@dataclass(frozen=True)
class ByAttention(Choice):
    tokens: Tokens | None = None  # what attention is measured to; None: by model and task
    all_zero_means: ClassVar[str] = "none of its profiled texts has a token of strategy.tokens"

    def rows_to_score(self, count: int) -> int:
        return min(self.examples, max(round(SHARE * count), LEAST), count)

    def check(self, resident: "Resident") -> None:
        self._token_set(resident)

    def scores(self, resident: "Resident", rows: Tensor, *, private: bool = False) -> Tensor:
        """(rows, layers, heads)."""
        inputs, labels = resident.take(rows)
        batch = Batch(resident.task.prepare(inputs), labels)
        return head_scores(resident.model, batch, self._token_set(resident), private=private)

    def figures(self, scores: Tensor) -> dict[str, float]:
        """The layers' means; by head they are this client's alone."""
        return {f"layer_score_{layer}": score for layer, score in enumerate(scores.mean(dim=1).tolist())}

    def _token_set(self, resident: "Resident") -> Tokens:
        causal = is_causal(resident.model)
        default = "no_sink" if causal else "entity" if resident.corpus.task == "tokens" else "cls"
        tokens = self.tokens or default
        check_tokens(tokens, causal=causal)
        known = range(resident.corpus.vocab_size)
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
class AtRandom(Choice):
    """The baseline: K layers drawn in every round."""

    tokens: Tokens | None = None  # sent to both rules; this one ignores it
    looks_at_data: ClassVar[bool] = False


def check_tokens(tokens: Tokens, *, causal: bool) -> None:
    """Refuse the sets that cannot tell layers apart."""
    if not isinstance(tokens, str):
        if not isinstance(tokens, Sequence) or not all(type(token) is int for token in tokens):
            raise UserError(
                f"strategy.tokens={tokens} is no list of token ids, such as [101,2003]: give one, or one of "
                f"{', '.join(TOKEN_SETS)}."
            )
        if not tokens:
            raise UserError("strategy.tokens is an empty list: name at least one token id, or cls.")
        return
    if tokens == "last":
        raise UserError(
            "strategy.tokens=last is meaningless: under a causal mask only the last query sees the last key. "
            "Use no_sink."
        )
    if tokens not in TOKEN_SETS:
        raise UserError(
            f"strategy.tokens={tokens} is unknown: choose one of {', '.join(TOKEN_SETS)}, or token ids. "
            "All tokens together would give every layer the same score."
        )
    if causal and tokens != "no_sink":
        raise UserError(
            f"strategy.tokens={tokens} needs an encoder: in a causal model the first token is an attention "
            "sink and later tokens see little of what follows. Use no_sink or token ids."
        )
