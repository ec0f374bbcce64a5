"""Models of the transformers library: built from settings, a local checkpoint or the hub; and exported.

A model that does not fit the data is refused before any training starts, and one log line says which weights
are fresh.
"""

import contextlib
import copy
import difflib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fedfrozen_app.data.table import InputShape
from fedfrozen_app.errors import UserError
from fedfrozen_app.models.quiet import quiet
from fedfrozen_app.models.role_file import read_roles, use_roles
from fedfrozen_app.models.roles import ARCHITECTURES, roles_of
from fedfrozen_app.models.spec import ModelSpec
from fedfrozen_app.models.split import join_fused, split_fused

log = logging.getLogger(__name__)

_AUTO = {
    "image": (AutoModelForImageClassification, MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING),
    "text": (AutoModelForSequenceClassification, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING),
    "multilabel": (AutoModelForSequenceClassification, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING),
    "tokens": (AutoModelForTokenClassification, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING),
    "language": (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING),
}
# Roles are tabled for them, but they are not transformers' own.
_NO_CLASSIFIER = ("linear", "simple_cnn", "lenet", "moderate_cnn")
# What transformers and torch raise for a configuration they cannot build or run.
_BAD_CONFIG = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    RuntimeError,
    ArithmeticError,
    ImportError,
    StrictDataclassError,
)
# Accepted by every configuration without being one of its fields.
_EXTRA_KEYS = ("num_labels", "attn_implementation")
# What a configuration class does not declare, and its model reads all the same.
_UNDECLARED = {"deberta-v2": ("position_buckets", "share_att_key", "norm_rel_ebd", "attention_head_size")}


def from_config(spec: ModelSpec) -> PreTrainedModel:
    """The architecture `model_type`, with random weights."""
    model_type, given, shape = spec.model_type, spec.config, spec.shape
    kind = type(AutoConfig.for_model(_known_type(model_type, spec)))
    auto = _auto_class(kind, spec)
    _check_keys(kind, given)
    with quiet(), as_user_error(f"cannot build '{model_type}' from its configuration"):
        # An empty list, because transformers 5 fails on None where a type has several classes.
        config = kind(**{"architectures": [], **_filled(kind, given, shape)})
    _check_fit(config, shape)
    with quiet(), as_user_error(f"cannot build '{model_type}' from its configuration"):
        model = auto.from_config(config)
    return _ready(model, spec)


def from_checkpoint(spec: ModelSpec) -> PreTrainedModel:
    """A local folder that transformers wrote."""
    return _pretrained(_checkpoint_folder(spec.path), spec, hub=False)


def from_hub(spec: ModelSpec) -> PreTrainedModel:
    """The model of that name on the Hugging Face hub."""
    if not spec.path:
        raise UserError("the model comes from the hub but has no name: give its hub name")
    return _pretrained(spec.path, spec, hub=True)


def _pretrained(path: str, spec: ModelSpec, *, hub: bool) -> PreTrainedModel:
    given, shape = spec.config, spec.shape
    options: dict[str, Any] = {"local_files_only": not hub, "trust_remote_code": False}
    with quiet(progress=hub), _as_load_error(path, hub):
        config = AutoConfig.from_pretrained(path, **options)
    _known_type(config.model_type, spec)
    auto = _auto_class(type(config), spec)
    _check_keys(type(config), given)
    attention = {k: v for k, v in given.items() if k == "attn_implementation"}
    if shape.task != "language":
        config.update(_labels(shape.classes))
    config.update({k: v for k, v in given.items() if k not in attention})
    if config.architectures is None:
        config.architectures = []
    if shape.task != "image":
        padded = config.pad_token_id is not None and config.pad_token_id >= 0
        # What a language model is padded with is masked out, and it may be any token.
        if shape.task == "language" or not padded:
            config.pad_token_id = shape.pad_token_id
    _check_fit(config, shape)
    if not spec.weights:
        with quiet(), as_user_error(f"cannot build '{path}' from its configuration"):
            model = auto.from_config(config)
        return _ready(model, spec)
    with quiet(progress=hub), _as_load_error(path, hub):
        model, info = auto.from_pretrained(
            path,
            config=config,
            dtype="auto",  # as stored: the cast to the asked type comes last and loses nothing here
            ignore_mismatched_sizes=True,
            use_safetensors=True,
            output_loading_info=True,
            **attention,
            **options,
        )
    _ready(model, spec)
    _report_fresh(model, path, [*info["missing_keys"], *(m[0] for m in info["mismatched_keys"])])
    return model


def _ready(model: PreTrainedModel, spec: ModelSpec) -> PreTrainedModel:
    """As training reads it."""
    split_fused(model)
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False  # keys and values of before serve those who write on, not training
    if spec.roles is not None:
        use_roles(model, read_roles(spec.roles))
    if spec.checkpointing:
        if not model.supports_gradient_checkpointing:
            raise UserError(
                f"'{model.config.model_type}' knows no gradient checkpointing: set "
                "model.gradient_checkpointing=false"
            )
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _checkpoint_folder(path: str | None) -> str:
    if not path:
        raise UserError("the model comes from a checkpoint but has no path: give its folder")
    if not Path(path).is_dir():
        raise UserError(f"the checkpoint folder '{path}' does not exist: give a folder that does")
    if not (Path(path) / "config.json").is_file():
        raise UserError(
            f"the folder '{path}' has no config.json: give a folder that transformers' save_pretrained wrote"
        )
    return path


def _known_type(model_type: str | None, spec: ModelSpec) -> str:
    if model_type is not None and spec.roles is not None and model_type in CONFIG_MAPPING:
        return model_type  # whose roles a file tells
    known = [name for name in ARCHITECTURES if name not in _NO_CLASSIFIER]
    if model_type is None or model_type not in known:
        raise UserError(
            f"'{model_type}' is no architecture whose roles are known: choose one of {', '.join(known)}, or "
            "write its table (model.roles=FILE)"
        )
    return model_type


def _check_keys(kind: type[PretrainedConfig], given: Mapping[str, Any]) -> None:
    known = {*kind().to_dict(), *kind.attribute_map, *_EXTRA_KEYS, *_UNDECLARED.get(kind.model_type, ())}
    if "rope_parameters" in known:
        known |= {"rope_theta", "rope_scaling"}
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean '{close[0]}'?" if close else "remove it or correct its name"
            raise UserError(f"'{key}' is no setting of the architecture '{kind.model_type}': {hint}")


def _filled(kind: type[PretrainedConfig], given: Mapping[str, Any], shape: InputShape) -> dict[str, Any]:
    """The given settings, and from the data those that they leave open."""
    if shape.task == "image":
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
    if shape.task == "image" and "vision_config" in kind.sub_configs:  # one of two towers reads the pictures
        named["vision_config"] = {**fill, **named.get("vision_config", {})}
        fill = {}
    if shape.task != "language" and not {"id2label", "num_labels"} & set(given):
        fill |= _labels(shape.classes)
    return {**{aliases.get(key, key): value for key, value in fill.items()}, **named}


def _labels(classes: Iterable[str]) -> dict[str, Any]:
    names = dict(enumerate(classes))
    return {"id2label": names, "label2id": {name: index for index, name in names.items()}}


def _position_offset(model_type: str, pad_token_id: int) -> int:
    # RoBERTa counts positions from the padding token's number on.
    return pad_token_id + 1 if model_type == "roberta" else 0


def _auto_class(kind: type[PretrainedConfig], spec: ModelSpec) -> Any:
    shape = spec.shape
    auto, mapping = _AUTO[shape.task]
    table = ARCHITECTURES.get(kind.model_type) if spec.roles is None else read_roles(spec.roles)
    if shape.task == "language" and (table is None or not table.causal):
        causal = ", ".join(name for name, known in ARCHITECTURES.items() if known.causal)
        raise UserError(
            f"'{kind.model_type}' sees a text's next tokens, and cannot learn to foretell them: choose a "
            f"language model ({causal}), or say causal: true in its table of roles if it is one"
        )
    if kind not in mapping:
        raise UserError(
            f"'{kind.model_type}' does not read {shape.task} data: choose another model or dataset"
        )
    return auto


def _check_fit(config: PretrainedConfig, shape: InputShape) -> None:
    """Refuse what the libraries would only stumble over in training, or not at all."""
    if shape.task != "language" and config.num_labels != len(shape.classes):
        raise UserError(
            f"the model is set to {config.num_labels} classes but the data have "
            f"{len(shape.classes)}: remove num_labels and id2label from the model's settings"
        )
    if shape.task == "image":
        config = getattr(config, "vision_config", config)
        if config.model_type == "siglip_vision_model":
            config.vision_use_head = False  # transformers' classifier would build it, and not read it
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


def _report_fresh(model: PreTrainedModel, path: str, fresh: Iterable[str]) -> None:
    """Say which weights the checkpoint did not bring; only a head's may be missing."""
    names = sorted(fresh)
    roles = roles_of(model)
    lacking = [name for name in names if name not in roles or roles[name].kind != "head"]
    if lacking:
        raise UserError(
            f"the checkpoint '{path}' lacks {len(lacking)} weights of the model or has them in "
            f"another shape ({', '.join(lacking[:3])}): check its files and the model's settings"
        )
    if names:
        log.info("%s: fresh weights for %s", path, ", ".join(names))


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if isinstance(error, KeyError) else text


@contextlib.contextmanager
def as_user_error(what: str) -> Iterator[None]:
    try:
        yield
    except _BAD_CONFIG as error:
        raise UserError(f"{what}: {_one_line(error)}") from error


@contextlib.contextmanager
def _as_load_error(path: str, hub: bool) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if hub:
            raise UserError(
                f"the hub could not be reached or has no model '{path}' with safetensors weights: "
                "check the name and the connection, or download it elsewhere and give its local "
                f"folder as a checkpoint ({_one_line(error)})"
            ) from error
        raise UserError(f"cannot read the checkpoint '{path}': {_one_line(error)}") from error
    except (*_BAD_CONFIG, SafetensorError) as error:
        raise UserError(f"cannot load the model '{path}': {_one_line(error)}") from error


def _writes_texts(model: PreTrainedModel) -> bool:
    """By name: asked for a class, transformers' table imports all of its architectures, for five seconds."""
    if type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return True
    return MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model.config), None) is type(model)  # what others registered


def export_model(
    model: nn.Module, folder: str | Path, classes: Sequence[str], state: dict[str, Tensor] | None = None
) -> None:
    """Write `model` as a folder that transformers' `Auto...from_pretrained` loads; `state` in place of its
    own, where that has more than the architecture."""
    if not isinstance(model, PreTrainedModel):
        raise UserError(
            f"a {type(model).__name__} is no transformers model and cannot be exported as one: "
            "use the run's model.safetensors"
        )
    if Path(folder).is_file():
        raise UserError(f"cannot export to '{folder}': it is a file, give a folder")
    config = copy.deepcopy(model.config)
    if hasattr(config, "use_cache"):
        config.use_cache = True  # whoever writes texts with it wants that
    if not _writes_texts(model):
        if config.num_labels != len(classes):
            raise UserError(
                f"cannot export a model of {config.num_labels} classes with {len(classes)} class names"
            )
        config.update(_labels(classes))
    # A skeleton without memory of its own takes the tensors, so that `model` stays as it is.
    with quiet(), torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(join_fused(model.state_dict() if state is None else state), assign=True)
    with quiet():
        plain.save_pretrained(folder)
