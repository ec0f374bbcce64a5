"""The configuration of one run, composed once: as overrides, as plain values, and typed."""

import shlex
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from omegaconf import DictConfig

from fedfrozen_app.config.compose import absolute_paths, compose_config, quoted, resolved
from fedfrozen_app.config.read_values import read
from fedfrozen_app.config.schema import Config
from fedfrozen_app.config.unused_keys import check_used, without_marked


@dataclass(frozen=True)
class ComposedConfig:
    overrides: list[str]  # compose the same configuration
    resolved: dict[str, Any]  # nested plain values, as summaries and checkpoints keep them
    continued: bool = False  # the run continues from its own checkpoints: `from` is recorded, but not used
    recorded: bool = False  # the overrides are a run's record, which may name keys that had no effect then

    @classmethod
    def of(cls, composed: DictConfig, overrides: Iterable[str]) -> "ComposedConfig":
        words = list(overrides)
        return cls(words, without_marked(words, resolved(composed)))

    @cached_property
    def config(self) -> Config:
        """Typed and checked at first use, or a `UserError`."""
        fresh = not (self.recorded or self.continued)
        if fresh:  # checks without imports first: an unused key is reported at once
            check_used(self.overrides, self.resolved, methods=False)
        found = read(self.resolved | {"from": None} if self.continued else self.resolved)
        if fresh:
            check_used(self.overrides, self.resolved)
        return found

    def with_absolute_paths(self) -> "ComposedConfig":
        """The same files from every working directory: for a run's records, and for other processes.

        `output_dir` stays as it was given: a run that moves is still the same run.
        """
        values, overrides = deepcopy(self.resolved), list(self.overrides)
        for key, path in absolute_paths(values).items():
            group, _, name = key.rpartition(".")
            section = values[group] if group else values
            if key != "output_dir" and section[name] != path:
                section[name] = path
                overrides.append(quoted(key, path))
        return self if overrides == self.overrides else replace(self, overrides=overrides, resolved=values)

    def continuing(self) -> "ComposedConfig":
        """For a run that continues from its own checkpoints, not from the one that it was forked from."""
        return replace(self, continued=True)


def compose_run(overrides: str | list[str], *, recorded: bool = False) -> ComposedConfig:
    """Compose the configuration of a run from its overrides; one string is split as a shell would.

    With `recorded` they are those of an earlier run, which may name keys that have no effect.
    """
    words = shlex.split(overrides) if isinstance(overrides, str) else list(overrides)
    return replace(ComposedConfig.of(compose_config(words), words), recorded=recorded)
