"""What trains, what travels and what stays private in one round: the plan, and the order that carries it."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from fedfrozen_app.models.roles import Role


@dataclass(frozen=True)
class Plan:
    """Names by their fate; a name that is neither trained nor private is frozen.

    `shared` names travel up after training; `private` names never leave the client.
    """

    trained: tuple[str, ...]
    shared: tuple[str, ...]
    private: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if leak := set(self.shared) & set(self.private):
            raise ValueError(f"a private name would travel: {sorted(leak)}")
        if extra := set(self.shared) - set(self.trained):
            raise ValueError(f"a shared name is not trained: {sorted(extra)}")

    @classmethod
    def full(cls, names: Iterable[str]) -> "Plan":
        """Everything trains and travels: FedAvg."""
        names = tuple(names)
        return cls(trained=names, shared=names)

    def freeze(self, names: Iterable[str]) -> "Plan":
        """The same plan with these names neither trained nor sent."""
        frozen = set(names)
        return replace(
            self,
            trained=tuple(name for name in self.trained if name not in frozen),
            shared=tuple(name for name in self.shared if name not in frozen),
        )

    def keep_private(self, names: Iterable[str]) -> "Plan":
        """The same plan with these names kept on the client."""
        kept = tuple(names)
        inside = set(kept)
        return replace(self, shared=tuple(name for name in self.shared if name not in inside), private=kept)

    def keep_layers(self, layers: Iterable[int], roles: Mapping[str, Role]) -> "Plan":
        """The same plan with all other layers frozen; what belongs to no layer stays as it is."""
        kept = {None, *layers}
        return self.freeze(name for name in self.trained if roles[name].layer not in kept)


def layers_of(names: Iterable[str], roles: Mapping[str, Role]) -> list[int]:
    """The numbers of the layers that these names belong to, in ascending order."""
    return sorted({layer for name in names if (layer := roles[name].layer) is not None})


@dataclass(frozen=True)
class Selection:
    """How each client chooses for itself which layers of the plan it trains and sends."""

    rule: str  # of models/select.py
    top_k: int
    tokens: str | Sequence[int] | None = None  # the token set of models/profile.py; None: by model and task
    examples: int = 256  # profiled at most


@dataclass(frozen=True)
class Order:
    """What a client is told in a round: the plan, its base by digest, and how to train.

    With a selection, the plan is what may be trained and sent, and each client takes part of it.
    """

    round: int
    plan: Plan
    base: Mapping[str, str]  # name -> digest of every array the client must hold
    algorithm: str = "fedavg"
    settings: Mapping[str, Any] = field(default_factory=dict)
    selection: Selection | None = None
    keep: float = 1.0  # share of a layer's updates that is sent, the largest ones
    participations: Mapping[str, int] = field(default_factory=dict)  # client: its rounds in the whole run
    judge: bool = False  # say how the model does on the client's own test rows; keep and send nothing

    @cached_property
    def json(self) -> str:
        told: dict[str, Any] = {
            "round": self.round,
            "trained": self.plan.trained,
            "shared": self.plan.shared,
            "private": self.plan.private,
            "base": dict(self.base),
            "algorithm": self.algorithm,
            "settings": dict(self.settings),
        }
        if self.selection is not None:
            told["selection"] = asdict(self.selection)
        if self.keep < 1:
            told["keep"] = self.keep
        if self.participations:  # only a private client asks how often it will be drawn
            told["participations"] = dict(self.participations)
        if self.judge:
            told["judge"] = True
        return json.dumps(told, separators=(",", ":"))

    @cached_property
    def digest(self) -> str:
        """Quoted by the reply, so that an answer to another order is never mistaken for this one's."""
        return hashlib.sha256(self.json.encode()).hexdigest()


@lru_cache(maxsize=8)  # the clients of a round get the same text
def read_order(text: str) -> Order:
    data = json.loads(text)
    plan = Plan(tuple(data["trained"]), tuple(data["shared"]), tuple(data["private"]))
    selection = Selection(**data["selection"]) if "selection" in data else None
    return Order(
        data["round"],
        plan,
        data["base"],
        data["algorithm"],
        data["settings"],
        selection,
        data.get("keep", 1.0),
        data.get("participations", {}),
        data.get("judge", False),
    )
