"""Select parameters by role and layer, with words in settings such as `strategy.private`.

all                              every parameter
head, value, ...                 every parameter of that role
kernel                           queries and keys, with their biases
attention_norm                   the norms whose output the kernel reads
adapter                          all adapters
stem, top                        parameters before the layers (embeddings), and after them (the head)
layer.0, layer.-1                a whole layer; negative numbers count from the last one
query.0                          that role in one layer
"""

from collections.abc import Callable, Iterable, Mapping

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.exchange.role import KERNEL, KINDS, Role, is_embedding

WORDS: dict[str, Callable[[Role], bool]] = {
    "all": lambda role: True,
    "kernel": lambda role: role.kind in KERNEL,
    "attention_norm": lambda role: role.feeds_attention,
    "adapter": lambda role: role.adapter,
    "stem": is_embedding,
    "top": lambda role: role.layer is None and not is_embedding(role),
    "layer": lambda role: role.layer is not None,
}


def selected(words: Iterable[str], roles: Mapping[str, Role], key: str, *, strict: bool = True) -> list[str]:
    """The parameter names that match any of the words, in the model's order; `key` is the words' setting.

    A word that matches nothing in this model is a `UserError` if `strict`.
    """
    found: set[str] = set()
    for word in words:
        names = _names(str(word), roles, key)
        if strict and not names:
            raise UserError(f"{key} names '{word}', which no parameter of this model is: leave it out.")
        found |= names
    return [name for name in roles if name in found]


def _names(word: str, roles: Mapping[str, Role], key: str) -> set[str]:
    kind, _, number = word.partition(".")
    layers = sorted({role.layer for role in roles.values() if role.layer is not None})
    whole_number = number.removeprefix("-").isdecimal()
    if kind not in (*WORDS, *KINDS) or word == "layer" or (number and not whole_number):
        known = ", ".join((*KINDS, *(word for word in WORDS if word != "layer")))
        raise UserError(
            f"{key} names '{word}', which is neither a role nor a layer: choose of {known}, layer.N, or a "
            "role with its layer, such as query.0."
        )
    matches = WORDS.get(kind, lambda role: role.kind == kind)
    if number:
        if not -len(layers) <= int(number) < len(layers):
            last = len(layers) - 1
            raise UserError(f"{key} names '{word}', and this model's layers go from 0 to {last}.")
        layer = layers[int(number)]
        return {name for name, role in roles.items() if role.layer == layer and matches(role)}
    return {name for name, role in roles.items() if matches(role)}
