"""Where Hydra finds files: our `conf/`, those of installed packages, and the defaults that files inherit."""

from functools import cache
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from fedfrozen_app.config.schema import GROUPS, NAMED, defaults, root_defaults, sections
from fedfrozen_app.core import registry
from fedfrozen_app.core.conf_files import package_dirs
from fedfrozen_app.core.own_objects import take_over


def base(path: str) -> dict[str, Any] | None:
    """The defaults behind a path: `base`, `client/base`, `strategy/base_fedprox`; None: there are none."""
    if path == "base":
        return root_defaults()
    group, _, name = path.partition("/")
    if name == "base" and group in GROUPS:
        return defaults(sections()[group])
    take_over()  # in a launcher's process, which composes by itself
    if (NAMED.get(group), name) in registry.REGISTERED:  # by this process: it has no file
        return {"name": name} | registry.settings_of(NAMED[group], name)
    named = name.removeprefix("base_")
    if group in NAMED and named != name and named in registry.places(NAMED[group]):
        return {"name": named} | registry.settings_of(NAMED[group], named)
    return None


class Defaults(ConfigSource):
    """The dataclasses as files to inherit. They are not listed, because no one chooses them."""

    @staticmethod
    def scheme() -> str:
        return "fedfrozen"

    def load_config(self, config_path: str) -> ConfigResult:
        # Plain values, without types: `read` checks types once everything is composed.
        config = OmegaConf.create(base(config_path))
        return ConfigResult(self.provider, self.full_path(), config, header={"package": None})

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return False

    def is_config(self, config_path: str) -> bool:
        return base(config_path) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []


class SearchPath(SearchPathPlugin):
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in package_dirs():
            search_path.append("fedfrozen.conf", str(folder))
        search_path.append("fedfrozen", f"{Defaults.scheme()}://")


@cache
def prepare_hydra() -> None:
    """Register these sources with Hydra, for its command line and for composing."""
    for plugin in (Defaults, SearchPath):
        Plugins.instance().register(plugin)
