"""Composing `conf/` with Hydra, for the command line and for code without one."""

import json
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import hydra
from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser  # internal
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedfrozen_app.arguments import Arguments
from fedfrozen_app.conf_files import conf_dir
from fedfrozen_app.config.sentences import sentence
from fedfrozen_app.config.sources import prepare_hydra
from fedfrozen_app.errors import UserError

# Where Hydra keeps its own files: in output_dir too, and not in a second folder that may not be writable.
OmegaConf.register_new_resolver(
    "run_folder", lambda named, usual: str(Path(named).expanduser()) if named else usual, replace=True
)


def compose_config(overrides: str | list[str], *, hydra: bool = False) -> DictConfig:
    """Compose as the command line would, for code that has none (Flower's apps, tests).

    With `hydra`, what Hydra knows of itself is under that key: which file of each group was chosen.
    """
    overrides = with_names(shlex.split(overrides) if isinstance(overrides, str) else overrides)
    prepare_hydra()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_dir()), version_base=None):
            return compose("config", overrides=overrides, return_hydra_config=hydra)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(sentence(error)) from error
    except ValueError as error:
        _refuse_null_group(error)
        raise


def with_hydra(
    job: Callable[[DictConfig], float | None], arguments: list[str], *, name: str = "config", verb: str = ""
) -> None:
    """Let Hydra read the command line and call `job`; what it cannot compose is a `UserError`."""
    program, arguments = f"fedfrozen {verb}".rstrip(), with_names(arguments)
    # Hydra's own parser, asked first: Hydra itself would print its usage.
    Arguments(prog=program, parents=[get_args_parser()], add_help=False).parse_args(arguments)
    prepare_hydra()
    sys.argv = [program, *arguments]
    try:
        hydra.main(config_path=str(conf_dir()), config_name=name, version_base="1.3")(job)()
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(sentence(error)) from error
    except ValueError as error:
        _refuse_null_group(error)
        raise


def with_names(words: list[str]) -> list[str]:
    """The file `nan` of `debug` is meant by its name, which Hydra would read as a number."""
    return ["debug='nan'" if word == "debug=nan" else word for word in words]


def _refuse_null_group(error: ValueError) -> None:
    """Hydra answers strategy=null and strategy=5 with a plain ValueError."""
    if str(error).startswith("Config group override must be"):
        raise UserError(
            "A group such as strategy takes the name of one of its files, not null or a number: "
            "`fedfrozen --help` lists them."
        ) from error


def resolved(composed: DictConfig) -> dict[str, Any]:
    """The nested plain dictionary that summaries and checkpoints keep."""
    try:
        resolved_config = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise UserError(sentence(error)) from error
    assert isinstance(resolved_config, dict)
    return {str(key): value for key, value in resolved_config.items() if key not in ("hydra", "experiment")}


def absolute_paths(resolved_config: dict[str, Any]) -> dict[str, str]:
    """Overrides that make every local path absolute, for processes with another working directory."""
    found = {}
    place = resolved_config["dataset"]["path"]
    if place is not None and resolved_config["dataset"]["kind"] != "hub" and "://" not in place:
        found["dataset.path"] = place
    if resolved_config["model"]["path"] is not None and resolved_config["model"]["source"] == "checkpoint":
        found["model.path"] = resolved_config["model"]["path"]
    for key, value in (
        ("from", resolved_config["from"]),
        ("output_dir", resolved_config["output_dir"]),
        ("partition.path", resolved_config["partition"].get("path")),
        ("adapter.path", resolved_config["adapter"].get("path")),
        ("partition.census", resolved_config["partition"].get("census")),
        ("runtime.cache_dir", resolved_config["runtime"]["cache_dir"]),
        ("runtime.server_kit", resolved_config["runtime"]["server_kit"]),
    ):
        if value is not None:
            found[key] = value
    return {key: str(Path(value).expanduser().resolve()) for key, value in found.items()}


def with_absolute_paths(composed: DictConfig, overrides: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """What a run keeps of its configuration: resolved, and as overrides; both with absolute paths.

    Whoever resumes or evaluates the run from another directory means the same files.
    """
    resolved_config, overrides = resolved(composed), list(overrides)
    found = {key: path for key, path in absolute_paths(resolved_config).items() if key != "output_dir"}
    for key, path in found.items():
        group, _, name = key.rpartition(".")
        place = resolved_config[group] if group else resolved_config
        if place[name] != path:
            place[name] = path
            overrides.append(quoted(key, path))
    return resolved_config, overrides


def quoted(key: str, value: Any) -> str:
    """A Hydra override whose value may hold spaces, commas, braces or quotes."""
    if not isinstance(value, str):
        return f"{key}={json.dumps(value)}"
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"{key}='{escaped}'"
