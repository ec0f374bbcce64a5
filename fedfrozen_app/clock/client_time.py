"""The duration of a client's request, in virtual seconds."""

from dataclasses import dataclass

from fedfrozen_app.clock.profiles import Profile

BITS, MEGA, GIGA = 8, 1e6, 1e9


@dataclass(frozen=True)
class Work:
    """The work of one request."""

    bytes_down: int
    operations: float  # floating-point operations of all its steps
    bytes_up: int


@dataclass(frozen=True)
class ClientTime:
    """Seconds of each consecutive part of a request."""

    wait: float  # until the client is available
    download: float
    train: float
    upload: float

    @property
    def total(self) -> float:
        return self.wait + self.download + self.train + self.upload


def time_of(profile: Profile, work: Work, asked_at: float, period: float) -> ClientTime:
    return ClientTime(
        profile.next_start(asked_at, period) - asked_at,
        work.bytes_down * BITS / (profile.downlink * MEGA),
        work.operations / (profile.speed * GIGA),
        work.bytes_up * BITS / (profile.uplink * MEGA),
    )
