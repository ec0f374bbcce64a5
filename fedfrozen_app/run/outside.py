"""What a configuration accesses beyond plain local files: a database, the hub, a server, other code.

People name such sources on their command line. If a run folder names them, the user must confirm first,
unless a run of this account on this machine has used the same source before:

    $FLWR_HOME/fedfrozen/known_sources    SHA-256 of what runs here have used, one per line

Local files that a built-in reader parses (CSV, Parquet, pictures, safetensors, JSON) are not such sources:
reading them runs no code and sends nothing.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedfrozen_app.core import registry
from fedfrozen_app.core.flower_internals import get_flwr_home
from fedfrozen_app.core.formatting import printable
from fedfrozen_app.exchange.strict import hash_of

log = logging.getLogger(__name__)
DATABASE, HUB = "omop", "hub"
# Keys that name a file or folder, which must be a plain one.
PATHS = (
    "dataset.path",
    "dataset.tokenizer",
    "dataset.tokenizer_text",
    "dataset.statistics",
    "model.path",
    "model.roles",
    "adapter.path",
    "partition.path",
    "partition.census",
    "clock.file",
)
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Outside:
    what: str  # the rest of a sentence: "downloads the model X"
    settings: dict[str, Any]  # the keys that require it, with their values

    @property
    def kind(self) -> tuple[str, ...]:
        return tuple(self.settings)

    @property
    def digest(self) -> str:
        return hash_of(self.settings)


def outside(resolved: Values, *, trains: bool) -> list[Outside]:
    """The external sources of a configuration. `trains`: to continue the run, not only to use its model."""
    found = [*_data(resolved["dataset"]), *_model(resolved["model"]), *_special_files(resolved)]
    if trains:
        found += [*_server(resolved["runtime"]), *_tracking(resolved["track"])]
    return found


def _data(dataset: Values) -> Iterator[Outside]:
    kind, path = str(dataset["kind"]), str(dataset.get("path"))
    settings = {f"dataset.{key}": dataset[key] for key in ("kind", "path") if dataset.get(key) is not None}
    if kind == DATABASE or dataset.get("query") is not None or "://" in path:
        query = {"dataset.query": dataset.get("query")}
        yield Outside(f"asks the database {_short(path)} for data by a query of its own", settings | query)
    elif kind == HUB:
        yield Outside(f"downloads the data set {_short(path)}", settings)
    elif not _is_own("datasets", kind):
        yield Outside(f"reads data by {_short(kind)}, which an installed package brings", settings)


def _model(model: Values) -> Iterator[Outside]:
    source, path = str(model["source"]), str(model.get("path"))
    settings = {f"model.{key}": model[key] for key in ("source", "path") if model.get(key) is not None}
    if source == HUB:
        yield Outside(f"downloads the model {_short(path)}", settings)
    elif not _is_own("models", source):
        yield Outside(f"builds its model by {_short(source)}, which an installed package brings", settings)
    # Some transformers settings name code on the hub, such as attn_implementation.
    names = {key: value for key, value in (model.get("config") or {}).items() if "/" in repr(value)}
    if names:
        what = f"gives transformers the settings {_short(', '.join(map(str, names)))}, which may name code"
        yield Outside(what, {f"model.config.{key}": value for key, value in names.items()})


def _special_files(resolved: Values) -> Iterator[Outside]:
    """Paths that are not plain: reading a pipe or a device has effects, and peft looks up missing folders on
    the hub."""
    for key in PATHS:
        section, _, name = key.partition(".")
        path = (resolved.get(section) or {}).get(name)
        if path is None or "://" in str(path):
            continue
        place = Path(str(path)).expanduser()
        special = place.exists() and not (place.is_file() or place.is_dir())
        if special or (key == "adapter.path" and not place.is_dir()):
            yield Outside(f"opens {_short(str(path))}, which is no plain file or folder", {key: path})


def _server(runtime: Values) -> Iterator[Outside]:
    if runtime["name"] == "deployed":
        kit = runtime.get("server_kit")
        yield Outside(
            f"connects to the server of the kit {_short(str(kit))}",
            {"runtime.name": "deployed", "runtime.server_kit": kit},
        )
    if runtime["name"] == "ray" and (address := runtime.get("address")) is not None:
        settings = {"runtime.name": "ray", "runtime.address": address}
        yield Outside(f"trains on the Ray cluster at {_short(str(address))}", settings)
    if (folder := runtime.get("cache_dir")) is not None:
        yield Outside(f"writes into {_short(str(folder))}", {"runtime.cache_dir": folder})


def _tracking(track: Values) -> Iterator[Outside]:
    for name in ("wandb", "mlflow"):
        if track.get(name):
            settings = {f"track.{name}": True, "track.project": track.get("project")}
            yield Outside(f"sends its metrics to {name}", settings)


def _is_own(group: str, name: str) -> bool:
    """Whether it is built in, or an object of this process."""
    return name in registry.BUILT_IN[group] or (group, name) in registry.REGISTERED


def _short(text: str) -> str:
    return printable(text if len(text) <= 100 else f"{text[:100]}...")


# Sources used by runs of this account ----------------------------------------------------------------------


def remember(resolved: Values) -> None:
    """Called when a person starts a run: its sources are trusted for its folder later."""
    new = [one.digest for one in outside(resolved, trains=True) if not is_known(one)]
    if not new:
        return
    place = known_sources()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch(mode=0o600)
        with place.open("a", encoding="ascii") as file:
            file.write("".join(f"{digest}\n" for digest in new))
    except OSError as error:
        log.warning(
            "%s cannot be written (%s): verbs that use this run's folder later will ask for --trust-folder.",
            *(place, error.strerror),
        )


def is_known(wish: Outside) -> bool:
    try:
        return wish.digest in known_sources().read_text("ascii").split()
    except FileNotFoundError:
        return False
    except (OSError, UnicodeDecodeError) as error:
        log.warning("%s cannot be read (%s): nothing counts as used before.", known_sources(), error)
        return False


def known_sources() -> Path:
    return get_flwr_home() / "fedfrozen" / "known_sources"
