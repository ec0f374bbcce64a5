"""One setting: its default, bounds, choices and description, all at its dataclass field."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from fedfrozen_app.config.needs import Needs
from fedfrozen_app.core.errors import UserError

KEY = "setting"  # in a field's metadata
MISSING: Any = "???"  # OmegaConf's mark for a value that must be given; OmegaConf is slow to import


@dataclass(frozen=True)
class About:
    """What a setting declares in addition to its name, type and default."""

    meaning: str = ""  # one sentence for docs/configuration.md
    above: float | None = None
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    instead: str = ""  # the sentence for a number out of bounds, where the bounds alone would help too little
    needs: tuple[Needs, ...] = ()  # without them it has no effect

    @property
    def bounded(self) -> bool:
        return any(bound is not None for bound in (self.above, self.least, self.most))

    @property
    def bounds(self) -> list[str]:
        """For people: "above 0", "at most 1"."""
        named = (("above", self.above), ("at least", self.least), ("at most", self.most))
        return [f"{words} {bound:g}" for words, bound in named if bound is not None]

    def holds(self, value: float) -> bool:
        """Whether a number is finite and within the bounds."""
        return (
            math.isfinite(value)
            and (self.above is None or value > self.above)
            and (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
        )

    def complaint(self, value: Any) -> str:
        """The sentence after `key=`; empty where the value is fine."""
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
    meaning: str,
    *,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] = (),
    instead: str = "",
    needs: Needs | tuple[Needs, ...] = (),
) -> Any:
    """A dataclass field that knows its bounds or choices, what it needs in order to have an effect, and its
    sentence in docs/configuration.md."""
    needs = (needs,) if isinstance(needs, Needs) else needs
    about = About(meaning, above, least, most, choices, instead, needs)
    if isinstance(default, (dict, list)):
        return field(default_factory=default.copy, metadata={KEY: about})
    return field(default=default, metadata={KEY: about})


def about(found: Any) -> About:
    """What a dataclass field declares; without `setting` it has no bounds."""
    return found.metadata.get(KEY, About())


def first_complaint(kind: Any, values: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first field whose value its own bounds or choices refuse, and the sentence about it."""
    for found in fields(kind):
        if found.name in values and (complaint := about(found).complaint(values[found.name])):
            return found.name, complaint
    return None


def check_settings(holder: Any, prefix: str = "") -> None:
    """Raise a `UserError` for the first value that its own field refuses."""
    values = {found.name: getattr(holder, found.name) for found in fields(holder)}
    if (complaint := first_complaint(holder, values)) is not None:
        raise UserError(f"{prefix}{complaint[0]}={complaint[1]}")
