"""A job: what one run was asked for, where its results go, and where it starts from."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedfrozen_app.config import Config, absolute_paths, server_optimizer_settings, strategy_settings
from fedfrozen_app.errors import UserError
from fedfrozen_app.files import checkpoint
from fedfrozen_app.files.checkpoint import Checkpoint


@dataclass(frozen=True)
class Job:
    config: Config
    resolved_config: dict[str, Any]  # nested and without types, as summaries and checkpoints keep it
    overrides: list[str]  # what composes that configuration again
    folder: Path
    start: Checkpoint | None = None  # of this run or another; None: from the beginning
    shown: bool = True  # whether its rounds are shown as they end

    def with_settings(self) -> "Job":
        """The same with settings as their owners checked them, defaults filled in."""
        config = self.config
        checked = {
            "strategy": {"name": config.strategy["name"], **asdict(strategy_settings(config))},
            "server_optimizer": {
                "name": config.server_optimizer["name"],
                **asdict(server_optimizer_settings(config)),
            },
        }
        return replace(self, resolved_config=self.resolved_config | checked)

    def with_clients(self, count: int) -> "Job":
        return replace(self, resolved_config=self.resolved_config | {"num_clients": count})

    @property
    def source(self) -> Path:
        """The run whose rows and records this one continues: another, or itself."""
        return Path(self.config.start_from).parents[1] if self.config.start_from else self.folder

    def start_folder(self) -> str | None:
        """The checkpoint that this job starts from, for processes with another working directory."""
        if self.start is None:
            return None
        named = absolute_paths(self.resolved_config).get("from")
        run = Path(named).parents[1] if named and self.config.start_from else self.folder.resolve()
        return f"{run}/checkpoints/{self.start.round}"


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
