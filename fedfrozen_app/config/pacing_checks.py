"""Check settings for a server that does not wait for all clients of a round."""

from fedfrozen_app.config.named_settings import strategy_settings
from fedfrozen_app.config.schema import Config
from fedfrozen_app.core import registry
from fedfrozen_app.core.errors import UserError

SYNCHRONOUS = "use pacing=synchronous"
REAL_TIME = ("flower", "deployed")  # runtimes whose nodes take real time


def check_pacing(config: Config) -> None:
    """Raise a `UserError` for settings that need all clients of a round to start from the same version."""
    pacing = config.pacing
    if pacing.name == "synchronous":
        return
    if config.runtime.name in REAL_TIME:
        _check_real_time(config)
    elif config.clock.name == "none":
        raise UserError(
            f"pacing={pacing.name} goes by the virtual time at which clients reply: add clock=profiles."
        )
    if config.secure_aggregation.name == "on":
        _check_masked(config)
    _check_strategy(config)
    _check_companions(config)
    if pacing.name == "deadline" and pacing.seconds is None and pacing.share in (None, 1.0):
        raise UserError(
            "pacing=deadline without pacing.seconds, and with pacing.share=1, waits for every client: set "
            f"one of them, or {SYNCHRONOUS}."
        )
    if pacing.partial:
        _check_partial(config)
    if pacing.name == "buffered":
        _check_buffer(config)


def _check_real_time(config: Config) -> None:
    """Settings for Flower's nodes and real sites, whose reply times are not known beforehand."""
    pacing, runtime = config.pacing, config.runtime.name
    if config.secure_aggregation.name == "on":
        raise UserError(
            "secure_aggregation=on sums over nodes that answer each step together, and with "
            f"runtime={runtime} pacing={pacing.name} lets each reply at its own time: {SYNCHRONOUS}, or "
            "runtime=inprocess."
        )
    if config.clock.name != "none":
        raise UserError(
            f"pacing={pacing.name} goes by the real time of nodes with runtime={runtime}, and clock=profiles "
            "by a virtual one: leave the clock out, or use runtime=inprocess."
        )
    if pacing.partial:
        raise UserError(
            "pacing.partial=true fits steps into a time that is known beforehand, and with "
            f"runtime={runtime} it is not: leave it out."
        )
    if runtime == "deployed" and config.checkpoint.every > 1:
        raise UserError(
            f"checkpoint.every={config.checkpoint.every} leaves rounds without a checkpoint, and with "
            f"pacing={pacing.name} sites reply in no order that could be repeated: use checkpoint.every=1."
        )


def _check_masked(config: Config) -> None:
    """Masked sums are over whole cohorts of clients that started together from one version."""
    pacing, secure = config.pacing, config.secure_aggregation
    if pacing.name != "buffered":
        raise UserError(
            f"secure_aggregation=on sums over clients that started from one version of the model, and "
            f"pacing={pacing.name} sets late clients apart: use pacing=buffered, whose cohorts wait for no "
            f"other, {SYNCHRONOUS}, or secure_aggregation=off."
        )
    others = {
        "aggregation.cohorts=batches": config.aggregation.cohorts == "batches",
        "secure_aggregation.choices=groups": secure.choices == "groups",
        "secure_aggregation.noise=sum": secure.noise == "sum",
        "secure_aggregation.renew": secure.renew is not None,
        "secure_aggregation.quantile": secure.quantile is not None,
    }
    for words in (words for words, is_set in others.items() if is_set):
        raise UserError(
            f"{words} builds on the round before, and pacing=buffered has several cohorts at work: leave "
            f"that out, or {SYNCHRONOUS}."
        )
    if pacing.buffer is not None and pacing.buffer < secure.min_cohort:
        raise UserError(
            f"pacing.buffer={pacing.buffer} clients are a cohort whose updates are summed under masks, and "
            f"secure_aggregation.min_cohort={secure.min_cohort} make a sum at least: raise the first, or "
            "lower the second."
        )
    if pacing.buffer is not None and (pacing.concurrency or 0) % pacing.buffer:
        raise UserError(
            f"pacing.concurrency={pacing.concurrency} clients are no whole number of cohorts of "
            f"pacing.buffer={pacing.buffer}, which secure_aggregation=on sums over: give a multiple of it."
        )


def _check_strategy(config: Config) -> None:
    pacing, name = config.pacing.name, str(config.strategy["name"])
    strategy = registry.find("strategies", name)
    if pacing not in strategy.pacings:
        raise UserError(
            f"strategy={name} does not declare that it is sound under pacing={pacing}, where replies are "
            f"late and of several versions of the model: {SYNCHRONOUS}, or another strategy, such as fedavg."
        )
    if reason := strategy.needs_versions(strategy_settings(config)):
        raise UserError(f"{reason}, which replies of several versions would blur: {SYNCHRONOUS}.")


def _check_companions(config: Config) -> None:
    """Settings of other groups that read single replies of one version, or change its base."""
    pacing, adapter = config.pacing, config.adapter
    moves = adapter.name != "none" and registry.find("adapter_rules", adapter.rule).moves_base
    uses_late = pacing.name == "buffered" or pacing.late == "use"
    others = {
        f"aggregation={config.aggregation.name} compares updates": config.aggregation.name != "mean"
        and uses_late,
        f"adapter.rule={adapter.rule} changes the frozen weights": moves,
        "adapter.ranks gives clients adapters": bool(adapter.ranks),
        f"privacy.audited={config.privacy.audited} watches rounds": config.privacy.audited is not None,
    }
    for words in (words for words, is_set in others.items() if is_set):
        raise UserError(
            f"{words} of one version of the model, and pacing={pacing.name} has several at once: leave that "
            f"out, or {SYNCHRONOUS}."
        )


def _check_partial(config: Config) -> None:
    """Clients may take fewer steps only if the server corrects for it."""
    name = str(config.strategy["name"])
    if config.pacing.seconds is None:
        raise UserError("pacing.partial=true fits steps into the time of a round: set pacing.seconds.")
    if not registry.find("strategies", name).divides_by_steps:
        raise UserError(
            f"pacing.partial=true gives clients unlike numbers of steps, and strategy={name} does not divide "
            "updates by them: use strategy=fednova, or leave pacing.partial out."
        )


def _check_buffer(config: Config) -> None:
    pacing = config.pacing
    if pacing.concurrency is not None and config.participation < 1:
        raise UserError(
            f"pacing.concurrency={pacing.concurrency} already says how many clients are at work: leave "
            f"participation={config.participation:g} out."
        )
    if pacing.concurrency is not None and (pacing.buffer or 1) > pacing.concurrency:
        raise UserError(
            f"pacing.buffer={pacing.buffer} replies cannot be in while pacing.concurrency="
            f"{pacing.concurrency} clients are at work: lower the first, or raise the second."
        )
