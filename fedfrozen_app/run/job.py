"""A job: the configuration of one run, its output folder, and its starting checkpoint."""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fedfrozen_app.config import (
    ComposedConfig,
    Config,
    absolute_paths,
    server_optimizer_settings,
    strategy_settings,
)
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.table import TextReading
from fedfrozen_app.data.text_reading import LEARNED
from fedfrozen_app.files import checkpoint
from fedfrozen_app.files.checkpoint import Checkpoint


@dataclass(frozen=True)
class Job:
    composed: ComposedConfig
    folder: Path
    start: Checkpoint | None = None  # of this run or another; None: start from the beginning
    detach: bool = False  # whether the command exits after submitting the run
    shown: bool = True  # whether to show rounds as they end
    filled: dict[str, Any] = field(default_factory=dict)  # for the record: values computed by the run

    @property
    def config(self) -> Config:
        return self.composed.config

    @property
    def overrides(self) -> list[str]:
        """The overrides that compose the configuration."""
        return self.composed.overrides

    @property
    def resolved_config(self) -> dict[str, Any]:
        """The configuration as plain nested values, for summaries and checkpoints."""
        return self.composed.resolved | self.filled

    def with_settings(self) -> "Job":
        """The same job with checked settings, defaults filled in."""
        return replace(self, filled=self.filled | checked_settings(self.config))

    def with_reading(self, reading: TextReading | None) -> "Job":
        """The same job with the run's text preprocessing."""
        if reading is None:
            return self
        found: dict[str, Any] = {"max_tokens": reading.max_tokens}
        if reading.chunks > 1:
            found["max_chunks"] = reading.chunks
        if reading.vocabulary is not None:  # stored in tokenizer.json
            found["tokenizer"] = LEARNED
        return replace(self, filled=self.filled | {"dataset": self.resolved_config["dataset"] | found})

    def with_clients(self, count: int) -> "Job":
        return replace(self, filled=self.filled | {"num_clients": count})

    @property
    def source(self) -> Path:
        """The folder of the run that this one continues: another, or itself."""
        return Path(self.config.start_from).parents[1] if self.config.start_from else self.folder

    @property
    def resumes_itself(self) -> bool:
        """Whether it resumes the run of its own folder."""
        return self.start is not None and self.source.resolve() == self.folder.resolve()

    def start_folder(self) -> str | None:
        """The absolute path of the starting checkpoint, for processes with another working directory."""
        if self.start is None:
            return None
        named = absolute_paths(self.resolved_config).get("from")
        run = Path(named).parents[1] if named and self.config.start_from else self.folder.resolve()
        return f"{run}/checkpoints/{self.start.round}"


def checked_settings(config: Config) -> dict[str, Any]:
    """The settings of strategy and server optimiser, checked by their classes, defaults filled in."""
    return {
        "strategy": {"name": config.strategy["name"], **asdict(strategy_settings(config))},
        "server_optimizer": {
            "name": config.server_optimizer["name"],
            **asdict(server_optimizer_settings(config)),
        },
    }


def fork_start(config: Config) -> Checkpoint | None:
    """The checkpoint of another run that this one starts from."""
    if config.start_from is None:
        return None
    start = checkpoint.read(Path(config.start_from))
    if start.round >= config.num_rounds:
        raise UserError(
            f"from={config.start_from} was written after round {start.round}, so that num_rounds="
            f"{config.num_rounds} leaves nothing to train: raise num_rounds."
        )
    return start
