"""What a site allows, whatever the server asks: `policy.yaml`, and why it refuses.

A proposal is judged before anything of it runs, an order before anything trains. The reasons are for the
site's own log: to the server every refusal is the same.
"""

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from fedfrozen_app import registry
from fedfrozen_app.census.ask import Ask, checked_column
from fedfrozen_app.census.floors import LEAST_FLOOR
from fedfrozen_app.census.site import Rules
from fedfrozen_app.config import strategy_settings
from fedfrozen_app.errors import UserError
from fedfrozen_app.exchange.cache import DIGEST
from fedfrozen_app.exchange.names import is_parameter, parameter_of
from fedfrozen_app.exchange.order import Order
from fedfrozen_app.exchange.plan import layers_of
from fedfrozen_app.exchange.proposal import Proposal
from fedfrozen_app.models.folds import is_fold
from fedfrozen_app.models.roles import Role
from fedfrozen_app.sites.accepted import Accepted
from fedfrozen_app.sites.kit import read_yaml
from fedfrozen_app.sites.views import View
from fedfrozen_app.words import counted

WHOLE = (
    *("min_examples", "min_people", "min_cohort", "rounds_per_day"),
    *("hellos_per_day", "judgements_per_day", "refusals_per_day", "censuses_per_day", "census_floor"),
)
NUMBERS = (*WHOLE, "max_epsilon", "max_delta")
FLAGS = ("privacy_required", "downloads", "metrics", "census_matches")
APPROVAL = ("policy", "ask")
MASKS = ("required", "optional")


@dataclass(frozen=True)
class Policy:
    """Keys with a default may be left out, and then the strict answer counts."""

    strategies: tuple[str, ...]
    upload_roles: tuple[str, ...]
    min_examples: int
    rounds_per_day: int
    max_epsilon: float  # of all private runs together
    bundles: tuple[str, ...] | Literal["any"]
    privacy_required: bool = True
    max_delta: float = 1e-5  # of all private runs together
    min_people: int = 20
    approval: str = "ask"
    metrics: bool = False
    downloads: bool = False
    hellos_per_day: int = 50
    judgements_per_day: int = 10
    refusals_per_day: int = 100  # refusals and failures
    # Optional where it is not said: policies from before it was there mean updates that travel as they are.
    secure_aggregation: str = "optional"
    min_cohort: int = 3  # of a masked sum
    census: bool | str = False  # whether the site counts its rows for others; "ask": a person decides
    census_floor: int = 10  # people in a cell that is told, and in a group that is judged by itself
    census_columns: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # with their edges, or words
    census_matches: bool = False  # whether hashes of rows leave, under the key that the sites have agreed on
    censuses_per_day: int = 20
    subgroups: tuple[str, ...] = ()  # columns by which a judged model's figures are told apart

    @classmethod
    def read(cls, path: Path) -> "Policy":
        """A policy that cannot be read, or leaves something open, allows nothing: it ends with a sentence."""
        found = read_yaml(path)
        known = {one.name: one for one in fields(cls)}
        if unknown := sorted(str(key) for key in set(found) - set(known)):
            raise UserError(f"{path} holds the unknown key {unknown[0]}: use {', '.join(sorted(known))}.")
        needed = {
            name for name, one in known.items() if one.default is MISSING and one.default_factory is MISSING
        }
        if missing := sorted(needed - set(found)):
            raise UserError(f"{path} does not say {missing[0]}: add it.")
        return cls(**{key: _checked(key, value, path) for key, value in found.items()})

    def problem_of_proposal(self, proposal: Proposal, view: View, bundle: str) -> str | None:
        """Why this site takes no part in the run; None when it may. Data are not looked at."""
        if self.bundles != "any" and bundle not in self.bundles:
            return f"the bundle {bundle[:12]} is not one of those that it allows"
        if (name := proposal.strategy["name"]) not in self.strategies:
            return f"the strategy {name} is not one of those that it allows"
        if view.classes is None:
            return f"the view {view.name} does not say its classes, so that no run can be held against them"
        if not view.fits(proposal.data.classes):
            return f"the run's classes are not those of the view {view.name}"
        if not self.downloads and view.kind == "hub":
            return f"the view {view.name} comes from the hub, and it downloads nothing"
        if self.secure_aggregation == "required" and proposal.secure_aggregation.name != "on":
            return "it takes part in masked rounds only, and the run is not (secure_aggregation=off)"
        privacy, epsilon = proposal.privacy, proposal.epsilon
        if epsilon is None and self.privacy_required:
            return (
                "it takes part in private runs only, and this one is not (privacy=none, seeded noise, or an "
                "unaccounted choice of layers)"
            )
        if privacy.name != "none" and privacy.unit != view.unit:
            return (
                f"the run speaks of epsilon per {privacy.unit}, and the view {view.name} is per {view.unit}"
            )
        if epsilon is not None and epsilon > self.max_epsilon:
            return f"the run asks for epsilon {epsilon:g}, and it gives {self.max_epsilon:g} over all runs"
        if proposal.delta > self.max_delta:
            return f"the run asks for delta {proposal.delta:g}, and it gives {self.max_delta:g} over all runs"
        return None

    def problem_of_census(self, ask: Ask, view: View, bundle: str) -> str | None:
        """Why the site does not count; None when it may, or a person may let it."""
        if self.census is False:
            return "it takes part in no census"
        if self.bundles != "any" and bundle not in self.bundles:
            return f"the bundle {bundle[:12]} is not one of those that it allows"
        if not self.downloads and view.kind == "hub":
            return f"the view {view.name} comes from the hub, and it downloads nothing"
        if ask.epsilon is None and self.privacy_required:
            return "it tells counts with noise only, and this census has none (--epsilon)"
        if ask.epsilon is not None and ask.epsilon > self.max_epsilon:
            return f"the census asks for epsilon {ask.epsilon:g}, and it gives {self.max_epsilon:g} in all"
        if view.unit == "document":
            return f"the view {view.name} says whose documents its rows are, and not whose they are"
        return None

    def census_rules(self, key: bytes | None) -> Rules:
        """What leaves in a census, whoever asks."""
        return Rules(self.census_floor, self.census_columns, key if self.census_matches else None)

    def problem_of_order(
        self, order: Order, run: Accepted, roles: Mapping[str, Role], examples: int, people: int | None
    ) -> str | None:
        """Why this order is not carried out; `examples` are the rows that it would train on, of `people`."""
        proposal = run.proposal
        strategy = registry.find("strategies", proposal.strategy["name"])
        settings = strategy_settings(run.config)
        if order.algorithm != strategy.algorithm_for(settings):
            return f"the order asks for the algorithm {order.algorithm}, which is not the strategy's"
        choice = None if order.judge else strategy.choice_for(settings, roles)
        codec = None if order.judge else strategy.codec_for(settings)
        if not same(order.settings, strategy.client_settings(settings, run.config.client)):
            return f"the order gives the algorithm {order.algorithm} other settings than the proposal"
        if not same(order.choice and asdict(order.choice), choice and asdict(choice)):
            return "the order lets clients choose layers in another way than the proposal"
        if not same(order.codec, codec):
            return "the order has updates encoded in another way than the proposal"
        if problem := problem_of_masking(order, proposal, strategy):
            return problem
        names = {*order.plan.trained, *order.plan.shared, *order.plan.private}
        folds = set(filter(is_fold, order.base))
        if folds and proposal.adapter.name == "none":
            return "the order adds something to weights that the proposal leaves as they are"
        names |= {name for name in order.base if name not in folds and not belongs(name, order.method.comes)}
        names |= set(map(parameter_of, folds))
        if unknown := sorted(names - set(roles)):
            return f"the order names {unknown[0]}, which the run's model does not have"
        if leaves_choice(order, proposal, roles):
            return "the order leaves it a choice of layers, and all of a group send the same"
        extended = {parameter_of(name) for name in order.base if not is_parameter(name) and name not in folds}
        if strange := sorted(extended - set(order.plan.trained)):
            return f"the order brings an array beside {strange[0]}, which does not train"
        if taken := sorted({*order.base} & {*order.plan.private} & {*order.plan.trained}):
            return f"the order says what {taken[0]} is to be, which the site trains for itself"
        if not all(DIGEST.fullmatch(digest) for digest in order.base.values()):
            return "the order names an array by something that is no digest"
        kinds = {roles[name].word for name in order.plan.shared}
        if refused := sorted(kinds - set(self.upload_roles)):
            return f"the order asks for {refused[0]} parameters, which may not leave it"
        if refused := sorted(kinds - set(proposal.run.roles)):
            return f"the order asks for {refused[0]} parameters, of which its proposal says nothing"
        if order.judge and order.plan.shared:
            return "the order asks for a judgement and for parameters in one"
        if order.judge and (not self.metrics or self.privacy_required):
            return "the order asks how a model does on its rows, and such figures do not leave it"
        rounds = proposal.run.num_rounds
        last = rounds + order.judge  # judged is what the last round has left
        if type(order.round) is not int or not 1 <= order.round <= last:  # 1.5 would be a round of its own
            return f"the order is for round {order.round} of {rounds}"
        if not all(type(n) is int and 1 <= n <= rounds for n in order.participations.values()):
            return f"the order speaks of other rounds than the run's {rounds}"
        client = proposal.client
        if client.local_steps is not None:
            examples = min(examples, client.local_steps * client.batch_size)
            people = None if people is None else min(people, examples)
        if examples < self.min_examples:
            return f"it would train on fewer than {counted(self.min_examples, 'example')}"
        if self.min_people and people is None:
            return "its view does not say whose rows they are (unit: patient), so min_people cannot be kept"
        if people is not None and people < self.min_people:
            return f"it would train on rows of fewer than {self.min_people} people"
        return None


def problem_of_masking(order: Order, proposal: Proposal, strategy: Any) -> str | None:
    """An order of a masked run is masked, as the proposal says and as the strategy counts its clients."""
    asked, masking = proposal.secure_aggregation, order.masking
    if order.choosing:
        if (asked.name, asked.choices) == ("on", "groups") and order.choice is not None and masking is None:
            return None
        return "the order asks which layers it would choose, and its proposal does not"
    if (masking is not None) != (asked.name == "on"):
        if order.judge:
            return "the order asks how a model does on its rows, and of a masked run only sums leave it"
        return "the order asks for an update with masks where the proposal has none, or the other way round"
    if masking is None:
        return None
    settings = {key: value for key, value in asdict(asked).items() if key != "name"}
    if not same(masking.settings, settings):
        return "the order has updates masked in another way than the proposal"
    if tuple(masking.equal) != tuple(strategy.equal):
        return "the order counts clients in another way than the strategy"
    return None


def leaves_choice(order: Order, proposal: Proposal, roles: Mapping[str, Role]) -> bool:
    """Whether sites of one sum might send different layers, although its proposal has groups that do not.
    Of a layer that one site alone had sent, the sum would be that site's update."""
    if order.masking is None or order.chooser is None or proposal.secure_aggregation.choices != "groups":
        return False
    return len(layers_of(order.plan.trained, roles)) != order.chooser.top_k


def same(told: Any, expected: Any) -> bool:
    """Whether these are the same values in JSON, in which an order travels."""
    return json.loads(json.dumps(told)) == json.loads(json.dumps(expected))


def belongs(name: str, namespaces: tuple[str, ...]) -> bool:
    """Whether this is an array that the algorithm lets come with its orders."""
    return name.rpartition("/")[0] in namespaces


def _checked(key: str, value: Any, path: Path) -> Any:
    if key in ("strategies", "upload_roles", "bundles", "subgroups"):
        if key == "bundles" and value == "any":
            return value
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise UserError(f"{path}: {key} must be a list of words.")
        return tuple(value)
    if key in NUMBERS:
        whole = key in WHOLE
        good = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if not good or not 0 <= value < float("inf"):
            how = "" if whole else " (1.0e-6: YAML asks for the point)"
            raise UserError(f"{path}: {key} must be a number from 0 on{how}.")
    if key in FLAGS and not isinstance(value, bool):
        raise UserError(f"{path}: {key} must be true or false.")
    if key == "secure_aggregation" and value not in MASKS:
        raise UserError(f"{path}: secure_aggregation must be required or optional.")
    if key == "census" and value not in (True, False, "ask"):
        raise UserError(f"{path}: census must be yes, no or ask.")
    if key == "census_floor" and value < LEAST_FLOOR:
        raise UserError(f"{path}: census_floor must be {LEAST_FLOOR} or more.")
    if key == "census_columns":
        return _columns(value, path)
    if key == "approval" and value not in APPROVAL:
        raise UserError(f"{path}: approval must be policy or ask.")
    return value


def _columns(value: Any, path: Path) -> dict[str, tuple[Any, ...]]:
    if not isinstance(value, dict):
        raise UserError(
            f"{path}: census_columns must say edges or words by column: {{age: [0, 18, 65, 120]}}."
        )
    try:
        return {name: checked_column(name, kinds) for name, kinds in value.items()}
    except ValueError as error:
        raise UserError(f"{path}: census_columns: {error}.") from error
