"""Check the settings that differential privacy allows."""

from fedfrozen_app.config.schema import Config
from fedfrozen_app.core.errors import UserError


def check_private(config: Config) -> None:
    if config.personal:
        raise UserError(
            "personal=true reports how each client's model does on its own rows, which privacy=dp_sgd does "
            "not cover: leave personal=null."
        )
    if config.privacy.audited is not None and config.privacy.canaries and config.privacy.clipping == "ghost":
        raise UserError(
            "privacy.clipping=ghost takes no canaries, which are gradients and no rows: set "
            "privacy.canaries=0, and noise, clipped sums and accounts are audited without them; or use "
            "privacy.clipping=per_example."
        )
    if config.dataset.augment != "none":
        raise UserError(
            f"dataset.augment={config.dataset.augment} is not made for privacy=dp_sgd, whose steps draw "
            "their own samples: set dataset.augment=none."
        )
    if config.dataset.long_texts == "chunks":
        raise UserError(
            "dataset.long_texts=chunks has several gradients a text, and privacy=dp_sgd clips one of each "
            "example: leave it out, and set dataset.max_tokens."
        )
    if config.dataset.kind == "table":
        check_private_table(config)
    if config.client.class_weights:
        raise UserError(
            "client.class_weights=true reveals a client's label counts, which privacy=dp_sgd does not cover: "
            "set client.class_weights=false."
        )
    if config.client.clip is not None:
        raise UserError(
            f"client.clip={config.client.clip:g} clips whole steps, and privacy=dp_sgd each example's part: "
            "set client.clip=null and privacy.max_grad_norm."
        )
    if config.model.gradient_checkpointing:
        raise UserError(
            "model.gradient_checkpointing=true hides activations that privacy=dp_sgd needs, for each "
            "example's gradient: set it to false, and lower privacy.physical_batch instead."
        )
    if config.model.dtype == "bfloat16":
        raise UserError(
            "model.dtype=bfloat16 cannot measure a gradient's norm well enough to clip it for "
            "privacy=dp_sgd: use model.dtype=float32 (client.precision=bf16 still computes in bfloat16)."
        )
    if config.privacy.clipping == "ghost" and config.client.precision == "bf16":
        raise UserError(
            "privacy.clipping=ghost cannot measure norms well enough with client.precision=bf16: use "
            "client.precision=float32, or privacy.clipping=per_example."
        )


def check_private_table(config: Config) -> None:
    """Raise a `UserError` for settings by which a table's rows would leak other than through gradients."""
    if (
        config.dataset.statistics is None and config.runtime.name != "deployed"
    ):  # there, the server's own rows
        raise UserError(
            "privacy=dp_sgd does not cover a table's medians, means, scales and levels, which would come "
            "from the "
            "clients' rows: give public values with dataset.statistics=FILE (a table.json), or a census.json "
            "taken with noise."
        )
    if config.dataset.normalise == "site":
        raise UserError(
            "dataset.normalise=site scales a client's rows by all of its rows, which privacy=dp_sgd does "
            "not cover: "
            "set dataset.normalise=federation."
        )
    if config.dataset.task == "survival" and config.dataset.survival_model == "cox":
        raise UserError(
            "Cox's loss compares the people of a batch, and privacy=dp_sgd clips each example's own part: "
            "set "
            "dataset.survival_model=discrete."
        )
