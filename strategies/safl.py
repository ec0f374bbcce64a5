"""SAFL: Li and Zhang, Selective Attention Federated Learning, arXiv 2504.11793.

In every round each client i scores the layers on its own data by formula (1) and takes its own top K:

    A_l = Σ_h Σ_i Σ_j α^l_{h,i,j} · I(t_j ∈ T)        L_i = the K layers with the largest A_l

It trains and sends these layers, the head and the final norm; embeddings are frozen. The server averages each
layer over the clients that sent it; one that no client sent keeps its value. K = L is FedAvg with frozen
embeddings. Baselines with the same K: layers of large gradients, random and fixed ones; the head alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from fedfrozen_app.config import setting
from fedfrozen_app.config.needs import only_with
from fedfrozen_app.exchange.plan import Plan, layers_of
from fedfrozen_app.exchange.role import Role, is_embedding
from fedfrozen_app.exchange.train_request import NamedSettings
from fedfrozen_app.models.profile import check_tokens
from fedfrozen_app.server import layers

OWN = ("attention", "gradient", "random")  # the rules by which clients differ


@dataclass(frozen=True)
class Settings(layers.Settings):
    own_rules: ClassVar[tuple[str, ...]] = OWN

    select: str = setting(
        "attention",
        "Which layers a client trains and sends: `attention` (its own top K), `gradient` (those with the "
        "largest gradients on its rows), `random` (K drawn for each client and round), `fixed` (the same K "
        "for all), `all`, `none` (the head alone)",
        choices=(*OWN, *layers.FOR_ALL),
    )
    tokens: Any = setting(
        None,
        "The tokens that attention is measured to: `cls`, `entity`, `no_sink` or a list of token ids. "
        "`null`: `no_sink` for causal models, `entity` for entities, else `cls`",
        needs=only_with("strategy.select", "attention"),
    )
    profile_examples: int = setting(
        256,
        "A tenth of a client's rows is profiled in each round (at least 8), at most so many",
        least=1,
        needs=only_with("strategy.select", "attention", "gradient"),
    )
    keep: float = setting(
        1.0,
        "Share of each layer array's updates that is sent, the largest ones, with a mask of one bit for each "
        "weight. The paper's pruning is 0.625",
        above=0,
        most=1,
    )

    def checked(self, num_rounds: int) -> Self:
        super().checked(num_rounds)
        if self.tokens is not None:
            check_tokens(self.tokens, causal=False)
        return self


class SAFL(layers.LayersTaken):
    """Every client trains and sends the layers with its own highest attention scores."""

    paper = "Li and Zhang 2025, arXiv 2504.11793"
    Settings = Settings
    pacings = ("deadline", "buffered")

    def plan(self, server_round: int) -> Plan:
        embedding = (name for name, role in self.federation.roles.items() if is_embedding(role))
        return super().plan(server_round).freeze(embedding)

    @classmethod
    def choice_for(cls, settings: Any, roles: Mapping[str, Role]) -> NamedSettings | None:
        if not settings.each_its_own:
            return None
        top_k = settings.count_of(layers_of(roles, roles))
        more = {"tokens": settings.tokens, "examples": settings.profile_examples}
        return NamedSettings(settings.select, {"top_k": top_k, **more})

    @classmethod
    def codec_for(cls, settings: Any) -> tuple[str, Any] | None:
        return ("keep", settings.keep) if settings.keep < 1 else None
