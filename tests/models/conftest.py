"""Tiny random models of every family, as the app builds them."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import AutoConfig, CLIPModel

from fedfrozen_app.data.table import InputShape
from fedfrozen_app.models.build import build_model

WIDTH, LAYERS, MLP = 8, 2, 24
IMAGE = InputShape("image", ("cat", "dog", "emu"), channels=3, image_size=8)
TEXT = InputShape("text", ("bad", "good"), vocab_size=20, max_tokens=6, pad_token_id=0)

_BLOCKS = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "intermediate_size": MLP,
}
_DISTIL = {"dim": WIDTH, "n_layers": LAYERS, "n_heads": 2, "hidden_dim": MLP}
_GPT2 = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 2, "n_inner": MLP}
SETTINGS = {
    "vit": {**_BLOCKS, "patch_size": 4},
    "deit": {**_BLOCKS, "patch_size": 4},
    "dinov2": {k: v for k, v in _BLOCKS.items() if k != "intermediate_size"}
    | {"patch_size": 4, "mlp_ratio": MLP // WIDTH},
    "bert": _BLOCKS,
    "distilbert": _DISTIL,
    "roberta": _BLOCKS,
    "electra": {**_BLOCKS, "embedding_size": 4},
    "gpt2": _GPT2,
    "llama": {**_BLOCKS, "num_key_value_heads": 1},
}


def _build(model_type: str, *, dtype: str = "float32", seed: int = 0, **settings) -> nn.Module:
    if model_type == "clip":
        config = AutoConfig.for_model(
            "clip",
            text_config={**_BLOCKS, "vocab_size": 20, "bos_token_id": 0, "eos_token_id": 1},
            vision_config={**_BLOCKS, "image_size": 8, "patch_size": 4},
            projection_dim=4,
        )
        return CLIPModel(config)
    return build_model(
        source="config",
        path=None,
        model_type=model_type,
        config={**SETTINGS[model_type], **settings},
        shape=shape_of(model_type),
        dtype=dtype,
        seed=seed,
    )


def shape_of(model_type: str) -> InputShape:
    return IMAGE if model_type in ("vit", "deit", "dinov2") else TEXT


def _example(model_type: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if shape_of(model_type) is IMAGE:
        return {"pixel_values": torch.randn(4, 3, 8, 8, generator=generator).to(dtype)}
    ids = torch.randint(1, 20, (4, 6), generator=generator)
    mask = torch.ones_like(ids)
    ids[1, 4:], mask[1, 4:] = TEXT.pad_token_id, 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture(scope="session")
def tiny() -> Callable[..., nn.Module]:
    return _build


@pytest.fixture(scope="session")
def logits() -> Callable[[str, nn.Module], torch.Tensor]:
    """The logits of a model for fixed inputs that fit its family."""

    def run(model_type: str, model: nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return model(**_example(model_type, next(model.parameters()).dtype)).logits

    return run


@pytest.fixture
def image_shape() -> InputShape:
    return IMAGE


@pytest.fixture
def text_shape() -> InputShape:
    return TEXT
