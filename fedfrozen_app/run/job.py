"""A job: what one run was asked for, where its results go, and where it starts from."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedfrozen_app.config import (
    Config,
    absolute_paths,
    compose_config,
    quoted,
    read,
    resolved,
    server_optimizer_settings,
    strategy_settings,
)
from fedfrozen_app.errors import UserError
from fedfrozen_app.files import checkpoint
from fedfrozen_app.files.checkpoint import Checkpoint
from fedfrozen_app.words import flatten


@dataclass(frozen=True)
class Job:
    config: Config
    resolved_config: dict[str, Any]  # nested and without types, as summaries and checkpoints keep it
    overrides: list[str]  # what composes that configuration again
    folder: Path
    start: Checkpoint | None = None  # of this run or another; None: from the beginning
    detach: bool = False  # whether the command leaves once the run is handed in
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

    @property
    def goes_on(self) -> bool:
        """Whether it resumes the run of its own folder."""
        return self.start is not None and self.source.resolve() == self.folder.resolve()

    def start_folder(self) -> str | None:
        """The checkpoint that this job starts from, for processes with another working directory."""
        if self.start is None:
            return None
        named = absolute_paths(self.resolved_config).get("from")
        run = Path(named).parents[1] if named and self.config.start_from else self.folder.resolve()
        return f"{run}/checkpoints/{self.start.round}"


def as_it_was(overrides: Sequence[str], had: Mapping[str, Any]) -> list[str]:
    """These words, and more where a default has moved since they were composed to `had`: a run that goes on,
    or whose model is used, stays what it was."""
    composed = resolved(compose_config(list(overrides)))
    # Files may have moved, and this may be another machine: words that come later may say so.
    config = read(composed | {"from": None}, here=False)
    today = Job(config, composed, list(overrides), Path()).with_settings()
    before = flatten(had)
    moved = {
        key: before[key]
        for key, value in flatten(today.resolved_config).items()
        if value is not None and before.get(key, value) != value
    }
    return [*overrides, *(quoted(f"++{key}", value) for key, value in moved.items())]


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
