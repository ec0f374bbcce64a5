"""What a site allows, whatever the server asks: `policy.yaml`, and the sentences for what it refuses.

The checks look at what a run and an order ask for, never at data; a sentence may go to the server as it is.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Literal

from fedfrozen_app import registry
from fedfrozen_app.config import Config, absolute_paths, compose_config, read, resolved, strategy_settings
from fedfrozen_app.errors import UserError
from fedfrozen_app.exchange.cache import DIGEST
from fedfrozen_app.exchange.names import is_parameter, parameter_of
from fedfrozen_app.exchange.order import Order
from fedfrozen_app.models.roles import Role
from fedfrozen_app.sites.kit import read_yaml
from fedfrozen_app.words import counted

MAX_DELTA = 1e-5  # where a run names no delta
RUN_ID = re.compile(r"[0-9a-z][0-9a-z-]{0,63}")


@dataclass(frozen=True)
class Policy:
    strategies: tuple[str, ...]
    upload_roles: tuple[str, ...]
    min_examples: int
    rounds_per_day: int
    max_epsilon: float
    bundles: tuple[str, ...] | Literal["any"]
    privacy_required: bool = False
    max_delta: float = 1e-5  # of each private run
    downloads: bool = False

    @classmethod
    def read(cls, path: Path) -> "Policy":
        """A policy that cannot be read, or leaves something open, allows nothing: it ends with a sentence."""
        found = read_yaml(path)
        known = {field.name for field in fields(cls)}
        if unknown := sorted(str(key) for key in set(found) - known):
            raise UserError(f"{path} holds the unknown key {unknown[0]}: use {', '.join(sorted(known))}.")
        if missing := sorted(known - {"privacy_required", "max_delta", "downloads"} - set(found)):
            raise UserError(f"{path} does not say {missing[0]}: add it.")
        for key in ("strategies", "upload_roles", "bundles"):
            value = found[key]
            if key == "bundles" and value == "any":
                continue
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                raise UserError(f"{path}: {key} must be a list of words.")
            found[key] = tuple(value)
        for key in ("min_examples", "rounds_per_day", "max_epsilon", "max_delta"):
            value = found.get(key, 0)
            whole = key in ("min_examples", "rounds_per_day")
            good = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
            if not good or not 0 <= value < float("inf"):
                how = "" if whole else " (1.0e-6: YAML asks for the point)"
                raise UserError(f"{path}: {key} must be a number from 0 on{how}.")
        for key in ("privacy_required", "downloads"):
            if not isinstance(found.get(key, False), bool):
                raise UserError(f"{path}: {key} must be true or false.")
        return cls(**found)

    def problem_of_run(self, run: "Run", data_kind: str) -> str | None:
        """Why this site takes no part in the run; None when it may."""
        config = run.config
        if self.bundles != "any" and run.bundle not in self.bundles:
            return f"the bundle {run.bundle[:12]} is not one of those that it allows"
        if (name := config.strategy["name"]) not in self.strategies:
            return f"the strategy {name} is not one of those that it allows"
        if config.dataset.kind != data_kind:
            return f"its data are of the kind {data_kind}, not {config.dataset.kind}"
        if not self.downloads and (config.model.source == "hub" or config.dataset.kind == "hub"):
            return "it downloads nothing"
        if run.epsilon is None and self.privacy_required:
            return (
                "it takes part in private runs only, and this one is not (privacy=none, seeded noise, or an "
                "unaccounted choice of layers)"
            )
        if run.epsilon is not None and run.epsilon > self.max_epsilon:
            return (
                f"the run asks for epsilon {run.epsilon:g}, and it gives {self.max_epsilon:g} over all runs"
            )
        if run.delta > self.max_delta:
            return f"the run asks for delta {run.delta:g}, and it gives {self.max_delta:g}"
        return None

    def problem_of_order(
        self, order: Order, run: "Run", roles: Mapping[str, Role], examples: int
    ) -> str | None:
        """Why this order is not carried out; `examples` are the rows that it would train on."""
        strategy = registry.find("strategies", run.config.strategy["name"])
        if order.algorithm != strategy.algorithm_for(strategy_settings(run.config)):
            return f"the order asks for the algorithm {order.algorithm}, which is not the strategy's"
        names = {*order.plan.trained, *order.plan.shared, *order.plan.private}
        names |= {name for name in order.base if not belongs(name, order.method.comes)}
        if unknown := sorted(names - set(roles)):
            return f"the order names {unknown[0]}, which the run's model does not have"
        extended = {parameter_of(name) for name in order.base if not is_parameter(name)}
        if strange := sorted(extended - set(order.plan.trained)):
            return f"the order brings an array beside {strange[0]}, which does not train"
        if not all(DIGEST.fullmatch(digest) for digest in order.base.values()):
            return "the order names an array by something that is no digest"
        kinds = {roles[name].kind for name in order.plan.shared}
        if refused := sorted(kinds - set(self.upload_roles)):
            return f"the order asks for {refused[0]} parameters, which may not leave it"
        if order.judge and order.plan.shared:
            return "the order asks for a judgement and for parameters in one"
        last = run.config.num_rounds + order.judge  # judged is what the last round has left
        if type(order.round) is not int or not 1 <= order.round <= last:  # 1.5 would be a round of its own
            return f"the order is for round {order.round} of {run.config.num_rounds}"
        settings = run.config.client
        if settings.local_steps is not None:
            examples = min(examples, settings.local_steps * settings.batch_size)
        if examples < self.min_examples:
            return f"it would train on fewer than {counted(self.min_examples, 'example')}"
        return None


def belongs(name: str, namespaces: tuple[str, ...]) -> bool:
    """Whether this is an array that the algorithm lets come with its orders."""
    return name.rpartition("/")[0] in namespaces


@dataclass(frozen=True)
class Run:
    """What a run asks for, read from what the server sent."""

    id: str  # ours: the same for a run and its resumptions
    bundle: str  # SHA-256
    overrides: str
    config: Config

    @property
    def epsilon(self) -> float | None:
        """What the run may cost in total; None where nothing is promised."""
        privacy = self.config.privacy
        if privacy.name == "none" or privacy.seeded_noise or privacy.selection == "unaccounted":
            return None
        return privacy.epsilon

    @property
    def delta(self) -> float:
        """At most; a run that names none takes 1e-5, or less where a site has many examples."""
        return 0.0 if self.epsilon is None else self.config.privacy.delta or MAX_DELTA


@lru_cache(maxsize=4)  # every message of a run brings the same words, and composing them takes a while
def read_run(overrides: str, flower_run: int, bundle: str) -> Run | str:
    """The run behind a message, or why it is refused; nothing of the site is looked at."""
    if "${" in overrides or ".." in overrides:
        return "its configuration refers to something outside itself"
    if any(word.lstrip("+~").startswith("hydra") for word in overrides.split()):
        return "its configuration changes how configurations are read"
    try:
        resolved_config = resolved(compose_config(overrides))
        # The folders of images are looked for below the site's own, and an absolute one would not lie there.
        splits = {
            f"dataset.{key}": str(resolved_config["dataset"][key]) for key in ("train_split", "test_split")
        }
        paths = absolute_paths(resolved_config) | {
            key: name for key, name in splits.items() if name.startswith("/")
        }
        if paths:
            return f"it names a path ({next(iter(paths))}), and only the site itself may do that"
        config = read(resolved_config)
    except (UserError, ValueError):
        return "its configuration cannot be read with the package that is installed here"
    name = config.run_id or f"flower-{flower_run}"
    if not RUN_ID.fullmatch(name):
        return "its run_id is none: small letters, digits and - make one"
    return Run(name, bundle, overrides, config)
