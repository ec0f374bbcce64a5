"""What a client is told in a round: the plan, the arrays it must hold by digest, and how to train."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from fedfrozen_app import registry
from fedfrozen_app.exchange.choice import Choice
from fedfrozen_app.exchange.codec import Codec
from fedfrozen_app.exchange.plan import Phase, Plan


@dataclass(frozen=True)
class NamedSettings:
    """Something that both sides know by name, and its settings."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Order:
    """With a choice, the plan is what may be trained and sent, and each client takes part of it."""

    round: int
    plan: Plan
    base: Mapping[str, str]  # name -> digest of every array the client must hold
    algorithm: str = "fedavg"
    settings: Mapping[str, Any] = field(default_factory=dict)  # the algorithm's
    choice: NamedSettings | None = None
    codec: tuple[str, Any] | None = None  # by which uploads are encoded, and its one setting
    participations: Mapping[str, int] = field(default_factory=dict)  # client: its rounds in the whole run
    judge: bool = False  # say how the model does on the client's own test rows; keep and send nothing

    @cached_property
    def json(self) -> str:
        record: dict[str, Any] = {
            "round": self.round,
            "trained": self.plan.trained,
            "shared": self.plan.shared,
            "private": self.plan.private,
            "base": dict(self.base),
            "algorithm": self.algorithm,
            "settings": dict(self.settings),
        }
        if self.plan.phases:
            record["phases"] = [[phase.trained, phase.epochs] for phase in self.plan.phases]
        if self.choice is not None:
            record["selection"] = {"rule": self.choice.name, **self.choice.settings}
        if self.codec is not None:
            name, setting = self.codec
            record[name] = setting
        if self.participations:  # only a private client asks how often it will be drawn
            record["participations"] = dict(self.participations)
        if self.judge:
            record["judge"] = True
        return json.dumps(record, separators=(",", ":"))

    @cached_property
    def digest(self) -> str:
        """Quoted by the reply, so that an answer to another order is never mistaken for this one's."""
        return hashlib.sha256(self.json.encode()).hexdigest()

    @cached_property
    def method(self) -> Any:
        """The client's algorithm itself, an `Algorithm` with its settings."""
        return registry.find("algorithms", self.algorithm)(**self.settings)

    @cached_property
    def chooser(self) -> Choice | None:
        if self.choice is None:
            return None
        return registry.find("choices", self.choice.name)(**self.choice.settings)

    @cached_property
    def coder(self) -> Codec | None:
        return None if self.codec is None else registry.find("codecs", self.codec[0])(self.codec[1])


@lru_cache(maxsize=8)  # the clients of a round get the same text
def read_order(text: str) -> Order:
    data = json.loads(text)
    phases = tuple(Phase(tuple(names), epochs) for names, epochs in data.get("phases", ()))
    plan = Plan(tuple(data["trained"]), tuple(data["shared"]), tuple(data["private"]), phases)
    settings = dict(data.get("selection", {}))
    choice = NamedSettings(settings.pop("rule"), settings) if settings else None
    codec = next(((name, data[name]) for name in registry.names("codecs") if name in data), None)
    return Order(
        data["round"],
        plan,
        data["base"],
        data["algorithm"],
        data["settings"],
        choice,
        codec,
        data.get("participations", {}),
        data.get("judge", False),
    )
