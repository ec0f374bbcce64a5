"""What a client gets in a round: the plan, the arrays it must hold by digest, and how to train."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from fedfrozen_app.core import registry
from fedfrozen_app.core.deprecated import old_names
from fedfrozen_app.exchange.choice import Choice
from fedfrozen_app.exchange.codec import Codec
from fedfrozen_app.exchange.names import names_in_namespaces, namespace_of
from fedfrozen_app.exchange.plan import Phase, Plan


@dataclass(frozen=True)
class NamedSettings:
    """Something that both sides know by name, and its settings."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Masking:
    """That replies are masked, and how: what the clients of a round must agree on."""

    session: str  # of this attempt at the round
    settings: Mapping[str, Any]  # those of secure_aggregation
    figures: tuple[str, ...] = ()  # names of the metrics that enter the sum
    equal: tuple[str, ...] = ()  # namespaces in which all clients have the same weight
    clip: float | None = None  # this round's largest change of a weight; None: that of the settings
    proposal: str = ""  # hash of what all sites of the sum have accepted; simulated clients accept none

    @property
    def plain(self) -> dict[str, Any]:
        renewed = {} if self.clip is None else {"clip": self.clip}
        return renewed | {
            "session": self.session,
            "proposal": self.proposal,
            "settings": dict(self.settings),
            "figures": list(self.figures),
            "equal": list(self.equal),
        }


@dataclass(frozen=True)
class TrainRequest:
    """With a choice, the plan is what may be trained and sent, and each client takes part of it."""

    round: int
    plan: Plan
    base: Mapping[str, str]  # name -> digest of every array the client must hold
    algorithm: str = "fedavg"
    settings: Mapping[str, Any] = field(default_factory=dict)  # the algorithm's
    choice: NamedSettings | None = None
    codec: tuple[str, Any] | None = None  # by which uploads are encoded, and its one setting
    participations: Mapping[str, int] = field(default_factory=dict)  # client: its rounds in the whole run
    evaluate: bool = False  # evaluate on the client's own test rows; keep and send no arrays
    masking: Masking | None = None  # None: replies travel as they are
    choosing: bool = False  # send the layers that the client would take; train and keep nothing
    most_steps: Mapping[str, int] = field(default_factory=dict)  # client: its local steps, where limited

    @property
    def trains(self) -> bool:
        """Whether it leads to an update."""
        return not (self.evaluate or self.choosing)

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
        if self.evaluate:
            record["judge"] = True
        if self.masking is not None:
            record["masking"] = self.masking.plain
        if self.choosing:
            record["choosing"] = True
        if self.most_steps:
            record["most_steps"] = dict(self.most_steps)
        return json.dumps(record, separators=(",", ":"))

    @cached_property
    def digest(self) -> str:
        """Quoted by the reply, so that an answer to another request is never mistaken for this one's."""
        return hashlib.sha256(self.json.encode()).hexdigest()

    @cached_property
    def work(self) -> str:
        """The digest of the work, whatever masks are used."""
        return self.digest if self.masking is None else replace(self, masking=None).digest

    @cached_property
    def model(self) -> str:
        """The digest of the model that it begins from, without what the algorithm takes besides."""
        others = set(self.method.from_server)
        base = {name: digest for name, digest in self.base.items() if namespace_of(name) not in others}
        return hashlib.sha256(json.dumps(base, sort_keys=True).encode()).hexdigest()

    @cached_property
    def method(self) -> Any:
        """The client's algorithm itself, an `Algorithm` with its settings."""
        return registry.find("algorithms", self.algorithm)(**self.settings)

    @cached_property
    def kind(self) -> tuple[Any, ...]:
        """Requests of one kind have the same names trained by the same algorithm, whatever the round."""
        return (self.plan, self.algorithm, json.dumps(dict(self.settings), sort_keys=True))

    @cached_property
    def base_digests(self) -> frozenset[str]:
        """What a client holds after this request."""
        return frozenset(self.base.values())

    @cached_property
    def sent_names(self) -> tuple[str, ...]:
        """What a reply must hold, where the client does not choose: every shared parameter, and what the
        algorithm sends beside it."""
        return self.names_sent(self.plan.shared)

    def names_sent(self, parameters: tuple[str, ...]) -> tuple[str, ...]:
        """The same for a client that shares these."""
        return (*parameters, *names_in_namespaces(self.method.to_server, parameters))

    @property
    def private_names_in_base(self) -> list[str]:
        """Names that the base gives although the client trains them for itself: such a request is refused."""
        return sorted({*self.base} & {*self.plan.private} & {*self.plan.trained})

    @property
    def is_personal(self) -> bool:
        """Whether a client ends the round with a model of its own."""
        return bool(self.plan.private) or self.method.is_personal()

    @cached_property
    def chooser(self) -> Choice | None:
        if self.choice is None:
            return None
        return registry.find("choices", self.choice.name)(**self.choice.settings)

    @cached_property
    def coder(self) -> Codec | None:
        return None if self.codec is None else registry.find("codecs", self.codec[0])(self.codec[1])


@lru_cache(maxsize=8)  # the clients of a round get the same text
def read_train_request(text: str) -> TrainRequest:
    return train_request_of(json.loads(text))


def train_request_of(data: Mapping[str, Any]) -> TrainRequest:
    """The request of parsed JSON."""
    phases = tuple(Phase(tuple(names), epochs) for names, epochs in data.get("phases", ()))
    plan = Plan(tuple(data["trained"]), tuple(data["shared"]), tuple(data["private"]), phases)
    settings = dict(data.get("selection", {}))
    choice = NamedSettings(settings.pop("rule"), settings) if settings else None
    masking = data.get("masking")
    if masking is not None:
        figures, equal = (tuple(masking[key]) for key in ("figures", "equal"))
        own = (masking.get("clip"), masking["proposal"])
        masking = Masking(masking["session"], masking["settings"], figures, equal, *own)
    codec = next(((name, data[name]) for name in registry.names("codecs") if name in data), None)
    return TrainRequest(
        data["round"],
        plan,
        data["base"],
        data["algorithm"],
        data["settings"],
        choice,
        codec,
        data.get("participations", {}),
        data.get("judge", False),
        masking,
        data.get("choosing", False),
        data.get("most_steps", {}),
    )


# Old names, for one release.
__getattr__ = old_names(__name__, Order="TrainRequest")
