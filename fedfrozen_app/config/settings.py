"""One setting: its default, bounds, choices and what the docs say of it, all at its dataclass field."""

import math
from dataclasses import dataclass, field, fields
from typing import Any

from fedfrozen_app.errors import UserError

KEY = "setting"  # in a field's metadata


@dataclass(frozen=True)
class About:
    """What is known of a setting beside its name, type and default."""

    says: str = ""
    above: float | None = None
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    instead: str = ""  # said of a number out of bounds, where the bounds alone would help too little

    @property
    def bounded(self) -> bool:
        return any(bound is not None for bound in (self.above, self.least, self.most))

    @property
    def bounds(self) -> list[str]:
        """In words: "above 0", "at most 1"."""
        named = (("above", self.above), ("at least", self.least), ("at most", self.most))
        return [f"{words} {bound:g}" for words, bound in named if bound is not None]

    def holds(self, value: float) -> bool:
        """Whether a number keeps the bounds; what is not finite keeps none."""
        return (
            math.isfinite(value)
            and (self.above is None or value > self.above)
            and (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
        )

    def complaint(self, value: Any) -> str:
        """What to say after `key=`; empty where the value is fine."""
        if value is None:
            return ""
        word = str(value).lower() if isinstance(value, bool) else value
        if self.choices and word not in self.choices:
            return f"{word} is unknown: choose one of {', '.join(self.choices)}."
        numeric = isinstance(value, float) or (self.bounded and isinstance(value, int))
        if not numeric or self.holds(value):
            return ""
        if self.instead and math.isfinite(value):
            return f"{value:g} {self.instead}"
        words = self.bounds if self.most is not None else [*self.bounds, "finite"]
        must = " and ".join(words) if self.bounded else "finite"
        return f"{value} is out of range: it must be {must}."


def setting(
    default: Any,
    says: str,
    *,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] = (),
    instead: str = "",
) -> Any:
    """A dataclass field that knows its bounds or choices, and its sentence in docs/configuration.md."""
    about = About(says, above, least, most, choices, instead)
    if isinstance(default, (dict, list)):
        return field(default_factory=default.copy, metadata={KEY: about})
    return field(default=default, metadata={KEY: about})


def about(found: Any) -> About:
    """Of a dataclass field; a field that says nothing has no bounds."""
    return found.metadata.get(KEY, About())


def check_settings(holder: Any, prefix: str = "") -> None:
    """A `UserError` for the first value that its own field refuses."""
    for found in fields(holder):
        if complaint := about(found).complaint(getattr(holder, found.name)):
            raise UserError(f"{prefix}{found.name}={complaint}")
