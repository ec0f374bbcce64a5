"""A run's proposal to a site: a JSON document with a closed schema.

A person composes a run with Hydra on the server; `propose` turns the result into plain values. A site reads
them with `read_proposal`, which knows every key, takes plain values within bounds, and resolves, looks up and
opens nothing. It can name a view of the site's data, but no path, column or filter: the schema has no keys
for them. The same object is checked, hashed, approved and trained.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from fedfrozen_app.config import (
    AdapterConfig,
    ClientConfig,
    CodecConfig,
    Config,
    PrivacyConfig,
    SecureAggregationConfig,
    setting,
)
from fedfrozen_app.config.secure_checks import RINGS
from fedfrozen_app.config.strict_values import read_strict
from fedfrozen_app.core import registry
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.vocabulary import problem_of_merges
from fedfrozen_app.exchange.model_part import ModelPart, check_model, known_key
from fedfrozen_app.exchange.strict import Spelled, canonical, read_json
from fedfrozen_app.exchange.table_part import COLUMNS, TARGET, TablePart, read_table_part, table_part
from fedfrozen_app.exchange.text_part import READING, TextPart

# With masks it has a separate format number: sites of an older version, with other masks, reject it.
FORMAT, MASKED_FORMAT = 1, 2
# The optional parts of a proposal.
MASKED, CODED, ADAPTED, TEXTS, TABLE = "secure_aggregation", "codec", "adapter", "texts", "table"
MOST, DEPTH, LONGEST = 1_000_000, 6, 300
MOST_ROUNDS_KEPT = 100  # replies on a site's disk
RUN_ID = re.compile(r"[0-9a-z][0-9a-z-]{0,63}")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")  # name of a view, a strategy or a role
# Any other text: a word or a short sentence, without characters special to a shell, Hydra or a file system.
WORDS = re.compile(r"[A-Za-z0-9 _.,:+(){}'-]{0,200}")
HASH = re.compile(r"[0-9a-f]{64}")
FROM_VIEW = ("unit_column", "examples")  # of the privacy settings: the site's view sets them
AT_SERVER = ("path",)  # of the adapter: its initial values are in the first request
OWN_PLACE = ("classes", "mean", "std", READING, COLUMNS, TARGET)  # data spec keys not in data.more
NOT_PROPOSED = ("hub", "aligned")  # model sources that would create or download a model at the site


@dataclass(frozen=True)
class DataPart:
    """The view, and the data format that all sites must share."""

    view: str | None = setting(None, "")
    classes: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    more: dict[str, str] = setting({}, "")  # values that the model's wrapper compares with the site's


@dataclass(frozen=True)
class RunPart:
    id: str = setting("", "")
    num_rounds: int = setting(1, "", least=0)
    eval_every: int = setting(1, "", least=1)
    seed: int = setting(0, "", least=0)
    threads: int | None = setting(None, "", least=1, most=256)
    keep_rounds: int = setting(2, "", least=1, most=MOST_ROUNDS_KEPT)  # rounds that a resumed run may go back
    roles: tuple[str, ...] = ()  # of the parameters that will be requested


@dataclass(frozen=True)
class Proposal(Spelled):
    run: RunPart
    data: DataPart
    strategy: Mapping[str, Any]  # its name and its own settings
    model: ModelPart
    client: ClientConfig
    privacy: PrivacyConfig
    format: int = field(default=FORMAT)
    secure_aggregation: SecureAggregationConfig = field(default_factory=SecureAggregationConfig)
    codec: CodecConfig = field(default_factory=CodecConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    texts: TextPart | None = None
    table: TablePart | None = None

    @cached_property
    def plain(self) -> dict[str, Any]:
        privacy = {key: value for key, value in asdict(self.privacy).items() if key not in FROM_VIEW}
        masked = self.secure_aggregation.name != "off"  # omitted in a run without masks
        return {
            "format": self.format,
            **({MASKED: asdict(self.secure_aggregation)} if masked else {}),
            **({CODED: asdict(self.codec)} if self.codec.is_used else {}),
            **({ADAPTED: adapter_part(self.adapter)} if self.adapter.name != "none" else {}),
            **({TEXTS: asdict(self.texts)} if self.texts is not None else {}),
            **({TABLE: asdict(self.table)} if self.table is not None else {}),
            "run": asdict(self.run),
            "data": asdict(self.data),
            "strategy": dict(self.strategy),
            "model": asdict(self.model),
            "client": asdict(self.client),
            "privacy": privacy,
        }

    @property
    def ticket(self) -> dict[str, str]:
        """The identification in every train request of the run."""
        return {"run": self.run.id, "proposal": self.hash}

    @property
    def epsilon(self) -> float | None:
        """The run's total privacy budget; None without a guarantee."""
        if (
            self.privacy.name == "none"
            or self.privacy.seeded_noise
            or self.privacy.selection == "unaccounted"
        ):
            return None
        return self.privacy.epsilon

    @property
    def delta(self) -> float:
        """The largest δ; by default 1e-5, or less if a site has many examples."""
        return 0.0 if self.epsilon is None else self.privacy.delta or 1e-5

    @property
    def data_spec(self) -> dict[str, Any]:
        """The data format of all sites, as a client's data spec."""
        data = self.data
        found = {**data.more, "classes": list(data.classes), "mean": list(data.mean), "std": list(data.std)}
        if self.table is not None:
            found |= self.table.spec()
        return found if self.texts is None else {**found, READING: self.texts.spec()}


def read_proposal(text: str) -> Proposal:
    """Parse a proposal; `ValueError`, as the rest of a sentence for the site's own log, if it is invalid."""
    found = read_json(text, most=MOST, depth=DEPTH, longest=LONGEST)
    keys = {"format", "run", "data", "strategy", "model", "client", "privacy"}
    if not isinstance(found, dict) or set(found) - {MASKED, CODED, ADAPTED, TEXTS, TABLE} != keys:
        raise ValueError("it has other keys than a proposal")
    if type(found["format"]) is not int or found["format"] not in (FORMAT, MASKED_FORMAT):
        raise ValueError("it is of another version's format")
    if found["format"] == MASKED_FORMAT and MASKED not in found:
        raise ValueError("its format is that of a run with masks, and it has none")
    run = read_strict(RunPart, found["run"], "run.", whole=True)
    data = read_strict(DataPart, found["data"], "data.", whole=True)
    model = read_strict(ModelPart, found["model"], "model.", whole=True)
    client = read_strict(ClientConfig, found["client"], "client.", whole=True)
    privacy = read_strict(PrivacyConfig, found["privacy"], "privacy.", without=FROM_VIEW, whole=True)
    proposal = Proposal(run, data, _strategy(found["strategy"]), model, client, privacy)
    if MASKED in found:
        secure = read_strict(SecureAggregationConfig, found[MASKED], f"{MASKED}.", whole=True)
        if secure.name != "on" or secure.bits not in RINGS:
            raise ValueError(f"{MASKED} is none")
        proposal = replace(proposal, format=found["format"], secure_aggregation=secure)
    if CODED in found:
        codec = read_strict(CodecConfig, found[CODED], f"{CODED}.", whole=True)
        if not (NAME.fullmatch(codec.name) and NAME.fullmatch(codec.down) and codec.is_used):
            raise ValueError(f"{CODED} is none")
        proposal = replace(proposal, codec=codec)
    if ADAPTED in found:
        adapter = read_strict(AdapterConfig, found[ADAPTED], f"{ADAPTED}.", without=AT_SERVER, whole=True)
        if not all(NAME.fullmatch(who) and type(rank) is int for who, rank in adapter.ranks.items()):
            raise ValueError(f"{ADAPTED}.ranks are no ranks of sites")
        for key, value in adapter_part(replace(adapter, ranks={})).items():
            _plain(value, f"{ADAPTED}.{key}")
        if not NAME.fullmatch(adapter.name) or adapter.name == "none":
            raise ValueError(f"{ADAPTED} is none")
        proposal = replace(proposal, adapter=adapter)
    if TEXTS in found:
        proposal = replace(proposal, texts=read_strict(TextPart, found[TEXTS], f"{TEXTS}.", whole=True))
    if TABLE in found:
        proposal = replace(proposal, table=read_table_part(found[TABLE]))
    _check(proposal)
    return proposal


def propose(config: Config, data_spec: Mapping[str, Any], run_id: str, roles: Iterable[str]) -> Proposal:
    """Turn a composed run into a proposal; a `UserError` for settings that cannot be proposed to a site."""
    check_proposable(config)
    try:
        return read_proposal(canonical(_plain_parts(config, data_spec, run_id, roles)))
    except ValueError as error:
        raise UserError(
            f"This run cannot be proposed to sites with an executor: {error}. They take plain numbers and "
            "words; docs/deployment-reference.md lists what a proposal may hold."
        ) from error


def check_proposable(config: Config) -> None:
    """Raise a `UserError` for settings that are not part of a proposal."""
    if config.model.source == "aligned":
        raise UserError(
            "model.source=aligned makes encoders on each machine: give every site the folder of one model, "
            "as model_path in its site.yaml, and use model=checkpoint."
        )
    if config.model.gradient_checkpointing:
        raise UserError(
            "model.gradient_checkpointing is about this machine's memory, and no site is asked for it: set "
            "it to false."
        )
    if config.dataset.augment != "none":
        raise UserError(
            f"dataset.augment={config.dataset.augment} is no part of a proposal, so that no site would do "
            "it: set dataset.augment=none."
        )
    if config.model.roles is not None:
        raise UserError(
            "model.roles is a file of this machine, and sites know the built-in table alone: leave it out, "
            "or have a package at every site bring the model with its roles."
        )


def _plain_parts(
    config: Config, data_spec: Mapping[str, Any], run_id: str, roles: Iterable[str]
) -> dict[str, Any]:
    source = config.model.source
    privacy = {k: v for k, v in asdict(config.privacy).items() if k not in FROM_VIEW}
    known = ("classes", "mean", "std")
    more = {key: value for key, value in data_spec.items() if key not in (*known, READING, COLUMNS, TARGET)}
    found = {
        "format": FORMAT,
        "run": {
            "id": run_id,
            "num_rounds": config.num_rounds,
            "eval_every": config.eval_every,
            "seed": config.seed,
            "threads": config.runtime.threads,
            "keep_rounds": min(max(config.checkpoint.every, 1) + 1, MOST_ROUNDS_KEPT),
            "roles": sorted(set(roles)),
        },
        "data": {
            "view": config.runtime.view,
            **{key: list(data_spec[key]) for key in known},
            "more": more,
        },
        "strategy": dict(config.strategy),
        "model": {
            # A model from the hub is a pretrained one, of which each site has its own copy.
            "source": "checkpoint" if source == "hub" else source,
            "model_type": config.model.model_type,
            "dtype": config.model.dtype,
            "config": dict(config.model.config),
        },
        "client": asdict(config.client),
        "privacy": privacy,
    }
    if config.secure_aggregation.name == "on":
        found |= {"format": MASKED_FORMAT, MASKED: asdict(config.secure_aggregation)}
    if config.codec.is_used:
        found[CODED] = asdict(config.codec)
    if config.adapter.name != "none":
        found[ADAPTED] = adapter_part(config.adapter)
    if config.dataset.kind == "table":
        found[TABLE] = table_part(config.dataset, data_spec)
    text = {key: value for key, value in data_spec.get(READING, {}).items() if key != "digest"}
    if (part := asdict(TextPart(**text))) != asdict(TextPart()):  # omitted if default, as in older runs
        found[TEXTS] = part
    return found


def adapter_part(adapter: AdapterConfig) -> dict[str, Any]:
    """The proposed settings of an adapter."""
    return {key: value for key, value in asdict(adapter).items() if key not in AT_SERVER}


def _strategy(given: Any) -> dict[str, Any]:
    """Read words and numbers; the strategy's class checks them after the policy has allowed it."""
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        raise ValueError("strategy has no name")
    if not NAME.fullmatch(given["name"]):
        raise ValueError("strategy.name is none")
    return {key: _plain(value, f"strategy.{known_key(key, 'strategy')}") for key, value in given.items()}


def strategy_of(proposal: Proposal) -> dict[str, Any]:
    """Name and settings, as defined by the strategy's class in the installed package."""
    name = proposal.strategy["name"]
    given = {key: value for key, value in proposal.strategy.items() if key != "name"}
    settings = read_strict(registry.find("strategies", name).Settings, given, "strategy.")
    settings.checked(proposal.run.num_rounds)
    return {"name": name, **{key: getattr(settings, key) for key in given}}


def _check(proposal: Proposal) -> None:
    run, data, model = proposal.run, proposal.data, proposal.model
    if not RUN_ID.fullmatch(run.id):
        raise ValueError("run.id is none: small letters, digits and - make one")
    if len(run.roles) > 64 or not all(NAME.fullmatch(role) for role in run.roles):
        raise ValueError("run.roles are none")
    if data.view is not None and not NAME.fullmatch(data.view):
        raise ValueError("data.view is no name of a view")
    if len(set(data.classes)) != len(data.classes) or not all(name.isprintable() for name in data.classes):
        raise ValueError("data.classes are not distinct lines")
    if proposal.texts is not None and (problem := problem_of_merges(proposal.texts.merges)):
        raise ValueError(f"texts: {problem}")
    if max(len(data.mean), len(data.std)) > 64:
        raise ValueError("data.mean or data.std is too long")
    for key, value in data.more.items():
        if key in OWN_PLACE:
            raise ValueError(f"data.more says {key}, which has a place of its own or none")
        _plain(value, f"data.{known_key(key, 'data')}")
    if not NAME.fullmatch(model.source) or model.source in NOT_PROPOSED:
        raise ValueError("model.source is none that can be proposed")
    if model.model_type is not None and not NAME.fullmatch(model.model_type):
        raise ValueError("model.model_type is none")
    check_model(model.config)


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, str):
        if not WORDS.fullmatch(value):
            raise ValueError(f"{where} is more than a word")
    elif isinstance(value, list):
        for item in value:
            _plain(item, where)
    elif isinstance(value, dict):
        for key, item in value.items():
            _plain(item, f"{where}.{known_key(key, where)}")
    return value
