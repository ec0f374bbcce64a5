"""`clock.*`: the virtual time of a simulation."""

from dataclasses import dataclass
from typing import ClassVar

from fedfrozen_app.config.needs import Needs, not_with, only_with
from fedfrozen_app.config.settings import setting

DISTRIBUTIONS = ("lognormal", "uniform", "equal")


@dataclass
class ClockConfig:
    """What a client's round would take on machines and links of its own."""

    NEEDS: ClassVar[tuple[Needs, ...]] = (only_with("clock", "profiles"),)
    name: str = setting(
        "none",
        "Set by the file. `profiles`: rounds take virtual time, from the operations of their steps and the "
        "bytes of their messages; see [Virtual time](virtual-time.md)",
        choices=("none", "profiles"),
    )
    speed: float = setting(
        50.0, "Billions of floating-point operations that a typical client computes per second", above=0
    )
    uplink: float = setting(10.0, "Megabits per second that a typical client sends", above=0)
    downlink: float = setting(50.0, "Megabits per second that a typical client receives", above=0)
    distribution: str = setting(
        "lognormal",
        "How speeds and links differ between clients. `lognormal`: their logarithms are normal with "
        "deviation `clock.spread`; `uniform`: within `1 ± clock.spread` times the typical value; `equal`: "
        "not at all",
        choices=DISTRIBUTIONS,
    )
    spread: float = setting(
        0.5,
        "How much they differ; with `uniform` below 1",
        least=0,
        needs=not_with("clock.distribution", "equal", add="clock.distribution=lognormal"),
    )
    availability: float = setting(
        1.0,
        "Share of each period in which a client is there. It starts a request only then; the hours of each "
        "client begin at a time of its own",
        above=0,
        most=1,
    )
    period: float = setting(86_400.0, "Seconds from one opening of a client to the next", above=0)
    file: str | None = setting(
        None,
        "CSV with a column `client` and any of `speed`, `uplink`, `downlink`, `availability`, `opens` "
        "(seconds into the period): these clients' own values in place of drawn ones",
    )
