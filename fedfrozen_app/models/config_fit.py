"""Check that a transformers configuration fits the data, and fill in settings from the data.

A model that does not fit is rejected here, before training starts.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PretrainedConfig

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.table import InputShape

# Accepted by every configuration without being one of its fields.
_EXTRA_KEYS = ("num_labels", "attn_implementation")
# Settings that a model reads although its configuration class does not declare them.
_UNDECLARED = {"deberta-v2": ("position_buckets", "share_att_key", "norm_rel_ebd", "attention_head_size")}


def check_keys(kind: type[PretrainedConfig], given: Mapping[str, Any]) -> None:
    known = {*kind().to_dict(), *kind.attribute_map, *_EXTRA_KEYS, *_UNDECLARED.get(kind.model_type, ())}
    if "rope_parameters" in known:
        known |= {"rope_theta", "rope_scaling"}
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean '{close[0]}'?" if close else "remove it or correct its name"
            raise UserError(f"'{key}' is no setting of the architecture '{kind.model_type}': {hint}")


def filled_config(
    kind: type[PretrainedConfig], given: Mapping[str, Any], shape: InputShape
) -> dict[str, Any]:
    """The given settings, with missing ones filled in from the data."""
    if shape.is_pictures:
        fill: dict[str, Any] = {"num_channels": shape.channels, "image_size": shape.image_size}
    else:
        pad = given.get("pad_token_id", shape.pad_token_id)
        fill = {
            "vocab_size": shape.vocab_size,
            "pad_token_id": pad,
            "max_position_embeddings": shape.max_tokens + _position_offset(kind.model_type, pad),
        }
        # The architecture's own special tokens may lie outside of a small vocabulary.
        for key in ("bos_token_id", "eos_token_id"):
            default = getattr(kind(), key, None)
            if isinstance(default, int) and default >= given.get("vocab_size", shape.vocab_size):
                fill[key] = None
    aliases = kind.attribute_map
    named = {aliases.get(key, key): value for key, value in given.items()}
    if shape.is_pictures and "vision_config" in kind.sub_configs:  # the vision tower of two reads the images
        named["vision_config"] = {**fill, **named.get("vision_config", {})}
        fill = {}
    if shape.task != "language" and not {"id2label", "num_labels"} & set(given):
        fill |= label_names(shape.classes) | problem_type(shape.task)
    return {**{aliases.get(key, key): value for key, value in fill.items()}, **named}


def label_names(classes: Iterable[str]) -> dict[str, Any]:
    names = dict(enumerate(classes))
    return {"id2label": names, "label2id": {name: index for index, name in names.items()}}


def problem_type(task: str) -> dict[str, Any]:
    """How transformers' pipelines turn scores into predictions: one class, or each class separately."""
    one = "single_label_classification" if task in ("image", "text") else None
    return {"problem_type": "multi_label_classification" if task == "multilabel" else one}


def _position_offset(model_type: str, pad_token_id: int) -> int:
    # RoBERTa counts positions from the padding token's number on.
    return pad_token_id + 1 if model_type == "roberta" else 0


def check_fit(config: PretrainedConfig, shape: InputShape) -> None:
    """Raise a `UserError` for mismatches that the libraries would detect only in training, or not at all."""
    if shape.task != "language" and config.num_labels != len(shape.classes):
        raise UserError(
            f"the model is set to {config.num_labels} classes but the data have "
            f"{len(shape.classes)}: remove num_labels and id2label from the model's settings"
        )
    if shape.is_pictures:
        config = getattr(config, "vision_config", config)
        if config.model_type == "siglip_vision_model":
            config.vision_use_head = False  # transformers' classifier would build it, but not use it
        check_image(config, shape)
    else:
        _check_text(config, shape)
    heads = config.num_attention_heads
    if heads < 1 or (getattr(config, "head_dim", None) is None and config.hidden_size % heads):
        raise UserError(
            f"cannot build '{config.model_type}' from its configuration: the hidden size "
            f"({config.hidden_size}) is not a multiple of the number of attention heads ({heads})"
        )


def check_image(config: PretrainedConfig, shape: InputShape) -> None:
    name, size = config.model_type, shape.image_size
    # DINOv2 resamples its position embeddings to the size of the image; the others cannot.
    if name != "dinov2" and config.image_size != size:
        raise UserError(
            f"the model reads images of {config.image_size} pixels a side but the data have "
            f"{size}: set dataset.image_size={config.image_size}"
        )
    if config.num_channels != shape.channels:
        raise UserError(
            f"the model reads {config.num_channels} channels but the images have {shape.channels}: "
            f"set dataset.channels={config.num_channels}, or choose another model"
        )
    patch = config.patch_size
    if not isinstance(patch, int) or patch < 1 or size % patch:
        raise UserError(
            f"images of {size} pixels a side cannot be cut into patches of {patch} without rest: "
            "change patch_size or dataset.image_size"
        )


def _check_text(config: PretrainedConfig, shape: InputShape) -> None:
    if config.vocab_size < shape.vocab_size:
        raise UserError(
            f"the model knows {config.vocab_size} tokens but the tokenizer has {shape.vocab_size}: "
            "use the tokenizer that belongs to the model"
        )
    if config.pad_token_id != shape.pad_token_id:
        raise UserError(
            f"the model's padding token is {config.pad_token_id} but the data are padded with "
            f"{shape.pad_token_id}: use the tokenizer that belongs to the model"
        )
    if getattr(config, "classifier_pooling", "cls") == "mean" and shape.task in ("text", "multilabel"):
        raise UserError(
            f"'{config.model_type}' would read a text by the mean of its tokens, which is not supported: set "
            "+model.config.classifier_pooling=cls"
        )
    offset = _position_offset(config.model_type, shape.pad_token_id)
    room = config.max_position_embeddings - offset
    if room < shape.max_tokens:
        raise UserError(
            f"the model reads at most {room} tokens but the data have up to {shape.max_tokens}: "
            f"set dataset.max_tokens={room}"
        )
