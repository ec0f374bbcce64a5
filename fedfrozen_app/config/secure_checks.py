"""Which settings secure aggregation allows: the server sees sums, never one client's update."""

from fedfrozen_app.config.named_settings import strategy_settings
from fedfrozen_app.config.schema import Config
from fedfrozen_app.core import registry
from fedfrozen_app.core.errors import UserError

RINGS = (8, 12, 16, 24, 32)  # bits of a number in a masked sum


def check_batches(config: Config) -> None:
    """Fixed batches protect masked sums without noise."""
    if config.aggregation.cohorts == "batches" and (
        config.secure_aggregation.name != "on" or config.privacy.name != "none"
    ):
        raise UserError(
            "aggregation.cohorts=batches keeps differences of masked sums from revealing a client: it "
            "needs secure_aggregation=on, and privacy=none, since noise does it otherwise."
        )


def check_masked(config: Config) -> None:
    """Refuse what needs individual updates: the server sees sums alone."""
    check_ring(config)
    strategy, settings = registry.find("strategies", str(config.strategy["name"])), strategy_settings(config)
    looks = {
        f"aggregation={config.aggregation.name} compares": config.aggregation.name != "mean",
        f"aggregation.far_out={config.aggregation.far_out} measures": config.aggregation.far_out is not None,
        f"checkpoint.uploads={config.checkpoint.uploads} keeps": config.checkpoint.uploads is not None,
        f"privacy.audited={config.privacy.audited} watches": config.privacy.audited is not None
        and config.secure_aggregation.noise != "sum",
        f"strategy={config.strategy['name']} {strategy.one_by_one}": bool(strategy.one_by_one),
    }
    if config.adapter.name != "none":
        rule = registry.find("adapter_rules", config.adapter.rule)
        looks[f"adapter.rule={config.adapter.rule} {rule.one_by_one}"] = bool(rule.one_by_one)
    for words in (words for words, does in looks.items() if does):
        raise UserError(
            f"{words} updates one by one, and secure_aggregation=on shows the server their sum alone: "
            "leave that out, or use secure_aggregation=off."
        )
    if config.secure_aggregation.noise == "sum":
        check_noise_in_sum(config)
    if config.secure_aggregation.choices == "groups" and config.privacy.name != "none":
        raise UserError(
            "secure_aggregation.choices=groups has a client send its choice of layers before it trains, and "
            f"privacy={config.privacy.name} pays for both as one: use secure_aggregation.choices=union."
        )
    if config.aggregation.cohorts == "batches" and config.secure_aggregation.choices == "groups":
        raise UserError(
            "aggregation.cohorts=batches sums fixed batches, and secure_aggregation.choices=groups those "
            "with the same choice: use one of them."
        )
    if config.personal:
        raise UserError(
            "personal=true reports how each client's model does on its own rows, and secure_aggregation=on "
            "shows sums alone: leave personal=null, or use secure_aggregation=off."
        )
    if (codec := strategy.codec_for(settings)) is not None:
        raise UserError(
            f"strategy.{codec[0]}={codec[1]} sends some values and their places, and masks hide both at full "
            f"size: leave strategy.{codec[0]} out, or use secure_aggregation=off."
        )


def check_ring(config: Config) -> None:
    """Numbers of few bits: each client of a round needs a level of its own in the ring."""
    secure = config.secure_aggregation
    if secure.bits not in RINGS:
        raise UserError(
            f"secure_aggregation.bits={secure.bits} make no ring that is known here: use 8, 12, 16, 24 or 32."
        )
    cohort = round((config.num_clients or 0) * config.participation)
    most = int((2 ** (secure.bits - 1) - 1) * (0.75 if secure.noise == "sum" else 1))
    if cohort > most:
        raise UserError(
            f"secure_aggregation.bits={secure.bits} hold a sum over {most} clients, and a round is over "
            f"{cohort}: raise bits, or lower participation."
        )
    if secure.renew is not None and secure.noise == "sum":
        raise UserError(
            f"secure_aggregation.renew={secure.renew:g} needs the norm of a round's updates, which "
            "secure_aggregation.noise=sum hides: use secure_aggregation.quantile=0.8, which counts clients "
            "with noise, or leave renew out, and set clip."
        )
    if secure.renew is not None and secure.quantile is not None:
        raise UserError(
            f"secure_aggregation.renew={secure.renew:g} and secure_aggregation.quantile={secure.quantile:g} "
            "are two rules for one bound: leave one of them out."
        )


def check_noise_in_sum(config: Config) -> None:
    """Noise on a sum covers one plain SGD step and nothing that depends on it in another way."""
    if config.privacy.name == "none":
        raise UserError("secure_aggregation.noise=sum is the noise of privacy=dp_sgd: add that, or use site.")
    if config.privacy.audited is not None and config.privacy.canaries:
        raise UserError(
            "secure_aggregation.noise=sum hides what a client sends, so that nobody can guess its canaries: "
            "use privacy.canaries=0, and the sums, shares of noise and accounts are audited without them."
        )
    needed = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "head_lr": None, "fusion_lr": None}
    for key, value in needed.items():
        if (found := getattr(config.client, key)) != value:
            wanted = "null" if value is None else value
            raise UserError(
                f"secure_aggregation.noise=sum adds clipped gradients up, and client.{key}={found} would "
                f"make something else of them: set client.{key}={wanted}. A server_optimizer may follow."
            )
