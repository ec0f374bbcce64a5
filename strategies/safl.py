"""SAFL: Li and Zhang, Selective Attention Federated Learning, arXiv 2504.11793.

In every round each client i scores the layers on its own data by formula (1) and takes its own top K:

    A_l = Σ_h Σ_i Σ_j α^l_{h,i,j} · I(t_j ∈ T)        L_i = the K layers with the largest A_l

It trains and sends these layers, the head and the final norm; embeddings are frozen. The server averages each
layer over the clients that sent it; one that nobody sent keeps its value. K = L is FedAvg with frozen
embeddings. Baselines with the same K: random layers, fixed layers, and the head alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from torch import Tensor

from clients.safl import check_tokens
from fedfrozen_app.config import setting
from fedfrozen_app.errors import UserError
from fedfrozen_app.exchange.order import NamedSettings
from fedfrozen_app.exchange.plan import Plan, layers_of
from fedfrozen_app.files.rows import Row
from fedfrozen_app.models.roles import Role, is_embedding
from fedfrozen_app.server import base

OWN = ("attention", "random")  # the rules by which clients differ
RULES = (*OWN, "fixed", "all", "none")


@dataclass(frozen=True)
class Settings(base.Settings):
    select: str = setting(
        "attention",
        "Which layers a client trains and sends: `attention` (its own top K), `random` (K drawn for each "
        "client and round), `fixed` (the same K for all), `all`, `none` (the head alone)",
        choices=RULES,
    )
    top_k: int | None = setting(
        None,
        "K. `null`: a third of the layers",
        least=1,
        instead="must be at least 1; strategy.select=none trains the head alone.",
    )
    layers: list[int] | None = setting(
        None, "With `select=fixed`: the layers' numbers, from 0. `null`: the last K"
    )
    tokens: Any = setting(
        None,
        "The tokens that attention is measured to: `cls`, `entity`, `no_sink` or a list of token ids. "
        "`null`: `no_sink` for causal models, `entity` for entities, else `cls`",
    )
    profile_examples: int = setting(
        256, "A tenth of a client's rows is profiled in each round (at least 8), at most so many", least=1
    )
    keep: float = setting(
        1.0,
        "Share of each layer array's updates that is sent, the largest ones, with a mask of one bit for each "
        "weight. The paper's pruning is 0.625",
        above=0,
        most=1,
    )
    zero_fill: bool = setting(
        False, "Average a layer over all clients, those that did not send it counting as unchanged"
    )

    def checked(self, num_rounds: int) -> Self:
        super().checked(num_rounds)
        if self.layers is not None and self.select != "fixed":
            raise UserError("strategy.layers names fixed layers: add strategy.select=fixed, or leave it out.")
        if self.tokens is not None:
            check_tokens(self.tokens, causal=False)
        return self


def _top_k(settings: Settings, layers: Sequence[int]) -> int:
    return settings.top_k or max(1, round(len(layers) / 3))


class SAFL(base.PlannedFedAvg):
    """Every client trains and sends the layers that its own attention points at."""

    paper = "Li and Zhang 2025, arXiv 2504.11793"
    Settings = Settings

    def __init__(self, federation: base.Federation, *args: Any, **kwargs: Any) -> None:
        super().__init__(federation, *args, **kwargs)
        self.zero_fill = self.settings.zero_fill
        self._chosen: dict[str, list[int]] = {}
        if not self.layers:
            raise UserError(
                "This model has no layers to choose from: choose strategy=fedavg, or a Transformer."
            )
        if federation.aggregation.name != "mean" and (self.settings.select in OWN or self.zero_fill):
            raise UserError(
                f"aggregation={federation.aggregation.name} compares updates of the same layers, and here a "
                "layer may come from one client alone: choose aggregation=mean, or strategy.select=fixed "
                "without strategy.zero_fill."
            )
        if self.settings.select in OWN:
            self.undecided = "Clients choose their layers in training: the bytes down are at most these."
        self.common = self._common()  # here, so that an impossible K is said before the first round

    @cached_property
    def layers(self) -> list[int]:
        return layers_of(self.federation.roles, self.federation.roles)

    @property
    def top_k(self) -> int:
        return _top_k(self.settings, self.layers)

    def _common(self) -> list[int]:
        """The layers of every client under a fixed rule; otherwise the last K, which stand for any K."""
        count, named = len(self.layers), self.settings.layers
        if self.settings.select in ("all", "none"):
            return self.layers if self.settings.select == "all" else []
        if not 1 <= self.top_k <= count:
            raise UserError(f"strategy.top_k={self.top_k} must lie between 1 and the model's {count} layers.")
        if named is None:
            return self.layers[-self.top_k :]
        if len(set(named)) != self.top_k or not all(0 <= number < count for number in named):
            raise UserError(
                f"strategy.layers={list(named)} must name {self.top_k} different layers "
                f"from 0 to {count - 1}, as strategy.top_k={self.top_k} says."
            )
        return [self.layers[number] for number in sorted(set(named))]

    def plan(self, server_round: int) -> Plan:
        roles = self.federation.roles
        plan = super().plan(server_round).freeze(name for name, role in roles.items() if is_embedding(role))
        return plan if self.settings.select in OWN else plan.keep_layers(self.common, roles)

    @classmethod
    def choice_for(cls, settings: Any, roles: Mapping[str, Role]) -> NamedSettings | None:
        if settings.select not in OWN:
            return None
        top_k = _top_k(settings, layers_of(roles, roles))
        more = {"tokens": settings.tokens, "examples": settings.profile_examples}
        return NamedSettings(settings.select, {"top_k": top_k, **more})

    @classmethod
    def codec_for(cls, settings: Any) -> tuple[str, Any] | None:
        return ("keep", settings.keep) if settings.keep < 1 else None

    def client_plan(self, server_round: int) -> Plan:
        return self.plan(server_round).keep_layers(self.common, self.federation.roles)

    def figures(self) -> tuple[str, ...]:
        return tuple(f"layer_score_{number}" for number, _ in enumerate(self.layers))

    def on_reply(self, client: str, names: Any) -> None:
        self._chosen[client] = layers_of(names, self.federation.roles)

    def observe(self, row: Row, merged: Mapping[str, Tensor]) -> Row:
        """Who chose what, and the layers' mean scores as one list in place of a figure for each."""
        scores = [row.pop(f"layer_score_{n}") for n, _ in enumerate(self.layers) if f"layer_score_{n}" in row]
        chosen = {client: self._chosen[client] for client in row["clients"] if client in self._chosen}
        self._chosen = {}
        return {"selection": chosen, "layers": self.layers} | ({"layer_scores": scores} if scores else {})
