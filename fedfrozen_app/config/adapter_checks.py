"""Check the settings that an adapter and its aggregation rule allow."""

from fedfrozen_app.config.named_settings import strategy_settings
from fedfrozen_app.config.schema import Config
from fedfrozen_app.core import registry
from fedfrozen_app.core.errors import UserError


def check_adapter(config: Config) -> None:
    """Check adapter settings: a rule that changes the frozen weights needs the plain mean of exact
    replies."""
    adapter, name = config.adapter, str(config.strategy["name"])
    registry.find("adapters", adapter.name)
    rule, strategy = registry.find("adapter_rules", adapter.rule), registry.find("strategies", name)
    if config.model.dtype == "bfloat16" and config.client.precision != "bf16":
        raise UserError(
            f"model.dtype=bfloat16 with adapter={adapter.name} is for frozen weights; adapters and head "
            f"stay float32: set client.precision=bf16, in which they meet (it is {config.client.precision})."
        )
    settings = strategy_settings(config)
    algorithm = registry.find("algorithms", strategy.algorithm_for(settings))
    own = algorithm.has_arrays() or not algorithm.adds_nothing()
    steps = strategy.step is not registry.find("strategies", "fedavg").step
    if rule.moves_base:
        others = {
            f"server_optimizer={config.server_optimizer['name']}": config.server_optimizer["name"] != "none",
            f"aggregation={config.aggregation.name}": config.aggregation.name != "mean",
            "strategy.zero_fill=true": bool(getattr(settings, "zero_fill", False)),
            f"strategy={name}": steps,
        }
        for words in (words for words, does in others.items() if does):
            raise UserError(
                f"adapter.rule={adapter.rule} makes the model the plain mean of the clients' models, and "
                f"{words} would make it another: leave that out, or use adapter.rule=average or ffa."
            )
        if own:
            raise UserError(
                f"adapter.rule={adapter.rule} adds to the frozen weights in every round, and strategy={name} "
                "has arrays of its own for adapters as they were before: use adapter.rule=average or ffa."
            )
    if adapter.ranks:
        others = {
            "privacy=dp_sgd adds noise to": config.privacy.name != "none",
            "secure_aggregation=on masks": config.secure_aggregation.name == "on",
            f"strategy={name} encodes": strategy.codec_for(settings) is not None,
            f"codec={config.codec.name} codes": config.codec.name != "none",
            f"strategy={name} has arrays beside": own,
        }
        for words in (words for words, does in others.items() if does):
            raise UserError(
                f"adapter.ranks gives clients adapters of unlike sizes, and {words} all of one: leave one of "
                "the two out."
            )
