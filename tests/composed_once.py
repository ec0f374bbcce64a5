"""Hydra's reading and merging of `conf/`, remembered: a third of the suite's time went into doing it again.

A run names a few files (strategy=fedprox) and many values (num_rounds=3). Hydra merges some thirty files
for the former and then sets the latter; here the first half is done once for each file, and Hydra's own
functions do the second. Files of which each sets sections of its own are put together from what is known of
each alone. `tests/config` is without this: there composing itself is tested.
"""

import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl  # internal
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobRuntime
from omegaconf import DictConfig, OmegaConf

from fedfrozen_app import conf_files, registry

_KNOWN: dict[Any, bytes] = {}
_PLAIN = ConfigLoaderImpl._load_configuration_impl


def _load(
    self: ConfigLoaderImpl, config_name: str | None, overrides: list[str], *args: Any, **keys: Any
) -> DictConfig:
    groups = conf_files.choices()
    values = [word for word in overrides if _sets_a_value(word, groups)]
    # What this process registers has no file, and its name may mean something else in the next test.
    if registry.REGISTERED or any("hydra" in word for word in overrides):
        return _PLAIN(self, config_name, overrides, *args, **keys)
    chosen = tuple(word for word in overrides if word not in values)
    # The last word on a key counts, and here those of `values` come last.
    if {word.partition("=")[0] for word in values} & {word.partition("=")[0] for word in chosen}:
        return _PLAIN(self, config_name, overrides, *args, **keys)
    sources = tuple((source.provider, source.path) for source in self.repository.get_sources())
    around = (config_name, sources, JobRuntime().get("name"), repr(args), repr(keys))

    def known(*words: str) -> DictConfig:
        if (around, words) not in _KNOWN:
            files = {word.partition("=")[0]: word for word in words}
            composed = None
            if len(words) > 1 and len(files.keys() & groups.keys()) == len(words):
                composed = _put_together(known(), {group: known(word) for group, word in files.items()})
            composed = composed or _PLAIN(self, config_name, list(words), *args, **keys)
            _KNOWN[around, words] = pickle.dumps(composed)  # read again six times as fast as copied
        return pickle.loads(_KNOWN[around, words])  # noqa: S301 - our own, of a moment ago

    composed = known(*chosen)
    parsed = OverridesParser.create().parse_overrides(values)
    ConfigLoaderImpl._apply_overrides_to_config(parsed, composed)
    composed.hydra.overrides.task = list(overrides)
    composed.hydra.runtime.cwd = str(Path.cwd())
    return composed


def _put_together(usual: DictConfig, alone: dict[str, DictConfig]) -> DictConfig | None:
    """What files give together, from what each gives alone; None where two of them set the same section."""
    changed = {group: {group, *_others(usual, one)} for group, one in alone.items()}
    claimed = sum(map(len, changed.values()))
    if any(list(one) != list(usual) for one in alone.values()) or claimed > len(set.union(*changed.values())):
        return None
    choices, before = usual.hydra.runtime.choices, dict(usual.hydra.runtime.choices)
    for group, one in alone.items():
        for key in changed[group] & usual.keys():
            usual._set_item_impl(key, one._get_node(key))
        choices.update(
            {key: name for key, name in one.hydra.runtime.choices.items() if name != before.get(key)}
        )
    return usual


def _others(usual: DictConfig, one: DictConfig) -> list[Any]:
    return [key for key in usual if key != "hydra" and _bare(usual, key) != _bare(one, key)]


def _bare(composed: DictConfig, key: Any) -> Any:
    """A section as it stands in the files, with what refers to other sections unresolved."""
    node = composed._get_node(key)
    return OmegaConf.to_container(node) if OmegaConf.is_config(node) else node._value()


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
