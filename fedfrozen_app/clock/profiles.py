"""The machine and links of a simulated client: drawn for its name, or read from a file."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import exp, isfinite
from pathlib import Path

from fedfrozen_app.config import ClockConfig
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import quoted
from fedfrozen_app.core.seeds import numpy_generator


@dataclass(frozen=True)
class Profile:
    """A client's machine and links."""

    speed: float  # billions of operations per second
    uplink: float  # megabits per second
    downlink: float
    availability: float = 1.0  # share of each period in which it is available
    opens: float = 0.0  # seconds into the period

    def next_start(self, now: float, period: float) -> float:
        """The earliest start of a request that arrives at `now`."""
        since_opening = (now - self.opens) % period
        if self.availability >= 1 or since_opening < self.availability * period:
            return now
        return now + period - since_opening


def draw_profile(config: ClockConfig, seed: int, client: str) -> Profile:
    """Draw a client's profile. It depends on the seed and the client's name alone, so it is the same for
    every method and number of clients."""
    generator = numpy_generator(seed, "clock", client)
    normals, evens = generator.standard_normal(3), generator.uniform(-1, 1, 3)
    factors = {
        "lognormal": [exp(config.spread * float(one)) for one in normals],
        "uniform": [1 + config.spread * float(one) for one in evens],
        "equal": [1.0] * 3,
    }[config.distribution]
    typical = config.speed, config.uplink, config.downlink
    speed, uplink, downlink = (value * factor for value, factor in zip(typical, factors, strict=True))
    opens = float(generator.uniform(0, config.period))
    return Profile(speed, uplink, downlink, config.availability, opens)


def read_profiles(path: Path) -> dict[str, dict[str, float]]:
    """{client: values}, from a CSV file."""
    known = [field.name for field in fields(Profile)]
    try:
        lines = csv.DictReader(path.read_text("utf-8").splitlines(), strict=True)
        rows = list(lines)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"clock.file={path} cannot be read ({error}): give a CSV file in UTF-8.") from None
    columns = list(lines.fieldnames or [])
    if "client" not in columns or (strange := [one for one in columns if one not in ("client", *known)]):
        found = f"a column {quoted(strange[0], 40)}" if "client" in columns else "no column client"
        raise UserError(f"clock.file={path} has {found}: use client and any of {', '.join(known)}.")
    profiles: dict[str, dict[str, float]] = {}
    for number, row in enumerate(rows, start=2):
        client, place = str(row.pop("client")), f"clock.file={path}, line {number}"
        if None in row or None in row.values() or client in profiles:
            what = (
                f"names client {quoted(client, 40)} again"
                if client in profiles
                else "has not one value per column"
            )
            raise UserError(f"{place} {what}: correct it.")
        profiles[client] = {key: _number(value, key, place) for key, value in row.items() if value}
    return profiles


def _number(text: str, key: str, place: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not (isfinite(value) and (value >= 0 if key == "opens" else value > 0)):
        raise UserError(f"{place}: {key} is {quoted(text, 40)}, and must be a positive number.")
    if key == "availability" and value > 1:
        raise UserError(f"{place}: availability is {value:g}, and is a share of the time: give at most 1.")
    return value


def make_profile(
    config: ClockConfig, seed: int, client: str, known: Mapping[str, Mapping[str, float]]
) -> Profile:
    """A client's drawn values, overridden by those of the file."""
    drawn = draw_profile(config, seed, client)
    return Profile(**{**vars(drawn), **known.get(client, {})})
