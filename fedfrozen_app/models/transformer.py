"""Models of the transformers library: built from settings, a local checkpoint or the hub.

One log line lists newly initialised weights.
"""

import contextlib
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
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

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.models.architectures import ARCHITECTURES
from fedfrozen_app.models.config_fit import check_fit, check_keys, filled_config, label_names, problem_type
from fedfrozen_app.models.role_file import read_roles, use_roles
from fedfrozen_app.models.roles import roles_of
from fedfrozen_app.models.silence_transformers import silence_transformers
from fedfrozen_app.models.spec import ModelSpec
from fedfrozen_app.models.split import split_fused

log = logging.getLogger(__name__)

_AUTO = {
    "image": (AutoModelForImageClassification, MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING),
    "text": (AutoModelForSequenceClassification, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING),
    "multilabel": (AutoModelForSequenceClassification, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING),
    "tokens": (AutoModelForTokenClassification, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING),
    "language": (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING),
}
# Types with a role table that are not part of transformers.
_NO_CLASSIFIER = (
    "linear",
    "simple_cnn",
    "lenet",
    "moderate_cnn",
    "mlp",
    "ft_transformer",
    "unet",
    "vit_segmenter",
)
# Exceptions of transformers and torch for a configuration that they cannot build or run.
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


def from_config(spec: ModelSpec) -> PreTrainedModel:
    """The architecture `model_type`, with random weights."""
    model_type, given, shape = spec.model_type, spec.config, spec.shape
    kind = type(AutoConfig.for_model(_known_type(model_type, spec)))
    auto = _auto_class(kind, spec)
    check_keys(kind, given)
    with silence_transformers(), as_user_error(f"cannot build '{model_type}' from its configuration"):
        # An empty list, because transformers 5 fails on None where a type has several classes.
        config = kind(**{"architectures": [], **filled_config(kind, given, shape)})
    check_fit(config, shape)
    with silence_transformers(), as_user_error(f"cannot build '{model_type}' from its configuration"):
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
    with silence_transformers(progress=hub), _as_load_error(path, hub):
        config = AutoConfig.from_pretrained(path, **options)
    _known_type(config.model_type, spec)
    auto = _auto_class(type(config), spec)
    check_keys(type(config), given)
    attention = {k: v for k, v in given.items() if k == "attn_implementation"}
    if shape.task != "language":
        config.update(label_names(shape.classes) | problem_type(shape.task))
    config.update({k: v for k, v in given.items() if k not in attention})
    if config.architectures is None:
        config.architectures = []
    if not shape.is_pictures:
        padded = config.pad_token_id is not None and config.pad_token_id >= 0
        # Padding of a language model is masked out, so any token will do.
        if shape.task == "language" or not padded:
            config.pad_token_id = shape.pad_token_id
    check_fit(config, shape)
    if not spec.weights:
        with silence_transformers(), as_user_error(f"cannot build '{path}' from its configuration"):
            model = auto.from_config(config)
        return _ready(model, spec)
    with silence_transformers(progress=hub), _as_load_error(path, hub):
        model, info = auto.from_pretrained(
            path,
            config=config,
            dtype="auto",  # as stored: cast to the requested type later
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
    """Prepare the model for training."""
    split_fused(model)
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False  # a key-value cache is for generation, not training
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
        return model_type  # its roles are in a file
    known = [name for name in ARCHITECTURES if name not in _NO_CLASSIFIER]
    if model_type is None or model_type not in known:
        raise UserError(
            f"'{model_type}' is no architecture whose roles are known: choose one of {', '.join(known)}, or "
            "write its table (model.roles=FILE)"
        )
    return model_type


def _auto_class(kind: type[PretrainedConfig], spec: ModelSpec) -> Any:
    shape = spec.shape
    if shape.over_pixels:
        raise UserError(
            f"'{kind.model_type}' gives one answer for a picture, and no mask: choose model=unet or "
            "model=vit_segmenter"
        )
    if shape.is_table or shape.task not in _AUTO:
        raise UserError(
            f"'{kind.model_type}' does not read tables: choose model=ft_transformer, model=mlp or "
            "model=linear"
        )
    auto, mapping = _AUTO[shape.task]
    table = ARCHITECTURES.get(kind.model_type) if spec.roles is None else read_roles(spec.roles)
    if shape.task == "language" and (table is None or not table.causal):
        causal = ", ".join(name for name, known in ARCHITECTURES.items() if known.causal)
        raise UserError(
            f"'{kind.model_type}' sees a text's next tokens, and cannot learn to predict them: choose a "
            f"language model ({causal}), or say causal: true in its table of roles if it is one"
        )
    if kind not in mapping:
        raise UserError(
            f"'{kind.model_type}' does not read {shape.task} data: choose another model or dataset"
        )
    return auto


def _report_fresh(model: PreTrainedModel, path: str, fresh: Iterable[str]) -> None:
    """Log the weights that the checkpoint lacks; only a head's may be missing."""
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
