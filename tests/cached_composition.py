"""Hydra's reading and merging of `conf/`, remembered: a third of the suite's time went into doing it again.

A run names a few files (strategy=fedprox) and many values (num_rounds=3). Hydra merges some thirty files
for the former and then sets the latter; here the first half is done once for each file, and Hydra's own
functions do the second. Files of which each sets sections of its own are put together from what is known of
each alone. Tests of composing itself are without this (`COMPOSING` in `conftest.py`).
"""

import hashlib
import os
import pickle
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname  # internal
from hydra._internal.core_plugins.file_config_source import FileConfigSource  # internal
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from fedfrozen_app.config.schema import NAMED
from fedfrozen_app.core import conf_files, registry

# What a command says of Hydra's own folders and mode; all else under that name may change what is composed.
HYDRAS_VALUES = {"hydra.mode", "hydra.run.dir", "hydra.sweep.dir"}

_KNOWN: dict[Hashable, bytes] = {}
_FOLDER: list[Path] = []
_PLAIN = ConfigLoaderImpl._load_configuration_impl


def _load(
    self: ConfigLoaderImpl, config_name: str | None, overrides: list[str], *args: Any, **keys: Any
) -> DictConfig:
    groups = conf_files.choices()
    try:
        words = [_parsed(word) for word in overrides]
    except HydraException:
        return _PLAIN(self, config_name, overrides, *args, **keys)
    files = {word.key_or_group: str(word.input_line) for word in words if word.key_or_group in groups}
    values = [word for word in words if word.key_or_group not in groups]
    if not (all(map(_sets_a_value, values)) and _are_choices(words, groups) and not _registered(files)):
        return _PLAIN(self, config_name, overrides, *args, **keys)
    around = (config_name, *((source.provider, source.path) for source in self.repository.get_sources()))

    def known(*chosen: str) -> DictConfig:
        return _remember((*around, *chosen), lambda: composed_of(*chosen))

    def composed_of(*chosen: str) -> DictConfig:
        together = None
        if len(chosen) > 1:
            alone = {word.partition("=")[0]: known(word) for word in chosen}
            together = _put_together(known(), alone)
        return together or _PLAIN(self, config_name, list(chosen), RunMode.RUN)

    try:  # a mode but this one forgives more: what is composed in it is composed in all
        composed = known(*sorted(files.values()))
    except (HydraException, ValueError):
        return _PLAIN(self, config_name, overrides, *args, **keys)
    ConfigLoaderImpl._apply_overrides_to_config(values, composed)
    _tell(composed.hydra, words)
    return composed


def _remember(key: Hashable, compose: Callable[[], DictConfig]) -> DictConfig:
    """From this process's memory, or what another one of these tests has left in the folder, or anew."""
    if key not in _KNOWN:
        path = _FOLDER[-1] / hashlib.sha256(repr(key).encode()).hexdigest()
        if path.exists():
            _KNOWN[key] = path.read_bytes()
        else:
            _KNOWN[key] = pickle.dumps(compose())  # read again six times as fast as copied
            _leave(path, _KNOWN[key])
    return pickle.loads(_KNOWN[key])  # noqa: S301 - our own, of a moment ago


def _leave(path: Path, content: bytes) -> None:
    """Whole or not at all: a test may have the disk be full."""
    part = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        part.write_bytes(content)
        part.replace(path)


@cache
def _parsed(word: str) -> Override:
    (parsed,) = OverridesParser.create().parse_overrides([word])
    return parsed


def _sets_a_value(word: Override) -> bool:
    """Of any kind, added and deleted ones too, as long as it is one value and in no group of files."""
    if word.is_sweep_override() or word.package is not None or "/" in word.key_or_group:
        return False
    return not word.key_or_group.startswith("hydra") or word.key_or_group in HYDRAS_VALUES


def _are_choices(words: list[Override], groups: dict[str, list[str]]) -> bool:
    """Whether each word on a group names one of its files: the last one on it then counts."""
    return all(
        not word.is_sweep_override() and word.input_line == f"{word.key_or_group}={word.value()}"
        for word in words
        if word.key_or_group in groups
    )


def _registered(files: dict[str, str]) -> bool:
    """What this process registers has no file, and its name may mean something else in the next test."""
    return any(
        kind == NAMED[group] and (name in registry.places(kind) or files.get(group) == f"{group}={name}")
        for kind, name in registry.REGISTERED
        for group in NAMED
    )


def _tell(hydra: DictConfig, words: list[Override]) -> None:
    """What Hydra writes down of the words and of where it is."""
    told = [word for word in words if not word.is_hydra_override()]
    hydra.overrides.task = [word.input_line for word in told]
    hydra.overrides.hydra = [word.input_line for word in words if word.is_hydra_override()]
    hydra.job.override_dirname = get_overrides_dirname(told, **hydra.job.config.override_dirname)
    hydra.runtime.cwd = str(Path.cwd())


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


@contextmanager
def remembered(folder: Path) -> Iterator[None]:
    """In this process, and through the folder in those that test beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    _FOLDER.append(folder)
    try:
        with _composing_with(_load):
            yield
    finally:
        _FOLDER.pop()


def by_hydra_alone() -> AbstractContextManager[None]:
    return _composing_with(_PLAIN)


@contextmanager
def _composing_with(load: Callable[..., DictConfig]) -> Iterator[None]:
    before = ConfigLoaderImpl._load_configuration_impl
    ConfigLoaderImpl._load_configuration_impl = load
    try:
        yield
    finally:
        ConfigLoaderImpl._load_configuration_impl = before


@contextmanager
def files_read_once() -> Iterator[None]:
    """Hydra parses each file of `conf/` at every composition: here once, until the file changes."""
    plain, known = FileConfigSource.load_config, dict[Hashable, bytes]()

    def load(self: FileConfigSource, config_path: str) -> ConfigResult:
        path = Path(self.path, self._normalize_file_name(config_path))
        if not path.is_file():
            return plain(self, config_path)
        state = path.stat()
        key = (self.provider, str(path), state.st_mtime_ns, state.st_size, state.st_ino)
        if key not in known:
            known[key] = pickle.dumps(plain(self, config_path))
        return pickle.loads(known[key])  # noqa: S301 - our own, of a moment ago

    FileConfigSource.load_config = load
    try:
        yield
    finally:
        FileConfigSource.load_config = plain
