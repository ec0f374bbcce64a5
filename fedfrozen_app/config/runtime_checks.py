"""Check how and where a run executes: runner, precision, stacked runs, and this machine's devices and
files."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedfrozen_app.config.schema import Config, key_of
from fedfrozen_app.config.schema.dataset_section import PROPOSED
from fedfrozen_app.core.errors import UserError

if TYPE_CHECKING:  # torch takes seconds to import
    import torch


ONE_PERSONS = ("inprocess", "ray")  # runtimes in which one process sends whole cohorts to its runners


def check_runner(config: Config) -> None:
    """Combinations of runtime, runner and precision that cannot work on any machine."""
    if config.runtime.name not in ONE_PERSONS and config.runtime.runner == "cohort":
        raise UserError(
            "Flower hands out one client a message, so runtime.runner=cohort cannot work there: "
            "use runtime=inprocess or runtime=ray, or runtime.runner=auto."
        )
    stack_runs(config)
    if config.client.precision == "bf16" and config.model.dtype == "float64":
        raise UserError(
            "client.precision=bf16 would change nothing with model.dtype=float64, which autocast leaves as "
            "it is: use model.dtype=float32, or client.precision=float32."
        )
    if config.model.gradient_checkpointing and config.runtime.runner == "cohort":
        raise UserError(
            "model.gradient_checkpointing=true computes activations again, which clients that train together "
            "cannot: use runtime.runner=auto or sequential."
        )


def check_clock(config: Config) -> None:
    """Virtual time is for simulated clients, whose machines and links are made up."""
    clock = config.clock
    if clock.name == "none":
        return
    if config.runtime.name == "deployed":
        raise UserError(
            "clock=profiles is for simulated clients, and real sites take real time: use clock=none."
        )
    if clock.distribution == "uniform" and clock.spread >= 1:
        raise UserError(
            f"clock.spread={clock.spread:g} with clock.distribution=uniform would give clients no speed at "
            "all: use a number below 1, or clock.distribution=lognormal."
        )


def stack_runs(config: Config) -> int | None:
    """How many runs of a sweep train together: 1 for `off`, None for `auto`."""
    word = config.runtime.stack_runs
    if word in ("auto", "off"):
        return 1 if word == "off" else None
    if not word.isascii() or not word.isdigit() or int(word) < 1:
        raise UserError(
            f"runtime.stack_runs={word} is unknown: give a number of runs from 1 on, auto or off."
        )
    return int(word)


def device_of(name: str) -> "torch.device":
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda was asked for, but torch sees no GPU: use device=cpu or device=auto.")
    return torch.device(name)


def check_device(config: Config) -> None:
    """Raise a `UserError` for a GPU that this machine does not have."""
    device_of(config.device)


def check_files(config: Config) -> None:
    """Raise a `UserError` for a missing folder now, not after the model has been built."""
    for key, local in (
        ("dataset.path", config.dataset.kind != "hub" and "://" not in (config.dataset.path or "")),
        ("model.path", config.model.source == "checkpoint"),
        ("model.roles", True),
        ("adapter.path", True),
        ("dataset.tokenizer_text", True),
        ("dataset.statistics", config.dataset.statistics != PROPOSED),
        ("clock.file", True),
        ("partition.path", True),
        ("partition.census", True),
        ("start_from", True),
        ("runtime.server_kit", True),
    ):
        path = _value(config, key)
        if path is not None and local and not Path(path).expanduser().exists():
            raise UserError(
                f"{key_of(key)}={path} does not exist: give the path of a folder or file that does."
            )


def _value(config: Config, key: str) -> Any:
    found: Any = config
    for part in key.split("."):
        found = getattr(found, part)
    return found
