"""The part of a proposal that says how texts become tokens."""

from dataclasses import dataclass
from typing import Any

from fedfrozen_app.config import setting
from fedfrozen_app.core.vocabulary import Vocabulary

READING = "text"  # the key of a data specification that says the same
MOST_TOKENS = 65_536  # of a text


@dataclass(frozen=True)
class TextPart:
    """How all sites make tokens of their texts. Left out where a text has 128 tokens at most, and each site
    uses the model's own tokenizer, or bytes."""

    max_tokens: int = setting(128, "", least=2, most=MOST_TOKENS)
    chunks: int = setting(1, "", least=1, most=64)
    lowercase: bool = False
    merges: tuple[int, ...] = ()  # of a learned vocabulary; none: the model's own, or bytes

    @property
    def vocabulary(self) -> Vocabulary | None:
        return Vocabulary(self.merges, self.lowercase) if self.merges else None

    def spec(self) -> dict[str, Any]:
        """As a client wants it."""
        own = {} if self.vocabulary is None else self.vocabulary.spec()
        return {"max_tokens": self.max_tokens, "chunks": self.chunks, **own}
