"""`client.*`: local training."""

from dataclasses import dataclass

from fedfrozen_app.config.needs import only_with
from fedfrozen_app.config.settings import setting


@dataclass
class ClientConfig:
    optimizer: str = setting("adamw", "A fresh one every round", choices=("adamw", "sgd"))
    lr: float = setting(3e-3, "For small models from scratch. Use 1e-4 or less for pretrained ones", above=0)
    weight_decay: float = setting(0.01, "Frozen parameters are never decayed", least=0)
    momentum: float = setting(
        0.0, "`sgd` only", least=0, most=1, needs=only_with("client.optimizer", "sgd", add="client=sgd")
    )
    local_epochs: int = setting(2, "Passes over the client's rows in a round", least=1)
    local_steps: int | None = setting(None, "At most so many steps in a round. `null`: whole epochs", least=1)
    batch_size: int = setting(16, "Rows in a step", least=1)
    lr_schedule: str = setting("cosine", "Over the rounds", choices=("constant", "linear", "cosine"))
    lr_final: float = setting(
        0.1,
        "Where `linear` and `cosine` end, as a share of `client.lr`",
        least=0,
        most=1,
        needs=only_with("client.lr_schedule", "linear", "cosine"),
    )
    clip: float | None = setting(
        None,
        "Largest gradient norm. `null`: no clipping. With privacy `privacy.max_grad_norm` takes its place",
        above=0,
    )
    precision: str = setting(
        "float32",
        "`tf32`: float32 whose products a GPU rounds to 10 bits of mantissa; `bf16`: autocast",
        choices=("float32", "tf32", "bf16"),
    )
    class_weights: bool = setting(False, "Weigh the loss by each client's inverse class frequency")
    head_lr: float | None = setting(
        None,
        "The head's own learning rate, on the same schedule: a new head on a pretrained model often wants a "
        "larger one. `null`: `client.lr`",
        above=0,
    )
    fusion_lr: float | None = setting(
        None,
        "The same for parameters of the role `fusion`, where a model has them. `null`: `client.lr`",
        above=0,
    )
