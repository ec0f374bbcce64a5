"""The rules for what may leave a site in a census, independent of the requester."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Rules:
    """In a separate module, because processes without torch or data read policies too."""

    floor: int
    columns: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # that may be counted
    key: bytes | None = None  # shared by the sites, to find rows that several of them hold
