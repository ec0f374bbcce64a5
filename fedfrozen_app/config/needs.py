"""Conditions for a setting to have an effect, declared at its field: no key is ignored silently."""

from dataclasses import dataclass
from typing import Any

# Kinds of data, for keys of `dataset` that only some readers use. Parquet and the hub may have either.
MIXED_KINDS = ("parquet", "hub")
PICTURE_KINDS = ("digits", "digit_words", "images", "dicom", "nifti", *MIXED_KINDS)
ENTITY_KINDS = ("conll", "brat", "i2b2")
TEXT_KINDS = ("text", *ENTITY_KINDS, "mimic", "synthetic", "omop", "instructions", *MIXED_KINDS)
MADE_KINDS = ("digits", "digit_words", "synthetic")  # nothing is read from a path
LABEL_KINDS = ("text", "table", "instructions", *MIXED_KINDS)
FOLDER_KINDS = ("images", "dicom", "nifti", "arrays")
SPLIT_KINDS = ("text", "table", *FOLDER_KINDS, "instructions", *ENTITY_KINDS, *MIXED_KINDS)
TRANSFORMERS = ("config", "checkpoint", "hub")  # values of model.source


@dataclass(frozen=True)
class Needs:
    """A setting has an effect with these values of another key alone; or, `excluded`, with all but these.

    `key` is a dotted key, or a group, which stands for what its file chose; `a|b`: one of the two will do.
    """

    key: str
    values: tuple[str, ...]
    excluded: bool = False
    add: str = ""  # suggestion in place of the first of `values`

    def met(self, value: str) -> bool:
        return (value in self.values) != self.excluded

    @property
    def suggestion(self) -> str:
        first, rest = self.values[:3], self.values[3:]
        words = (*first, "another kind") if rest else first
        listed = " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
        return self.add or f"{self.key.partition('|')[0]}={listed}"


def only_with(key: str, *values: str, add: str = "") -> Needs:
    return Needs(key, values, add=add)


def not_with(key: str, *values: str, add: str) -> Needs:
    return Needs(key, values, excluded=True, add=add)


def written(value: Any) -> str:
    """A value as a configuration writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
