"""A site's kit, as its processes read it: `site.yaml`, and where everything lies."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fedfrozen_app import registry
from fedfrozen_app.errors import UserError

KEYS = ("name", "superlink", "data", "model_path", "folder", "cache_gb")


@dataclass(frozen=True)
class Kit:
    folder: Path
    name: str
    superlink: str
    data_kind: str
    data_path: str | None
    model_path: str | None
    var: Path  # cache, state, audit log
    cache_gb: float

    @classmethod
    def read(cls, folder: Path) -> "Kit":
        folder = folder.expanduser().resolve()
        path = folder / "site.yaml"
        if not path.exists():
            raise UserError(f"{folder} is no site's kit (it has no site.yaml): give the folder of one.")
        found = read_yaml(path)
        if "port" in found:
            raise UserError(
                f"{path} is of an older kit: delete its line `port`, run `fedfrozen site renew` and send the "
                "request to the authority. Data, policy, budget and audit log stay."
            )
        if unknown := sorted(str(key) for key in set(found) - set(KEYS)):
            raise UserError(f"{path} holds the unknown key {unknown[0]}: use {', '.join(KEYS)}.")
        for key in ("name", "superlink", "folder"):
            if not isinstance(found.get(key), str):
                raise UserError(f"{path} must say {key}, as a word.")
        data = found.get("data")
        kinds = registry.names("datasets")
        if not isinstance(data, dict) or data.get("kind") not in kinds:
            raise UserError(f"{path}: data must say its kind ({', '.join(kinds)}) and its path.")
        if data["kind"] != "digits" and not isinstance(data.get("path"), str):
            raise UserError(f"{path}: data must say its path.")
        room = found.get("cache_gb", 4)
        if not isinstance(room, (int, float)) or isinstance(room, bool) or not 0 <= room < float("inf"):
            raise UserError(f"{path}: cache_gb must be a number from 0 on.")
        return cls(
            folder=folder,
            name=found["name"],
            superlink=found["superlink"],
            data_kind=data["kind"],
            data_path=_below(folder, data.get("path")),
            model_path=_below(folder, found.get("model_path")),
            var=folder / found["folder"],
            cache_gb=float(room),
        )

    @property
    def meeting(self) -> Path:
        """The folder of the socket at which this site's SuperNode and executor meet."""
        return self.folder / "run"

    @property
    def policy(self) -> Path:
        return self.folder / "policy.yaml"

    @property
    def audit(self) -> Path:
        return self.var / "audit.jsonl"

    def node_config(self) -> dict[str, Any]:
        """What the ClientApp is told of this site, in Flower's own way."""
        settings = {"site": self.name, "cache-dir": str(self.var / "cache"), "cache-gb": self.cache_gb}
        if self.data_path is not None:
            settings["data-path"] = self.data_path
        if self.model_path is not None:
            settings["model-path"] = self.model_path
        return settings


def _below(folder: Path, path: Any) -> str | None:
    return None if path is None else str(folder / Path(str(path)).expanduser())


def port_number(value: Any, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 65535:
        raise UserError(f"{what} must be a number from 1 to 65535, not {value!r}.")
    return value


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file that holds a mapping, each key once, or a sentence."""
    try:
        text = path.read_text("utf-8")
        node, found = yaml.compose(text, Loader=yaml.SafeLoader), yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}): give a readable YAML file.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        where = str(getattr(error, "problem_mark", "") or "").strip()
        raise UserError(f"{path} is not valid YAML ({where or type(error).__name__}): correct it.") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} must hold keys and values, not {type(found).__name__}: correct it.")
    keys = [key.value for key, _ in node.value]
    if double := [key for number, key in enumerate(keys) if key in keys[:number]]:  # the last would count
        raise UserError(f"{path} says {double[0]} twice: keep one of them.")
    return found
