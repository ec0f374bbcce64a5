"""Export a trained model as a folder that plain transformers loads."""

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.models.config_fit import label_names
from fedfrozen_app.models.silence_transformers import silence_transformers
from fedfrozen_app.models.split import join_fused


def _writes_texts(model: PreTrainedModel) -> bool:
    """Whether the model generates text. Compares names: looking up a class in transformers' table imports all
    of its architectures, which takes five seconds."""
    if type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return True
    return MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model.config), None) is type(model)  # registered by others


def export_model(
    model: nn.Module, folder: str | Path, classes: Sequence[str], state: dict[str, Tensor] | None = None
) -> None:
    """Write `model` as a folder that transformers' `Auto...from_pretrained` loads; `state` replaces its own
    if that has more than the architecture's parameters."""
    if not isinstance(model, PreTrainedModel):
        raise UserError(
            f"a {type(model).__name__} is no transformers model and cannot be exported as one: "
            "use the run's model.safetensors"
        )
    if Path(folder).is_file():
        raise UserError(f"cannot export to '{folder}': it is a file, give a folder")
    config = copy.deepcopy(model.config)
    if hasattr(config, "use_cache"):
        config.use_cache = True  # generation needs it
    if not _writes_texts(model):
        if config.num_labels != len(classes):
            raise UserError(
                f"cannot export a model of {config.num_labels} classes with {len(classes)} class names"
            )
        config.update(label_names(classes))
    # Built on the meta device, without memory: it takes the tensors, and `model` does not change.
    with silence_transformers(), torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(join_fused(model.state_dict() if state is None else state), assign=True)
    with silence_transformers():
        plain.save_pretrained(folder)
