"""`checkpoint.*`, `early_stop.*`, `track.*`, `debug.*`: sections without files of their own."""

from dataclasses import dataclass

from fedfrozen_app.config.needs import not_with, only_with
from fedfrozen_app.config.settings import setting


@dataclass
class CheckpointConfig:
    every: int = setting(
        1, "Rounds between checkpoints; 0 writes none. The last round always gets one, unless 0", least=0
    )
    keep: int = setting(
        2,
        "How many of the newest checkpoints to keep",
        least=1,
        needs=not_with("checkpoint.every", "0", add="checkpoint.every=1"),
    )
    rollback: bool = setting(
        False,
        "Also keep, for every client, the last checkpoint before its first round: `fedfrozen forget` "
        "restarts there",
        needs=not_with("checkpoint.every", "0", add="checkpoint.every=1"),
    )
    uploads: str | None = setting(
        None,
        "Keep every upload of the client with this name, in `uploads/`, for `fedfrozen audit`. `null`: of "
        "none",
    )


@dataclass
class EarlyStopConfig:
    patience: int | None = setting(
        None,
        "Stop after so many evaluations without a better accuracy on the server's validation rows",
        least=1,
    )


@dataclass
class TrackConfig:
    tensorboard: bool = setting(
        True,
        "Write the scalars of `metrics.jsonl` as TensorBoard events, in `tensorboard/` of the run's folder",
    )
    wandb: bool = setting(False, "Send them to Weights & Biases as well; needs the extra `wandb`")
    mlflow: bool = setting(False, "Send them to MLflow as well; needs the extra `mlflow`")
    project: str = setting(
        "fedfrozen",
        "The W&B project, and the MLflow experiment",
        needs=only_with("track.wandb|track.mlflow", "true"),
    )


@dataclass
class DebugConfig:
    nan: bool = setting(
        False, "Stop at the operation whose gradient is not a number, and name it; several times slower"
    )
    profile: bool = setting(
        False, "Write where a round's time goes: `profile.png`, and every function in `profile.txt`"
    )
