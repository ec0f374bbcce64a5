"""Whether a worker of one run can serve another: same model, same data, same local training."""

from dataclasses import replace

from fedfrozen_app.config import ClientConfig, Config
from fedfrozen_app.models.wrapper import wrapper_of


def same_shape(one: Config, other: Config) -> bool:
    """Whether two runs have the same model, data and local training. Seed, partition and learning rate may
    differ."""
    wrapper = wrapper_of(one)
    if not wrapper.reusable or wrapper_of(other) != wrapper:
        return False
    if one.partition.noise or other.partition.noise:  # the rows themselves differ
        return False
    if one.dataset.normalise == "site" or other.dataset.normalise == "site":  # the rows differ, too
        return False
    parts = ("model", "dataset", "runtime", "device")
    same = all(getattr(one, part) == getattr(other, part) for part in parts)
    return same and _without_rate(one.client) == _without_rate(other.client)


def _without_rate(settings: ClientConfig) -> ClientConfig:
    """Settings without the learning rate, which a step receives every round. If some parameters have their
    own rates, the ratios are built into the step and must agree."""
    if settings.head_lr is not None or settings.fusion_lr is not None:
        return settings
    return replace(settings, lr=1.0, lr_schedule="constant", lr_final=0.0)
