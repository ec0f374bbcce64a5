"""A train request from a server that is not trusted: parsed once, every key and type checked. The request
that this returns is the one that trains."""

import math
from typing import Any

from fedfrozen_app.core import registry
from fedfrozen_app.exchange.strict import read_json
from fedfrozen_app.exchange.train_request import TrainRequest, train_request_of

MOST, DEPTH, LONGEST = 32_000_000, 6, 300  # names of a large model, once each
LONGEST_PHASE = 10_000  # epochs
MOST_PHASES = 64
MOST_FIGURES = 500
NEEDED = {"round", "trained", "shared", "private", "base", "algorithm", "settings"}
MASKING = {"session", "settings", "figures", "equal", "proposal"}
OPTIONAL = {"phases", "selection", "participations", "judge", "masking", "choosing"}


def read_strict_train_request(text: str) -> TrainRequest:
    """`ValueError` for the site's own log if it is no train request."""
    found = read_json(text, most=MOST, depth=DEPTH, longest=LONGEST)
    codecs = set(registry.names("codecs"))
    if not isinstance(found, dict) or not NEEDED <= set(found) <= NEEDED | OPTIONAL | codecs:
        raise ValueError("it has other keys than a request")
    for key in ("trained", "shared", "private"):
        if not _words(found[key]):
            raise ValueError(f"{key} is no list of names")
    if not isinstance(found["base"], dict) or not _words(list(found["base"].values())):
        raise ValueError("base does not say digests by name")
    if not isinstance(found["algorithm"], str) or not isinstance(found["settings"], dict):
        raise ValueError("algorithm and settings are none")
    for key in ("judge", "choosing"):
        if type(found.get(key, False)) is not bool:
            raise ValueError(f"{key} is neither true nor false")
    if not isinstance(found.get("participations", {}), dict):
        raise ValueError("participations are no numbers by name")
    selection = found.get("selection", {"rule": ""})
    if not isinstance(selection, dict) or not isinstance(selection.get("rule"), str):
        raise ValueError("selection names no rule")
    phases = found.get("phases", [])
    if not isinstance(phases, list) or len(phases) > MOST_PHASES or not all(map(_is_phase, phases)):
        raise ValueError("phases are none")
    if "masking" in found and not _is_masking(found["masking"]):
        raise ValueError("masking is none")
    return train_request_of(found)


def _words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_masking(value: Any) -> bool:
    if not isinstance(value, dict) or set(value) - {"clip"} != MASKING:
        return False
    if "clip" in value and not (type(value["clip"]) is float and 0 < value["clip"] < math.inf):
        return False
    words = _words(value["figures"]) and _words(value["equal"]) and len(value["figures"]) <= MOST_FIGURES
    words = words and isinstance(value["session"], str) and isinstance(value["proposal"], str)
    return words and isinstance(value["settings"], dict)


def _is_phase(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 2 or not _words(value[0]):
        return False
    epochs = value[1]
    return epochs is None or (type(epochs) is int and 0 <= epochs <= LONGEST_PHASE)
