"""Build the classifier that a configuration names, from any source.

New weights are drawn from the given seed without changing the global generator, a model that cannot read the
data is rejected before training starts, and the parameters are cast to the requested type.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedfrozen_app.core import registry
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.table import InputShape
from fedfrozen_app.models.silence_transformers import silence_transformers
from fedfrozen_app.models.spec import ModelSpec, Source
from fedfrozen_app.models.transformer import as_user_error

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def build_model(
    *,
    source: str,
    path: str | None,
    model_type: str | None,
    config: Mapping[str, Any],
    shape: InputShape,
    dtype: str,
    seed: int,
    roles: str | None = None,
    checkpointing: bool = False,
) -> nn.Module:
    """A classifier for `shape`, in eval mode, on the CPU; the same seed gives the same bits.

    `source` is a name in the registry's group `models`: "config" builds `model_type` with random weights,
    "checkpoint" reads the local folder `path`, "hub" downloads the model named `path`, and so on. `config`
    overrides the architecture's own settings.
    """
    spec = ModelSpec(source, shape, path, model_type, config, dtype, seed, roles, checkpointing)
    _check_dtype(dtype)
    build: Source = registry.find("models", source)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build(spec)
        model.eval()
        _try_forward(model, shape)
    _cast(model, dtype)
    return model


def outline_model(
    *,
    source: str,
    path: str | None,
    model_type: str | None,
    config: Mapping[str, Any],
    shape: InputShape,
    dtype: str,
    roles: str | None = None,
    checkpointing: bool = False,
) -> nn.Module:
    """The model that `build_model` would return, without weights: on the meta device it takes no memory."""
    spec = ModelSpec(source, shape, path, model_type, config, dtype, 0, roles, checkpointing, weights=False)
    _check_dtype(dtype)
    build: Source = registry.find("models", source)
    with torch.device("meta"):
        model = build(spec)
    _cast(model, dtype)
    return model


def _check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise UserError(f"the model's dtype is '{dtype}', but must be one of {', '.join(DTYPES)}")


def _cast(model: nn.Module, dtype: str) -> None:
    # Only parameters: buffers such as rotary frequencies keep their precision.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPES[dtype])


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """The named parameters, detached and not copied; tied ones only once, under their first name."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _try_forward(model: Any, shape: InputShape) -> None:
    """Run one example through the model, so that mismatches show now and not in training."""
    if shape.is_table:
        inputs = {
            "numbers": torch.zeros(1, shape.numbers),
            "categories": torch.zeros(1, len(shape.levels), dtype=torch.int64),
        }
    elif shape.is_pictures:
        size = shape.image_size
        inputs = {"pixel_values": torch.zeros(1, shape.channels, size, size)}
    else:
        token = 1 if shape.pad_token_id == 0 else 0
        inputs = {"input_ids": torch.full((1, shape.max_tokens), token)}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    dtype = next(model.parameters()).dtype
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    name = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    with silence_transformers(), torch.no_grad(), as_user_error(f"'{name}' cannot read the data"):
        scores = getattr(model(**inputs), "logits", None)
    if shape.task == "language":
        if scores is None or scores.shape[-1] < shape.vocab_size:
            raise UserError(f"'{name}' is no language model: its answer needs `logits`, one for each token")
        _check_causal(model, inputs, name)
    elif shape.over_pixels:
        side = shape.image_size
        if scores is None or scores.shape[1:] != (shape.outputs, side, side):
            raise UserError(
                f"'{name}' gives no mask: choose model=unet or model=vit_segmenter for "
                "dataset.task=segmentation"
            )
    elif scores is None or scores.shape[-1] != shape.outputs:
        wanted = f"one for each of the {len(shape.classes)} classes" if shape.classes else str(shape.outputs)
        raise UserError(f"'{name}' is no classifier of these data: its answer needs `logits`, {wanted}")


def _check_causal(model: Any, inputs: dict[str, Tensor], name: str) -> None:
    """A role file may declare any model causal. Check it: logits before the last token must not change with
    that token, or evaluation would reveal the target."""
    ids = inputs["input_ids"][:, :8]
    other = ids.clone()
    other[:, -1] += 1
    with silence_transformers(), torch.no_grad():
        one, two = (
            model(input_ids=given, attention_mask=torch.ones_like(given)).logits[:, :-1]
            for given in (ids, other)
        )
    if float((one - two).abs().max()) > 1e-6 * float(one.abs().max()):  # rounding is equal in both
        raise UserError(
            f"'{name}' sees a text's next tokens, and cannot learn to predict them: choose a language model"
        )
