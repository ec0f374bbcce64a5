"""The rules that a typed configuration must keep, wherever its values come from.

Both readers end here: `read` (values from a person) and a site that accepts a proposal (`read_strict`).
"""

from fedfrozen_app.config.adapter_checks import check_adapter
from fedfrozen_app.config.client_checks import check_algorithm
from fedfrozen_app.config.codec_checks import check_codec
from fedfrozen_app.config.named_settings import server_optimizer_settings, strategy_settings
from fedfrozen_app.config.pacing_checks import check_pacing
from fedfrozen_app.config.privacy_checks import check_private
from fedfrozen_app.config.runtime_checks import check_clock, check_device, check_files, check_runner
from fedfrozen_app.config.schema import Config, sections
from fedfrozen_app.config.secure_checks import check_batches, check_masked
from fedfrozen_app.config.settings import check_settings
from fedfrozen_app.core import registry
from fedfrozen_app.core.errors import UserError


def check_config(config: Config, *, here: bool = True) -> None:
    """Raise a `UserError` for values and combinations that cannot work; with `here`, not on this machine."""
    check_settings(config)
    for name in sections():
        check_settings(getattr(config, name), f"{name}.")
    if here:
        check_files(config)  # before a strategy is imported, which takes seconds
    check_runner(config)
    check_clock(config)
    if config.privacy.name != "none":
        check_private(config)
    elif config.privacy.audited is not None:
        raise UserError(
            f"privacy.audited={config.privacy.audited} needs a claim to audit: add privacy=dp_sgd."
        )
    check_batches(config)
    if config.secure_aggregation.name == "on":
        check_masked(config)
    if config.adapter.name != "none":
        check_adapter(config)
    registry.find("strategies", str(config.strategy["name"])).check(strategy_settings(config), config)
    check_codec(config)
    check_algorithm(config)
    check_pacing(config)
    server_optimizer_settings(config)
    if here:
        check_device(config)
