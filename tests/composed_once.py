"""Hydra's reading and merging of `conf/`, remembered: a third of the suite's time went into doing it again.

A run names a few files (strategy=fedprox) and many values (num_rounds=3). Hydra merges some thirty files
for the former and then sets the latter; here the first half is done once for each choice of files, and
Hydra's own functions do the second. `tests/config` is without this: there composing itself is tested.
"""

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl  # internal
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobRuntime
from omegaconf import DictConfig

from fedfrozen_app import conf_files, registry

_KNOWN: dict[Any, DictConfig] = {}
_PLAIN = ConfigLoaderImpl._load_configuration_impl


def _load(
    self: ConfigLoaderImpl, config_name: str | None, overrides: list[str], *args: Any, **keys: Any
) -> DictConfig:
    groups = conf_files.choices()
    values = [word for word in overrides if _sets_a_value(word, groups)]
    # What this process registers has no file, and its name may mean something else in the next test.
    if registry.REGISTERED or not values or any("hydra" in word for word in overrides):
        return _PLAIN(self, config_name, overrides, *args, **keys)
    chosen = tuple(word for word in overrides if word not in values)
    # The last word on a key counts, and here those of `values` come last.
    if {word.partition("=")[0] for word in values} & {word.partition("=")[0] for word in chosen}:
        return _PLAIN(self, config_name, overrides, *args, **keys)
    sources = tuple((source.provider, source.path) for source in self.repository.get_sources())
    key = (config_name, chosen, sources, JobRuntime().get("name"), repr(args), repr(keys))
    if key not in _KNOWN:
        _KNOWN[key] = _PLAIN(self, config_name, list(chosen), *args, **keys)
    composed = copy.deepcopy(_KNOWN[key])
    parsed = OverridesParser.create().parse_overrides(values)
    ConfigLoaderImpl._apply_overrides_to_config(parsed, composed)
    composed.hydra.overrides.task = list(overrides)
    composed.hydra.runtime.cwd = str(Path.cwd())
    return composed


def _sets_a_value(word: str, groups: dict[str, list[str]]) -> bool:
    """KEY=VALUE of a plain key and a plain value; lists and all that Hydra must judge are left to it."""
    key, _, value = word.partition("=")
    return key not in groups and bool(
        re.fullmatch(r"[a-z_][a-z0-9_.]*", key) and re.fullmatch(r"[\w./-]+", value)
    )


@contextmanager
def remembered() -> Iterator[None]:
    ConfigLoaderImpl._load_configuration_impl = _load
    try:
        yield
    finally:
        ConfigLoaderImpl._load_configuration_impl = _PLAIN
