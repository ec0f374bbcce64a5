"""Load a frozen dual encoder: random from settings, or from a folder or the hub.

If a folder was created by `fedfrozen align`, its `alignment.json` defines text pooling, and the
preprocessor's file the normalisation of pixels.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    BertConfig,
    ByT5Tokenizer,
    CLIPConfig,
    CLIPModel,
    PreTrainedTokenizerBase,
    VisionTextDualEncoderConfig,
    VisionTextDualEncoderModel,
    ViTConfig,
)
from transformers.utils import cached_file

from fedfrozen_app.adapters.dual import DualEncoder
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.models.silence_transformers import silence_transformers

ALIGNMENT = "alignment.json"
PREPROCESSOR = "preprocessor_config.json"
DUAL = "vision-text-dual-encoder"
CLASSES: dict[str, Any] = {"clip": CLIPModel, DUAL: VisionTextDualEncoderModel}
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json")


def load_dual(
    *,
    source: str,
    path: str | None,
    model_type: str | None,
    config: Mapping[str, Any],
    dtype: str,
    seed: int,
) -> DualEncoder:
    """The backbone, on the CPU. The same settings return the same object: it is frozen and may be shared."""
    if dtype not in DTYPES:
        raise UserError(f"the model's dtype is '{dtype}', but must be one of {', '.join(DTYPES)}")
    return _load(source, path, model_type, json.dumps(config, sort_keys=True), dtype, seed)


@lru_cache(maxsize=2)
def _load(
    source: str, path: str | None, model_type: str | None, config: str, dtype: str, seed: int
) -> DualEncoder:
    settings = json.loads(config)
    if source == "config":
        found = _from_config(model_type, settings, seed)
    elif source in ("checkpoint", "hub"):
        found = _from_folder(str(path), hub=source == "hub")
    else:
        raise UserError(
            f"model.source={source} gives no dual encoder: use model=dual_tiny, or model=checkpoint with the "
            "folder of a CLIP or a VisionTextDualEncoder."
        )
    for parameter in found.parameters():
        parameter.data = parameter.data.to(DTYPES[dtype])
    return found


def random_dual(model_type: str | None, settings: Mapping[str, Any]) -> Any:
    """A dual encoder with random weights, from torch's current seed."""
    try:
        if model_type == "clip":
            return CLIPModel(CLIPConfig(**settings))
        if model_type == DUAL:
            vision, text = (dict(settings[tower]) for tower in ("vision", "text"))
            joint = VisionTextDualEncoderConfig.from_vision_text_configs(
                ViTConfig(**vision), BertConfig(**text), projection_dim=settings["projection_dim"]
            )
            return VisionTextDualEncoderModel(joint)
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"cannot build '{model_type}' from its configuration: {error}") from error
    raise UserError(f"model.model_type={model_type} is no dual encoder: choose {' or '.join(CLASSES)}.")


def _from_config(model_type: str | None, settings: Mapping[str, Any], seed: int) -> DualEncoder:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return DualEncoder(random_dual(model_type, settings), ByT5Tokenizer())


def _from_folder(path: str, *, hub: bool) -> DualEncoder:
    options: dict[str, Any] = {"local_files_only": not hub, "trust_remote_code": False}
    try:
        kind = AutoConfig.from_pretrained(path, **options).model_type
        if kind not in CLASSES:
            raise UserError(
                f"{path} holds a '{kind}', which is no dual encoder: give a CLIP or a VisionTextDualEncoder, "
                "or make one with `fedfrozen align`."
            )
        with silence_transformers(progress=hub):
            model = CLASSES[kind].from_pretrained(path, use_safetensors=True, **options)
        tokenizer = tokenizer_of(path, hub=hub)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot load the dual encoder '{path}': {' '.join(str(error).split())}") from error
    about, pixels = (_sidecar(path, name, hub=hub) for name in (ALIGNMENT, PREPROCESSOR))
    return DualEncoder(
        model,
        tokenizer,
        pooling=about.get("text_pooling"),
        mean=tuple(pixels["image_mean"]) if "image_mean" in pixels else None,
        std=tuple(pixels["image_std"]) if "image_std" in pixels else None,
    )


def tokenizer_of(path: str, *, hub: bool = False) -> PreTrainedTokenizerBase:
    """The folder's tokenizer; bytes (ByT5's numbering) if it has none."""
    if not hub and not any((Path(path) / name).exists() for name in TOKENIZER_FILES):
        return ByT5Tokenizer()
    return AutoTokenizer.from_pretrained(path, local_files_only=not hub, trust_remote_code=False)


def _sidecar(path: str, name: str, *, hub: bool) -> dict[str, Any]:
    """A JSON file next to the weights; empty if there is none."""
    file = cached_file(path, name, local_files_only=not hub, _raise_exceptions_for_missing_entries=False)
    return json.loads(Path(file).read_text()) if file else {}
