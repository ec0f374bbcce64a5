"""Named entities: a BIO tag for each word, at its first token."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional

from fedfrozen_app.tasks.target import Target

# Label of tokens that are not scored: special tokens, padding, and a word's pieces after its first.
IGNORED, CONTINUED = -100, -101
OUTSIDE, NO_ENTITY = "O", "none"


class Entities(Target):
    """Entity tagging, measured by F1 of entities with correct type and boundaries (seqeval, strict)."""

    headline, title = "f1", "F1"
    metric_names = ("f1",)
    over_tokens = True

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        scored = labels >= 0  # (examples, tokens)
        target = labels.clamp(min=IGNORED)
        every = functional.cross_entropy(logits.transpose(1, 2), target, reduction="none")
        return every.sum(dim=1) / scored.sum(dim=1).clamp(min=1)

    def measure(self, predicted: Tensor, labels: Tensor, classes: tuple[str, ...]) -> dict[str, float]:
        from seqeval.metrics import f1_score
        from seqeval.scheme import IOB2

        truth, guess = tag_sequences(predicted, labels.to(predicted.device), classes)
        return {"f1": float(f1_score(truth, guess, mode="strict", scheme=IOB2, zero_division=0))}

    def names_in(self, label: Any) -> list[str]:
        """The types of the entities."""
        return [tag[2:] for tag in label if tag != OUTSIDE]

    def restricted(self, label: Any, kept: Sequence[str]) -> Any:
        """The label with these types alone. A row without entities is kept."""
        return [tag if tag[2:] in kept else OUTSIDE for tag in label]

    def class_names(self, named: Iterable[str], *, in_order: bool) -> tuple[str, ...]:
        """O, then B and I of every type: O is number 0."""
        types = list(named) if in_order else sorted(set(named))
        return (OUTSIDE, *(f"{place}-{kind}" for kind in types for place in "BI"))

    def numbered(self, labels: Sequence[Any], places: Mapping[str, int]) -> Any:
        """A list of numbers for each row, to be made a tensor after tokenisation."""
        return [[places[tag] for tag in row] for row in labels]

    def strata(self, labels: Sequence[Any]) -> list[str]:
        """The most frequent entity type of each row."""
        return [most_frequent(mix) for mix in self.mixes(labels)]

    def mixes(self, labels: Sequence[Any]) -> list[Counter[str]]:
        return [Counter(tag[2:] for tag in row if tag.startswith("B-")) for row in labels]

    def stratum_names(self, classes: tuple[str, ...], found: Iterable[str]) -> tuple[str, ...]:
        return (*dict.fromkeys(name[2:] for name in classes if name != OUTSIDE), NO_ENTITY)

    def trivial(self, labels: Tensor) -> dict[str, float]:
        return {"majority_f1": 0.0} if len(labels) else {}


def most_frequent(mix: Counter[str]) -> str:
    """The most frequent name; ties by name."""
    return min(mix, key=lambda name: (-mix[name], name), default=NO_ENTITY)


def tag_sequences(
    predicted: Tensor, labels: Tensor, classes: tuple[str, ...]
) -> tuple[list[list[str]], list[list[str]]]:
    """(truth, prediction) as tag names, a list per row with one tag per word, at its first token."""
    scored = (labels >= 0).cpu()
    truth, guess = [], []
    for mask, real, found in zip(scored, labels.cpu(), predicted.cpu(), strict=True):
        truth.append([classes[number] for number in real[mask].tolist()])
        guess.append([classes[number] for number in found[mask].tolist()])
    return truth, guess
