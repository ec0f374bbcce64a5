"""The train request of a round: the plan, digests of arrays that the client must hold, and how to train."""

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
    """An object that both sides know by name, and its settings."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Masking:
    """The masking of replies: settings that all clients of a round must share."""

    session: str  # id of this attempt at the round
    settings: Mapping[str, Any]  # those of secure_aggregation
    figures: tuple[str, ...] = ()  # names of the metrics that enter the sum
    equal: tuple[str, ...] = ()  # namespaces in which all clients have the same weight
    clip: float | None = None  # this round's clipping bound per weight; None: as in `settings`
    proposal: str = ""  # hash of the accepted proposal; empty for simulated clients

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
    """A train request. With a choice, each client trains and sends a part of the plan."""

    round: int
    plan: Plan
    base: Mapping[str, str]  # name -> digest of every array the client must hold
    algorithm: str = "fedavg"
    settings: Mapping[str, Any] = field(default_factory=dict)  # the algorithm's
    choice: NamedSettings | None = None
    codec: tuple[str, Any] | None = None  # name of the upload codec, and its setting
    participations: Mapping[str, int] = field(default_factory=dict)  # client: its rounds in the whole run
    evaluate: bool = False  # evaluate on the client's own test rows; keep and send no arrays
    masking: Masking | None = None  # None: replies are not masked
    choosing: bool = False  # send only the client's choice of layers; train and keep nothing
    most_steps: Mapping[str, int] = field(default_factory=dict)  # client: its maximum of local steps

    @property
    def trains(self) -> bool:
        """Whether the client trains and returns an update."""
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
        if self.participations:  # only private clients need their number of rounds
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
        """The request's digest, which replies quote, so that an answer to another request is never mistaken
        for one to this."""
        return hashlib.sha256(self.json.encode()).hexdigest()

    @cached_property
    def work(self) -> str:
        """The digest of the work, independent of masks."""
        return self.digest if self.masking is None else replace(self, masking=None).digest

    @cached_property
    def model(self) -> str:
        """The digest of the initial model, without the algorithm's arrays."""
        others = set(self.method.from_server)
        base = {name: digest for name, digest in self.base.items() if namespace_of(name) not in others}
        return hashlib.sha256(json.dumps(base, sort_keys=True).encode()).hexdigest()

    @cached_property
    def method(self) -> Any:
        """The client's `Algorithm`, with its settings."""
        return registry.find("algorithms", self.algorithm)(**self.settings)

    @cached_property
    def kind(self) -> tuple[Any, ...]:
        """A key: requests of one kind train the same names with the same algorithm, whatever the round."""
        return (self.plan, self.algorithm, json.dumps(dict(self.settings), sort_keys=True))

    @cached_property
    def base_digests(self) -> frozenset[str]:
        """The digests that a client holds after this request."""
        return frozenset(self.base.values())

    @cached_property
    def sent_names(self) -> tuple[str, ...]:
        """The names that a reply must contain if the client does not choose layers: every shared parameter,
        and the algorithm's arrays for it."""
        return self.names_sent(self.plan.shared)

    def names_sent(self, parameters: tuple[str, ...]) -> tuple[str, ...]:
        """The same for a client that shares these parameters."""
        return (*parameters, *names_in_namespaces(self.method.to_server, parameters))

    @property
    def private_names_in_base(self) -> list[str]:
        """Names in the base that are private to the client: such a request is rejected."""
        return sorted({*self.base} & {*self.plan.private} & {*self.plan.trained})

    @property
    def is_personal(self) -> bool:
        """Whether a client has a personal model after the round."""
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
