"""A site's kit, as its processes read it: `site.yaml`, and the paths of its files."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.sites.views import View, read_views

KEYS = ("name", "superlink", "views", "model_path", "folder", "cache_gb", "syslog", "limits", "match_key")
SHORTEST_KEY = 16  # characters


@dataclass(frozen=True)
class Limits:
    """Seconds after which a process of this site counts as hung, and is restarted."""

    transfer: float = 300  # without a piece of a message received or sent
    idle: float = 300  # working on a message without using the processor
    training: float = 86400  # working on one message


@dataclass(frozen=True)
class Kit:
    folder: Path
    name: str
    superlink: str
    views: dict[str, View]
    model_path: str | None
    var: Path  # cache, state, approvals, audit log
    cache_gb: float
    limits: Limits = Limits()
    match_key: bytes | None = None  # for comparing rows across sites; unknown to the server
    syslog: str | None = None  # where a copy of the audit log goes: a socket such as /dev/log, or HOST:PORT

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
        views = read_views(found, path)
        if unknown := sorted(str(key) for key in set(found) - set(KEYS)):
            raise UserError(f"{path} holds the unknown key {unknown[0]}: use {', '.join(KEYS)}.")
        for key in ("name", "superlink", "folder"):
            if not isinstance(found.get(key), str):
                raise UserError(f"{path} must say {key}, as a word.")
        if not isinstance(found.get("syslog"), str | None):
            raise UserError(f"{path}: syslog must be a socket such as /dev/log, or HOST:PORT.")
        agreed = found.get("match_key")
        if agreed is not None and (not isinstance(agreed, str) or len(agreed) < SHORTEST_KEY):
            raise UserError(f"{path}: match_key must be words of {SHORTEST_KEY} characters or more.")
        room = found.get("cache_gb", 4)
        if not isinstance(room, (int, float)) or isinstance(room, bool) or not 0 <= room < float("inf"):
            raise UserError(f"{path}: cache_gb must be a number from 0 on.")
        return cls(
            folder=folder,
            name=found["name"],
            superlink=found["superlink"],
            views=views,
            model_path=_below(folder, found.get("model_path")),
            var=folder / found["folder"],
            cache_gb=float(room),
            limits=_limits(found.get("limits", {}), path),
            match_key=None if agreed is None else agreed.encode(),
            syslog=found.get("syslog"),
        )

    @property
    def meeting(self) -> Path:
        """The folder of the socket between this site's SuperNode and executor."""
        return self.folder / "run"

    @property
    def policy(self) -> Path:
        return self.folder / "policy.yaml"

    @property
    def audit(self) -> Path:
        return self.var / "audit.jsonl"

    @property
    def approvals(self) -> Path:
        return self.var / "approvals"

    def view(self, name: str | None) -> View | None:
        """The view of that name; without a name the only one there is."""
        if name is None:
            return next(iter(self.views.values())) if len(self.views) == 1 else None
        return self.views.get(name)

    def node_config(self) -> dict[str, Any]:
        """The node configuration of this site, as Flower passes it to a client."""
        return {"site": self.name, "cache-dir": str(self.var / "cache"), "cache-gb": self.cache_gb}


def _limits(found: Any, path: Path) -> Limits:
    known = [field.name for field in fields(Limits)]
    if not isinstance(found, dict) or set(found) - set(known):
        raise UserError(f"{path}: limits must hold {', '.join(known)}, in seconds, and nothing else.")
    for key, value in found.items():
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise UserError(f"{path}: {key} of limits must be a number above 0.")
    return Limits(**found)


def _below(folder: Path, path: Any) -> str | None:
    return None if path is None else str(folder / Path(str(path)).expanduser())


def port_number(value: Any, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 65535:
        raise UserError(f"{what} must be a number from 1 to 65535, not {value!r}.")
    return value


def _double_key(root: yaml.Node | None) -> str | None:
    """A key that occurs twice in one mapping, at any depth."""
    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:  # by an alias
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        elif isinstance(node, yaml.MappingNode):
            keys = [key.value for key, _ in node.value]
            for number, key in enumerate(keys):
                if key in keys[:number]:
                    return str(key)
            waiting += [value for _, value in node.value]
    return None


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping without duplicate keys; `UserError` otherwise."""
    try:
        text = path.read_text("utf-8")
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        found = None if node is None else loader.construct_document(node)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}): give a readable YAML file.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        where = str(getattr(error, "problem_mark", "") or "").strip()
        raise UserError(f"{path} is not valid YAML ({where or type(error).__name__}): correct it.") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} must hold keys and values, not {type(found).__name__}: correct it.")
    if double := _double_key(node):  # the last would count
        raise UserError(f"{path} says {double} twice: keep one of them.")
    return found
