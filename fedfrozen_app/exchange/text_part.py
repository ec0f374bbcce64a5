"""The part of a proposal that defines how texts are tokenised."""

from dataclasses import dataclass
from typing import Any

from fedfrozen_app.config import setting
from fedfrozen_app.core.vocabulary import Vocabulary

READING = "text"  # the corresponding key of a data spec
MOST_TOKENS = 65_536  # of a text


@dataclass(frozen=True)
class TextPart:
    """How all sites tokenise their texts. Omitted if texts have at most 128 tokens, and each site uses the
    model's own tokenizer, or bytes."""

    max_tokens: int = setting(128, "", least=2, most=MOST_TOKENS)
    chunks: int = setting(1, "", least=1, most=64)
    lowercase: bool = False
    merges: tuple[int, ...] = ()  # of a learned vocabulary; empty: the model's own, or bytes

    @property
    def vocabulary(self) -> Vocabulary | None:
        return Vocabulary(self.merges, self.lowercase) if self.merges else None

    def spec(self) -> dict[str, Any]:
        """The text entries in a client's data spec."""
        own = {} if self.vocabulary is None else self.vocabulary.spec()
        return {"max_tokens": self.max_tokens, "chunks": self.chunks, **own}
