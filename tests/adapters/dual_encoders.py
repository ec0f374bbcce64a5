"""Small dual encoders for tests, built by transformers."""

import torch
from transformers import (
    BertConfig,
    ByT5Tokenizer,
    CLIPConfig,
    CLIPModel,
    Dinov2Config,
    VisionTextDualEncoderConfig,
    VisionTextDualEncoderModel,
)

from fedfrozen_app.adapters.dual import DualEncoder
from tests.strategies.dual import CLIP


def clip():
    torch.manual_seed(0)
    return DualEncoder(CLIPModel(CLIPConfig(**CLIP)), ByT5Tokenizer())


def dinov2_bert():
    torch.manual_seed(0)
    tower = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    joint = VisionTextDualEncoderConfig.from_vision_text_configs(
        Dinov2Config(**tower, image_size=8, patch_size=4, num_channels=1),
        BertConfig(**tower, vocab_size=384, intermediate_size=32, max_position_embeddings=40),
        projection_dim=12,
    )
    return DualEncoder(VisionTextDualEncoderModel(joint), ByT5Tokenizer(), pooling="mean")
