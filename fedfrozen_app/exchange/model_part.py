"""The part of a proposal that defines the model: numbers, and words from a closed list."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedfrozen_app.config import setting

KEY = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
# Model settings are numbers; these are the only allowed words. Names of hub models are not among them.
MODEL_WORDS = {
    **dict.fromkeys(
        ("hidden_act", "activation", "activation_function"),
        ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu", "swish", "tanh"),
    ),
    "position_embedding_type": ("absolute", "relative_key", "relative_key_query"),
}
NESTED = ("vision", "text", "vision_config", "text_config")  # the two halves of a dual encoder


@dataclass(frozen=True)
class ModelPart:
    source: str = setting("config", "")
    model_type: str | None = setting(None, "")
    dtype: str = setting("float32", "", choices=("float32", "float64", "bfloat16"))
    config: dict[str, Any] = setting({}, "")


def check_model(given: Mapping[str, Any], *, nested: bool = False) -> None:
    for key, value in given.items():
        where = f"model.config.{known_key(key, 'model.config')}"
        if isinstance(value, dict):
            if nested or key not in NESTED:
                raise ValueError(f"{where} is of another type")
            check_model(value, nested=True)
        elif isinstance(value, str):
            if value not in MODEL_WORDS.get(key, ()):
                raise ValueError(f"{where} cannot be proposed: a model's settings are numbers")
        elif isinstance(value, list) and not all(type(item) in (int, float, bool) for item in value):
            raise ValueError(f"{where} is of another type")


def known_key(key: str, where: str) -> str:
    if not KEY.fullmatch(key):
        raise ValueError(f"{where} has a key that is not known")
    return key
