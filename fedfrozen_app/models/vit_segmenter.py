"""A segmenter with a ViT encoder, whose patch tokens are upsampled to an image in steps.

Each step doubles the side with a convolution (SETR's progressive upsampling, Zheng et al. 2021,
arXiv 2012.15840); features of a convolution on the input image are added before the last step, as in UNETR
(Hatamizadeh et al. 2022, arXiv 2103.10504), so that borders finer than a patch can be drawn.
"""

from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, ViTConfig, ViTModel
from transformers.modeling_outputs import SemanticSegmenterOutput
from transformers.models.vit.modeling_vit import ViTAttention, ViTLayer

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.models.spec import ModelSpec
from fedfrozen_app.models.table_models import settings_of
from fedfrozen_app.models.unet import check_masks, group_norm, twice

SETTINGS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "patch_size"),
    *("decoder_width", "dropout"),
)


class VitSegmenterConfig(ViTConfig):
    model_type = "vit_segmenter"

    def __init__(self, decoder_width: int = 16, **settings: Any) -> None:
        super().__init__(**settings)
        self.decoder_width = decoder_width


class Rise(nn.Module):
    """Doubles the side: a 3x3 convolution with group norm and ReLU."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, 3, padding=1, bias=False)
        self.norm = group_norm(after)

    def forward(self, features: Tensor) -> Tensor:
        return self.norm(self.conv(twice(features))).relu()


class VitSegmenter(PreTrainedModel):
    config: VitSegmenterConfig
    config_class = VitSegmenterConfig
    base_model_prefix = "vit"
    main_input_name = "pixel_values"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_record_outputs: ClassVar[dict[str, Any]] = {"hidden_states": ViTLayer, "attentions": ViTAttention}

    def __init__(self, config: VitSegmenterConfig) -> None:
        super().__init__(config)
        width, side = config.decoder_width, config.patch_size
        steps = side.bit_length() - 1
        widths = [config.hidden_size] + [width * 2 ** (steps - 1 - step) for step in range(steps)]
        self.vit = ViTModel(config, add_pooling_layer=False)
        self.stem = nn.Conv2d(config.num_channels, width, 3, padding=1)
        self.decoder = nn.ModuleList(Rise(before, after) for before, after in pairwise(widths))
        self.classifier = nn.Conv2d(2 * width, config.num_labels, 1)
        self.post_init()

    def forward(self, pixel_values: Tensor, **keywords: Any) -> SemanticSegmenterOutput:
        found = self.vit(pixel_values, **keywords)
        side = self.config.image_size // self.config.patch_size
        features = found.last_hidden_state[:, 1:].transpose(1, 2).unflatten(2, (side, side))
        for rise in self.decoder:
            features = rise(features)
        features = torch.cat([features, self.stem(pixel_values).relu()], dim=1)
        return SemanticSegmenterOutput(logits=self.classifier(features), attentions=found.attentions)


def vit_segmenter(spec: ModelSpec) -> VitSegmenter:
    own = settings_of("vit_segmenter", spec.config, VitSegmenterConfig, SETTINGS)
    check_masks("vit_segmenter", spec)
    shape, dropout = spec.shape, own.pop("dropout", 0.0)
    settings: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4} | own
    settings.setdefault("intermediate_size", 2 * settings["hidden_size"])
    patch = settings.setdefault("patch_size", 8)
    if settings["hidden_size"] % settings["num_attention_heads"]:
        raise UserError(
            f"the hidden size ({settings['hidden_size']}) is not a multiple of the number of attention heads "
            f"({settings['num_attention_heads']})"
        )
    if patch < 2 or patch & (patch - 1) or shape.image_size % patch:
        raise UserError(
            f"model.config.patch_size is {patch}, and pictures have {shape.image_size} pixels a side: choose "
            "a power of two (2 or more) that divides dataset.image_size"
        )
    model = VitSegmenter(
        VitSegmenterConfig(
            num_labels=shape.outputs,
            num_channels=shape.channels,
            image_size=shape.image_size,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            **settings,
        )
    )
    if spec.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model
