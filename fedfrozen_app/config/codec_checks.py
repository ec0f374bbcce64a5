"""Check the settings that a codec of uploads, or of broadcasts, allows."""

from typing import Any

from fedfrozen_app.config.named_settings import strategy_settings
from fedfrozen_app.config.schema import CodecConfig, Config
from fedfrozen_app.core import registry
from fedfrozen_app.core.errors import UserError

STRATEGYS_OWN = "keep"  # a codec that strategies choose, by settings of their own
PLAIN = "use codec=none"


def codec_of(codec: CodecConfig) -> tuple[str, dict[str, Any]] | None:
    """The codec's name and the settings that it reads; None if updates are not encoded."""
    return _named(codec, codec.name)


def down_codec_of(codec: CodecConfig) -> tuple[str, dict[str, Any]] | None:
    """The same for the server's broadcasts."""
    return _named(codec, codec.down)


def _named(codec: CodecConfig, name: str) -> tuple[str, dict[str, Any]] | None:
    if name == "none":
        return None
    return name, {key: getattr(codec, key) for key in registry.find("codecs", name).settings}


def check_codec(config: Config) -> None:
    """Raise a `UserError` for a codec if the server needs exact updates, or if another one is set already."""
    check_down(config)
    codec, strategy = config.codec.name, str(config.strategy["name"])
    if codec == "none":
        return
    if codec == STRATEGYS_OWN:
        raise UserError("codec=keep is the codec of strategy.keep: set that, or another codec.")
    feedback = registry.find("codecs", codec).error_feedback
    method, settings = registry.find("strategies", strategy), strategy_settings(config)
    if (own := method.codec_for(settings)) is not None:
        raise UserError(
            f"strategy.{own[0]}={own[1]} already codes uploads, and codec={codec} would code them again: "
            f"leave strategy.{own[0]} out, or {PLAIN}."
        )
    if method.codecs == "none":
        raise UserError(
            f"codec={codec} rounds updates, and strategy={strategy} keeps arrays at the server and the "
            f"clients that agree only if updates arrive exactly: {PLAIN}, or another strategy."
        )
    if method.codecs == "complete" and feedback:
        raise UserError(
            f"codec={codec} sends parts of an update in later rounds, and strategy={strategy} weights each "
            "round's updates by numbers of that round: use codec=float16, bfloat16, int8 or int4."
        )
    _check_companions(config, feedback=feedback)


def _check_companions(config: Config, *, feedback: bool) -> None:
    codec, adapter = config.codec.name, config.adapter
    _check_factors(config, "codec", codec)
    if config.privacy.audited is not None:
        raise UserError(
            f"privacy.audited={config.privacy.audited} compares what arrived with what the private steps "
            f"made, to the bit, and codec={codec} rounds it on the way: {PLAIN} for the audit, which holds "
            "for the coded run too, because coding follows the noise."
        )
    if feedback and adapter.name != "none" and registry.find("adapter_rules", adapter.rule).moves_base:
        raise UserError(
            f"adapter.rule={adapter.rule} changes the frozen weights in every round, and codec={codec} keeps "
            "parts of updates for adapters as they were before: use adapter.rule=average or ffa."
        )
    if config.secure_aggregation.name == "on":
        raise UserError(
            f"codec={codec} codes each update by itself, and secure_aggregation=on sums updates in one ring: "
            f"use secure_aggregation.bits=8 for small masked sums, with {PLAIN.removeprefix('use ')}."
        )


def check_down(config: Config) -> None:
    """Raise a `UserError` for coded broadcasts if server and clients must hold bit-identical models."""
    down, adapter = config.codec.down, config.adapter
    if down == "none":
        return
    leave = f"leave codec.down={down} out"
    if down == STRATEGYS_OWN or not registry.find("codecs", down).codes_broadcasts:
        raise UserError(f"codec.down={down} codes uploads alone: use codec.down=int8, or {leave}.")
    _check_factors(config, "codec.down", down)
    if registry.find("strategies", str(config.strategy["name"])).codecs == "none":
        raise UserError(
            f"codec.down={down} rounds what clients begin from, and strategy={config.strategy['name']} keeps "
            f"arrays at the server and the clients that agree only without that: {leave}."
        )
    if adapter.name != "none" and registry.find("adapter_rules", adapter.rule).moves_base:
        raise UserError(
            f"adapter.rule={adapter.rule} computes changes of the frozen weights from the clients' own "
            f"adapters, which codec.down={down} rounds: use adapter.rule=average or ffa, or {leave}."
        )
    if adapter.ranks:
        raise UserError(
            f"adapter.ranks sends every client adapters of its own size, and codec.down={down} codes those "
            f"of the server for all: {leave}."
        )


def _check_factors(config: Config, key: str, codec: str) -> None:
    if config.adapter.name != "none" and not registry.find("codecs", codec).codes_adapters:
        raise UserError(
            f"{key}={codec} sends factors of matrices, and adapter={config.adapter.name} trains such factors "
            f"already: use {key}=int8, or adapter=none."
        )
