"""Where Hydra finds files: our `conf/`, those of installed packages, and the defaults that files inherit."""

import importlib.util
import logging
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from fedfrozen_app import registry
from fedfrozen_app.config.schema import GROUPS, NAMED, defaults, root_defaults, sections
from fedfrozen_app.errors import UserError

log = logging.getLogger(__name__)


def conf_dir() -> Path:
    """`conf/` of a checkout or a Flower bundle; inside the package when installed from a wheel."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package.parent / "conf", package / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise UserError(f"The folder conf/ is missing beside {package}: install fedfrozen again.")


def package_dirs() -> list[Path]:
    """`conf/` of every installed package that has an entry point in the group `fedfrozen.conf`."""
    found = []
    for name, package in sorted(registry.places("conf").items()):
        try:
            spec = importlib.util.find_spec(package)
        except ImportError:
            spec = None
        folders = [Path(place) / "conf" for place in (spec and spec.submodule_search_locations) or ()]
        if not any(folder.is_dir() for folder in folders):
            log.warning(
                "The installed package '%s' has no folder conf/ in %s: mend or remove it.", name, package
            )
        found += [folder for folder in folders if folder.is_dir()]
    return found


def choices() -> dict[str, list[str]]:
    """By group, the files that may be chosen; ours and those of installed packages."""
    found: dict[str, set[str]] = {}
    for folder in (conf_dir(), *package_dirs()):
        for path in folder.glob("*/*.yaml"):
            found.setdefault(path.parent.name, set()).add(path.stem)
    return {group: sorted(found[group]) for group in sorted(found)}


def base(path: str) -> dict[str, Any] | None:
    """The defaults behind a path: `base`, `client/base`, `strategy/base_fedprox`; None: there are none."""
    if path == "base":
        return root_defaults()
    group, _, name = path.partition("/")
    if name == "base" and group in GROUPS:
        return defaults(sections()[group])
    named = name.removeprefix("base_")
    if group in NAMED and named != name and named in registry.places(NAMED[group]):
        # Imported here, when it is chosen: what is named brings torch with it.
        return {"name": named} | defaults(registry.find(NAMED[group], named).Settings)
    return None


class Defaults(ConfigSource):
    """The dataclasses as files to inherit. They are not listed: nobody chooses them."""

    @staticmethod
    def scheme() -> str:
        return "fedfrozen"

    def load_config(self, config_path: str) -> ConfigResult:
        # Plain values, without types: `read` says what is wrong with a type, once everything is composed.
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
