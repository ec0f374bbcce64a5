"""A learned vocabulary as plain numbers, which a proposal can contain and a site can check.

Token numbers: four special tokens, the 256 bytes, then a token for each merge, which joins two tokens before
it. So a list of numbers says everything, and no text is parsed at a site.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")
FIRST_MERGE = len(SPECIAL) + 256
MOST_PIECES = 32_768


@dataclass(frozen=True)
class Vocabulary:
    merges: tuple[int, ...]  # pairs of token numbers, one after another
    lowercase: bool  # whether texts are put into lower case before

    @property
    def size(self) -> int:
        return FIRST_MERGE + len(self.merges) // 2

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return list(zip(self.merges[::2], self.merges[1::2], strict=True))

    @cached_property
    def digest(self) -> str:
        text = json.dumps([self.lowercase, list(self.merges)], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def spec(self) -> dict[str, Any]:
        """The entry in a data spec."""
        return {"merges": list(self.merges), "lowercase": self.lowercase, "digest": self.digest}


def problem_of_merges(merges: Sequence[int]) -> str | None:
    """Why these numbers are not a vocabulary; None if they are valid."""
    if len(merges) % 2 or len(merges) // 2 > MOST_PIECES - FIRST_MERGE:
        return "merges are no pairs, or too many"
    pairs = list(zip(merges[::2], merges[1::2], strict=True))
    if len(set(pairs)) != len(pairs):
        return "a pair is merged twice"
    for number, pair in enumerate(pairs):
        if not all(len(SPECIAL) <= token < FIRST_MERGE + number for token in pair):
            return f"merge {number} joins a token that is not there yet"
    return None
