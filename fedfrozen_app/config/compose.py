"""Compose `conf/` with Hydra, for the command line and for code without one."""

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra import compose, initialize_config_dir
from hydra._internal.callbacks import Callbacks  # internal
from hydra._internal.utils import get_args_parser  # internal
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import run_job
from hydra.errors import HydraException
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedfrozen_app.config.sentences import sentence
from fedfrozen_app.config.sources import prepare_hydra
from fedfrozen_app.core.arguments import Arguments
from fedfrozen_app.core.conf_files import conf_dir
from fedfrozen_app.core.errors import UserError

TOKENIZERS = (None, "auto", "own", "learned")  # dataset.tokenizer; anything else is a file

# Hydra keeps its own files in output_dir too, not in a second folder that may not be writable.
OmegaConf.register_new_resolver(
    "run_folder", lambda named, usual: str(Path(named).expanduser()) if named else usual, replace=True
)


def compose_config(overrides: str | list[str], *, hydra: bool = False) -> DictConfig:
    """Compose as the command line would, for code that has none.

    With `hydra`, the key `hydra` holds Hydra's own settings: which file of each group was chosen.
    """
    overrides = with_names(shlex.split(overrides) if isinstance(overrides, str) else overrides)
    prepare_hydra()
    GlobalHydra.instance().clear()
    with one_sentence(), initialize_config_dir(str(conf_dir()), version_base=None):
        return compose("config", overrides=overrides, return_hydra_config=hydra)


def compose_job(overrides: list[str]) -> DictConfig:
    """Compose a run as Hydra's command line does, with Hydra's own settings; for `run_in_folder`."""
    return compose_config([*overrides, "hydra.mode=RUN"], hydra=True)


def run_in_folder(composed: DictConfig, job: Callable[[DictConfig], float | None]) -> None:
    """Call `job` as Hydra's command line does: in the folder that Hydra makes, where it keeps its own files.

    `hydra.main` would compose twice more: to learn the mode, and to run.
    """
    with one_sentence(), initialize_config_dir(str(conf_dir()), version_base=None):
        callbacks = Callbacks(composed)
        callbacks.on_run_start(config=composed, config_name="config")
        context = HydraContext(config_loader=GlobalHydra.instance().config_loader(), callbacks=callbacks)
        done = run_job(job, composed, "hydra.run.dir", None, context)
        callbacks.on_run_end(config=composed, config_name="config", job_return=done)
        _ = done.return_value  # raises what the job raised


def with_hydra(
    job: Callable[[DictConfig], float | None], arguments: list[str], *, name: str = "config", verb: str = ""
) -> None:
    """Let Hydra read the command line and call `job`; what it cannot compose is a `UserError`."""
    program, arguments = f"fedfrozen {verb}".rstrip(), with_names(arguments)
    # Parse here first: Hydra itself would print its usage.
    Arguments(prog=program, parents=[get_args_parser()], add_help=False).parse_args(arguments)
    prepare_hydra()
    sys.argv = [program, *arguments]
    with one_sentence():
        hydra.main(config_path=str(conf_dir()), config_name=name, version_base="1.3")(job)()


@contextmanager
def one_sentence() -> Iterator[None]:
    """Hydra's and OmegaConf's errors as a `UserError`."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(sentence(error)) from error
    except ValueError as error:
        _refuse_null_group(error)
        raise


def with_names(words: list[str]) -> list[str]:
    """Quote the name of the file `nan` of `debug`: Hydra would read it as a number."""
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
    own = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
    with one_sentence():
        resolved_config = OmegaConf.to_container(own, resolve=True, throw_on_missing=True)
    assert isinstance(resolved_config, dict)
    return {str(key): value for key, value in resolved_config.items() if key != "experiment"}


def absolute_paths(resolved_config: dict[str, Any]) -> dict[str, str]:
    """Overrides that make every local path absolute, for processes with another working directory."""
    found = {}
    place = resolved_config["dataset"]["path"]
    if place is not None and resolved_config["dataset"]["kind"] != "hub" and "://" not in place:
        found["dataset.path"] = place
    if resolved_config["model"]["path"] is not None and resolved_config["model"]["source"] == "checkpoint":
        found["model.path"] = resolved_config["model"]["path"]
    tokenizer = resolved_config["dataset"].get("tokenizer")
    for key, value in (
        ("dataset.tokenizer", tokenizer if tokenizer not in TOKENIZERS else None),
        ("from", resolved_config["from"]),
        ("output_dir", resolved_config["output_dir"]),
        ("partition.path", resolved_config["partition"].get("path")),
        ("adapter.path", resolved_config["adapter"].get("path")),
        ("dataset.tokenizer_text", resolved_config["dataset"].get("tokenizer_text")),
        ("dataset.statistics", resolved_config["dataset"].get("statistics")),
        ("clock.file", resolved_config.get("clock", {}).get("file")),
        ("partition.census", resolved_config["partition"].get("census")),
        ("runtime.cache_dir", resolved_config["runtime"]["cache_dir"]),
        ("runtime.server_kit", resolved_config["runtime"]["server_kit"]),
    ):
        if value is not None:
            found[key] = value
    return {key: str(Path(value).expanduser().resolve()) for key, value in found.items()}


def quoted(key: str, value: Any) -> str:
    """A Hydra override whose value may hold spaces, commas, braces or quotes."""
    if not isinstance(value, str):
        return f"{key}={json.dumps(value)}"
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"{key}='{escaped}'"
