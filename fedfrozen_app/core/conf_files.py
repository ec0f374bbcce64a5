"""The files of `conf/`: their location, and the available choices, without importing Hydra."""

import importlib.util
import logging
from pathlib import Path
from typing import Any

from fedfrozen_app.core import registry
from fedfrozen_app.core.errors import UserError

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
    """The available files by group, ours and those of installed packages."""
    found: dict[str, set[str]] = {}
    for folder in (conf_dir(), *package_dirs()):
        for path in folder.glob("*/*.yaml"):
            found.setdefault(path.parent.name, set()).add(path.stem)
    return {group: sorted(found[group]) for group in sorted(found)}


def usual() -> dict[str, str]:
    """The default file of each group."""
    import yaml

    listed = yaml.safe_load((conf_dir() / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    chosen = (next(iter(entry.items())) for entry in listed if isinstance(entry, dict))
    return {group: name for group, name in chosen if name and not group.startswith("override ")}


def file_values(group: str, name: str) -> dict[str, Any]:
    """What a file that sets keys of any section sets, with the files of its group that it builds on; {} for
    one of a folder that the command line named."""
    import yaml

    for folder in (conf_dir(), *package_dirs()):
        path = folder / group / f"{name}.yaml"
        if path.is_file():
            own = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
            found: dict[str, Any] = {}
            for entry in own.pop("defaults", ()):
                if isinstance(entry, str) and entry != "_self_":
                    found = _merged(found, file_values(group, entry))
            return _merged(found, own)
    return {}


def _merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    both = dict(under)
    for key, value in over.items():
        inner = both.get(key)
        both[key] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return both
