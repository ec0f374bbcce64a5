"""What a site allows, whatever the server asks: `policy.yaml`, and why it refuses a proposal or a census.

`request_rules` holds the rules for the train requests of an accepted proposal. The reasons are for the site's
own log: to the server every refusal is the same.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from fedfrozen_app.census.ask import Ask, checked_column
from fedfrozen_app.census.floors import LEAST_FLOOR
from fedfrozen_app.census.rules import Rules
from fedfrozen_app.config import SecureAggregationConfig
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.exchange.proposal import MASKED_FORMAT, Proposal
from fedfrozen_app.exchange.text_part import TextPart
from fedfrozen_app.secure.roster import NEIGHBOURS
from fedfrozen_app.sites.kit import read_yaml
from fedfrozen_app.sites.opening_hours import checked_hours
from fedfrozen_app.sites.shown_settings import is_noise_in_sum
from fedfrozen_app.sites.views import View
from fedfrozen_app.study.site_rules import MODES
from fedfrozen_app.study.site_rules import Rules as StudyRules
from fedfrozen_app.study.site_rules import problem as problem_of_study
from fedfrozen_app.study.study_ask import Masks, StudyAsk
from fedfrozen_app.survival.time_edges import check_edges

WHOLE = (
    *("min_examples", "min_people", "min_cohort", "min_neighbours", "max_tokens", "rounds_per_day"),
    *("hellos_per_day", "judgements_per_day", "refusals_per_day", "censuses_per_day", "census_floor"),
    "survival_answers_per_day",
)
NUMBERS = (*WHOLE, "max_epsilon", "max_delta", "min_threshold")
FLAGS = (
    *("privacy_required", "noise_in_sum", "downloads", "metrics", "census_matches"),
    "survival_regression",
)
APPROVAL = ("policy", "ask")
MASKS = ("required", "optional")
DIFFERENCING = ("model", "data")
TOKENIZERS = ("any", "own")
MONITORING = ("none", "health", "activity")


@dataclass(frozen=True)
class Policy:
    """The keys of `policy.yaml`. Those with a default may be left out: the default is the strict choice."""

    strategies: tuple[str, ...]
    upload_roles: tuple[str, ...]
    min_examples: int
    rounds_per_day: int
    max_epsilon: float  # of all private runs together
    bundles: tuple[str, ...] | Literal["any"]
    privacy_required: bool = True
    max_delta: float = 1e-5  # of all private runs together
    noise_in_sum: bool = False  # whether noise that is enough in the sum alone counts as privacy
    min_people: int = 20
    approval: str = "ask"
    metrics: bool = False
    downloads: bool = False
    tokenizers: str = "any"  # "own": the model's, or bytes; older policies lack this key
    max_tokens: int = 8192  # of a text that the site reads, all chunks together
    hellos_per_day: int = 50
    judgements_per_day: int = 10
    refusals_per_day: int = 100  # refusals and failures
    # Optional by default: policies that are older than this key expect updates without masks.
    secure_aggregation: str = "optional"
    min_cohort: int = 3  # of a masked sum
    min_threshold: float = 2 / 3  # share of a round's sites that must stay: higher resists more colluders
    min_neighbours: int = NEIGHBOURS  # that a site draws in a round of more sites
    differencing: str = "data"  # which masked sums must not be distinguishable: of one view, or of one model
    census: bool | str = False  # whether the site counts its rows; "ask": a person decides
    census_floor: int = 10  # fewest people in a published cell, and in a group that is evaluated separately
    census_columns: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # with edges, or levels
    census_matches: bool = False  # whether hashes of rows leave, keyed by `match_key`
    censuses_per_day: int = 20
    survival: str = "none"  # what a survival study gets: nothing, counts between edges, or exact times
    survival_columns: tuple[str, ...] = ()  # that a study may use; rows missing one are left out
    survival_edges: tuple[float, ...] = ()  # of the time bins
    survival_groups: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # columns to compare, with levels
    survival_regression: bool = False  # whether sums of covariates leave, for given coefficients
    survival_answers_per_day: int = 60  # over all studies: a Cox regression takes one per step
    subgroups: tuple[str, ...] = ()  # columns by which a model is evaluated separately
    monitoring: str = "none"  # what `fedfrozen site metrics` shows: nothing, health, or work too
    forbidden_columns: tuple[str, ...] = ()  # that no run, census or study reads, whatever a view says
    availability: tuple[str, ...] = ()  # hours in which it trains, by its own clock; none: always

    @classmethod
    def read(cls, path: Path) -> "Policy":
        """`UserError` if the policy cannot be read or misses a key: the site then allows nothing."""
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
        """Why this site takes no part in the run; None if it may. No data are read."""
        return next((problem for _, problem in self.rules(proposal, view, bundle) if problem), None)

    def rules(self, proposal: Proposal, view: View, bundle: str) -> Iterator[tuple[str, str | None]]:
        """Each rule's name, and why it refuses the proposal; None if it does not."""
        name, classes = proposal.strategy["name"], proposal.data.classes
        yield "bundle", self._problem_of_bundle(bundle)
        refused = f"the strategy {name} is not one of those that it allows"
        yield "strategy", None if name in self.strategies else refused
        yield "columns", view.problem_of_table(proposal.table) or self._problem_of_columns(proposal, view)
        if not view.has_classes:
            yield "classes", None if not classes else f"the rows of the view {view.name} have no classes"
        elif view.classes is None:
            unsaid = f"the view {view.name} does not say its classes"
            yield "classes", f"{unsaid}, so that no run can be held against them"
        else:
            others = f"the run's classes are not those of the view {view.name}"
            yield "classes", None if view.fits(classes) else others
        yield "download", self._problem_of_download(view)
        yield "texts", self._problem_of_text(proposal, view)
        yield "masks", self.problem_of_masks(proposal)
        yield "privacy", self._problem_of_privacy(proposal)
        yield "unit", self._problem_of_unit(proposal, view)
        yield "epsilon", self._problem_of_epsilon(proposal)

    def _problem_of_privacy(self, proposal: Proposal) -> str | None:
        if not self.privacy_required:
            return None
        if proposal.epsilon is None:
            return (
                "it takes part in private runs only, and this one is not (privacy=none, seeded noise, or an "
                "unaccounted choice of layers)"
            )
        if not self.noise_in_sum and is_noise_in_sum(proposal):
            return (
                "the noise of its own update would be too little by itself (secure_aggregation.noise=sum), "
                "and its policy does not say noise_in_sum"
            )
        return None

    def _problem_of_unit(self, proposal: Proposal, view: View) -> str | None:
        unit = proposal.privacy.unit
        if proposal.privacy.name == "none" or unit == view.unit:
            return None
        return f"the run speaks of epsilon per {unit}, and the view {view.name} is per {view.unit}"

    def _problem_of_epsilon(self, proposal: Proposal) -> str | None:
        epsilon = proposal.epsilon
        if epsilon is not None and epsilon > self.max_epsilon:
            return f"the run asks for epsilon {epsilon:g}, and it gives {self.max_epsilon:g} over all runs"
        if proposal.delta > self.max_delta:
            return f"the run asks for delta {proposal.delta:g}, and it gives {self.max_delta:g} over all runs"
        return None

    def problem_of_masks(self, proposal: Proposal) -> str | None:
        """Why this site takes no part in the run's masked rounds, or in rounds without masks."""
        asked = proposal.secure_aggregation
        if asked.name != "on":
            if self.secure_aggregation == "required":
                return "it takes part in masked rounds only, and the run is not (secure_aggregation=off)"
            return None
        if proposal.format != MASKED_FORMAT:
            return (
                "the server masks as an older version of this package does: install the version of this site "
                "there, too"
            )
        return self._problem_of_mask_floors("run", asked)

    def _problem_of_mask_floors(self, what: str, asked: SecureAggregationConfig | Masks) -> str | None:
        neighbours = NEIGHBOURS if asked.neighbours is None else asked.neighbours
        floors = {
            "min_cohort": (asked.min_cohort, self.min_cohort),
            "threshold": (asked.threshold, self.min_threshold),
            "neighbours": (neighbours, self.min_neighbours),
        }
        for key, (given, least) in floors.items():
            if given < least:
                return (
                    f"the {what} has secure_aggregation.{key}={given:.4g}, and it asks for {least:.4g} at "
                    "least"
                )
        return None

    def _problem_of_bundle(self, bundle: str) -> str | None:
        if self.bundles == "any" or bundle in self.bundles:
            return None
        return f"the bundle {bundle[:12]} is not one of those that it allows"

    def _problem_of_columns(self, proposal: Proposal, view: View) -> str | None:
        read = () if proposal.table is None else (*proposal.table.columns, *view.label_columns)
        return self._problem_of_names("run", read)

    def _problem_of_names(self, what: str, columns: Iterable[str]) -> str | None:
        if forbidden := [name for name in columns if name in self.forbidden_columns]:
            return f"the {what} reads the column {forbidden[0]}, which its policy forbids"
        return None

    def _problem_of_text(self, proposal: Proposal, view: View) -> str | None:
        text = proposal.texts or TextPart()
        if text.merges and self.tokenizers == "own":
            return (
                "the run brings a tokenizer of its own, and it takes those of models alone (tokenizers: own)"
            )
        if proposal.texts is not None and text.max_tokens * text.chunks > self.max_tokens:
            return f"the run reads {text.max_tokens * text.chunks} tokens of a text, and it {self.max_tokens}"
        if view.max_tokens not in (None, text.max_tokens):
            return f"the run reads {text.max_tokens} tokens of a text, the view {view.name} {view.max_tokens}"
        return None

    def _problem_of_download(self, view: View) -> str | None:
        if self.downloads or view.kind != "hub":
            return None
        return f"the view {view.name} comes from the hub, and it downloads nothing"

    def problem_of_census(self, ask: Ask, view: View, bundle: str) -> str | None:
        """Why the site does not count; None if it may, or if a person may decide."""
        if self.census is False:
            return "it takes part in no census"
        if problem := self._problem_of_bundle(bundle) or self._problem_of_download(view):
            return problem
        if problem := self._problem_of_names("census", ask.columns):
            return problem
        if ask.epsilon is None and self.privacy_required:
            return "it tells counts with noise only, and this census has none (--epsilon)"
        if ask.epsilon is not None and ask.epsilon > self.max_epsilon:
            return f"the census asks for epsilon {ask.epsilon:g}, and it gives {self.max_epsilon:g} in all"
        if view.unit == "document":
            return f"the view {view.name} says whose documents its rows are, and not whose they are"
        return None

    def problem_of_study(self, ask: StudyAsk, view: View, bundle: str) -> str | None:
        """Why the site gives nothing to a survival study; None if it may, or if a person may decide."""
        if problem := self._problem_of_bundle(bundle) or self._problem_of_download(view):
            return problem
        problem = self._problem_of_names("study", ask.columns.names)
        if problem := problem or problem_of_study(ask, self.study_rules()):
            return problem
        if ask.masks is not None and (problem := self._problem_of_mask_floors("study", ask.masks)):
            return problem
        if ask.epsilon is None and self.privacy_required:
            return "it gives counts with noise only, and this study has none (--epsilon)"
        if ask.epsilon is not None and ask.epsilon > self.max_epsilon:
            return f"the study asks for epsilon {ask.epsilon:g}, and it gives {self.max_epsilon:g} in all"
        if view.unit == "document":
            return f"the view {view.name} says whose documents its rows are, and not whose they are"
        return None

    def study_rules(self) -> StudyRules:
        """What may leave in a survival study."""
        return StudyRules(
            *(self.survival, self.census_floor, self.survival_edges, self.survival_groups),
            *(self.survival_columns, self.survival_regression),
        )

    @property
    def sends_metrics(self) -> bool:
        """Whether losses and accuracies leave the site."""
        return self.metrics and not self.privacy_required

    @property
    def sends_hashes(self) -> bool:
        """Whether hashes of rows leave the site: they are exact, so never where privacy is required."""
        return self.census_matches and not self.privacy_required

    def census_rules(self, key: bytes | None) -> Rules:
        """What may leave in a census."""
        return Rules(self.census_floor, self.census_columns, key if self.sends_hashes else None)


def _checked(key: str, value: Any, path: Path) -> Any:
    if key in ("strategies", "upload_roles", "bundles", "subgroups", "survival_columns", "forbidden_columns"):
        if key == "bundles" and value == "any":
            return value
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise UserError(f"{path}: {key} must be a list of words.")
        return tuple(value)
    if key == "availability":
        return checked_hours(value, path)
    if key in NUMBERS:
        whole = key in WHOLE
        good = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if not good or not 0 <= value < float("inf"):
            how = "" if whole else " (1.0e-6: YAML asks for the point)"
            raise UserError(f"{path}: {key} must be a number from 0 on{how}.")
    if key == "min_threshold" and value > 1:
        raise UserError(f"{path}: min_threshold is a share of a round's sites: give a number up to 1.")
    if key in FLAGS and not isinstance(value, bool):
        raise UserError(f"{path}: {key} must be true or false.")
    if key == "secure_aggregation" and value not in MASKS:
        raise UserError(f"{path}: secure_aggregation must be required or optional.")
    if key == "differencing" and value not in DIFFERENCING:
        raise UserError(f"{path}: differencing must be model or data.")
    if key == "census" and not (isinstance(value, bool) or value == "ask"):  # 0 == False, but not allowed
        raise UserError(f"{path}: census must be yes, no or ask.")
    if key == "census_floor" and value < LEAST_FLOOR:
        raise UserError(f"{path}: census_floor must be {LEAST_FLOOR} or more.")
    if key == "census_columns":
        return _columns(value, path)
    if key == "survival" and value not in MODES:
        raise UserError(f"{path}: survival must be {', '.join(MODES)}.")
    if key == "survival_edges":
        return _edges(value, path)
    if key == "survival_groups":
        return _survival_groups(value, path)
    if key == "monitoring" and value not in MONITORING:
        raise UserError(f"{path}: monitoring must be {', '.join(MONITORING)}.")
    if key == "tokenizers" and value not in TOKENIZERS:
        raise UserError(f"{path}: tokenizers must be any or own.")
    if key == "approval" and value not in APPROVAL:
        raise UserError(f"{path}: approval must be policy or ask.")
    return value


def _edges(value: Any, path: Path) -> tuple[float, ...]:
    if value == []:
        return ()
    try:
        return check_edges(value)
    except (UserError, TypeError, ValueError) as error:
        raise UserError(f"{path}: survival_edges must increase, as [0, 90, 180]: {error}") from error


def _survival_groups(value: Any, path: Path) -> dict[str, tuple[str, ...]]:
    """YAML reads levels such as 0 and 1 as numbers."""
    sound = isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(levels, list) and len(set(map(str, levels))) >= 2
        for name, levels in value.items()
    )
    if not sound:
        raise UserError(f"{path}: survival_groups must say two levels or more by column: {{arm: [A, B]}}.")
    return {name: tuple(map(str, levels)) for name, levels in value.items()}


def _columns(value: Any, path: Path) -> dict[str, tuple[Any, ...]]:
    if not isinstance(value, dict):
        raise UserError(
            f"{path}: census_columns must say edges or words by column: {{age: [0, 18, 65, 120]}}."
        )
    try:
        return {name: checked_column(name, kinds) for name, kinds in value.items()}
    except ValueError as error:
        raise UserError(f"{path}: census_columns: {error}.") from error
