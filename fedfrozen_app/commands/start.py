"""`fedfrozen [KEY=VALUE ...]`: compose and check before the heavy imports, then train.

A typo should cost neither the seconds of these imports nor a folder.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.verbs.train_verbs import DETACH

# Hydra's flags that show a configuration instead of running.
SHOW_ONE = ("--cfg", "-c", "--info", "-i", "--resolve", "--package", "-p")

# Kinds of data whose files can be invalid in many ways. Others are generated, downloaded, or image folders.
TABLES = ("text", "table", "conll", "brat", "i2b2", "mimic", "instructions", "parquet")

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from fedfrozen_app.config.composed import ComposedConfig


def train(arguments: list[str]) -> None:
    """One run, or a Hydra multirun with -m."""
    if "-m" in arguments or "--multirun" in arguments:
        if shows := [word for word in arguments if word.partition("=")[0] in SHOW_ONE]:
            raise UserError(
                f"{shows[0]} shows the configuration of one run, and -m asks for several: leave -m out, and "
                "give each key one value."
            )
        from fedfrozen_app.sweep.multirun import multirun

        multirun(arguments)
        return
    words = [word for word in arguments if word != DETACH]
    with imports_not_collected():
        prepared = prepare(words) if is_plain(words) else None
        if prepared is not None:
            read_data(prepared[1])
        from fedfrozen_app.commands import training  # the heavy imports
    if prepared is None:
        training.train_by_hydra(words, detach=DETACH in arguments)
    else:
        training.train_composed(*prepared, detach=DETACH in arguments)


def is_plain(words: list[str]) -> bool:
    """Whether there are only settings and none of Hydra's flags, so that Hydra's command line is not
    needed."""
    return all("=" in word and not word.startswith(("-", "hydra.mode=")) for word in words)


def prepare(words: list[str]) -> "tuple[DictConfig, ComposedConfig]":
    """Compose and check the run's configuration; also checks that its folder holds no other run."""
    from fedfrozen_app.config.compose import compose_job
    from fedfrozen_app.config.composed import ComposedConfig
    from fedfrozen_app.files.folders import check_free

    composed = compose_job(words)
    run = ComposedConfig.of(composed, composed.hydra.overrides.task)
    if run.config.output_dir is not None:
        check_free(Path(run.config.output_dir).expanduser().resolve(), overwrite=run.config.overwrite)
    return composed, run


def read_data(run: "ComposedConfig") -> None:
    """Read the rows of a run in this process before the rest is imported, which takes longer."""
    config = run.with_absolute_paths().config
    if config.runtime.name == "inprocess" and config.dataset.kind in TABLES:
        from fedfrozen_app.data.federated import dataset_of, spec_of
        from fedfrozen_app.data.sources.load import read_ahead

        read_ahead(spec_of(dataset_of(config), None, config))


@contextmanager
def imports_not_collected() -> Iterator[None]:
    """Disable garbage collection during imports: they create half a million permanent objects, and scanning
    these repeatedly takes a tenth of the start. No gain in a process that has imported them already."""
    if "fedfrozen_app.launch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
