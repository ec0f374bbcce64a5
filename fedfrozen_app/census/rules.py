"""What of a census may leave a site, independent of who asks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Rules:
    """A module of its own: a policy is read by processes that load neither torch nor data."""

    floor: int
    columns: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # that may be looked at, and how
    key: bytes | None = None  # that the sites have agreed on, for rows that several of them hold
