"""FT-Transformer (Gorishniy et al. 2021, arXiv 2106.11959): a token per column, and a class token.

A number's token is the number times its column's weight vector, plus a bias vector; a category's token is its
level's embedding. The blocks are transformers' pre-norm blocks of ViT, whose MLP has one activation (GELU)
where the paper's has a gate.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, ViTConfig
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.models.vit.modeling_vit import ViTAttention, ViTLayer
from transformers.utils.output_capturing import capture_outputs

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.models.spec import ModelSpec
from fedfrozen_app.models.table_models import settings_of, table_sizes

SETTINGS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "dropout")


class FtConfig(ViTConfig):
    model_type = "ft_transformer"

    def __init__(
        self, numbers: int = 1, levels: tuple[int, ...] = (), intercept: bool = True, **settings: Any
    ) -> None:
        super().__init__(**settings)
        self.numbers, self.levels, self.intercept = numbers, list(levels), intercept


class ColumnTokens(nn.Module):
    """(batch, numbers) and (batch, columns) of levels as (batch, 1 + numbers + columns, width)."""

    def __init__(self, config: FtConfig) -> None:
        super().__init__()
        width, counts = config.hidden_size, list(config.levels)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.number_weights = nn.Parameter(torch.empty(config.numbers, width))
        self.number_biases = nn.Parameter(torch.empty(config.numbers, width))
        self.level_embeddings = nn.Parameter(torch.empty(sum(counts), width))
        self.level_biases = nn.Parameter(torch.empty(len(counts), width))
        self.begins = [sum(counts[:place]) for place in range(len(counts))]

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        parts = [self.cls_token.expand(len(numbers), -1, -1)]
        if numbers.shape[1]:
            parts.append(numbers[:, :, None] * self.number_weights + self.number_biases)
        if categories.shape[1]:
            begins = torch.tensor(self.begins, device=categories.device)
            parts.append(self.level_embeddings[categories + begins] + self.level_biases)
        return torch.cat(parts, dim=1)


class FtTransformer(PreTrainedModel):
    config: FtConfig
    config_class = FtConfig
    base_model_prefix = "ft"
    main_input_name = "numbers"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_record_outputs: ClassVar[dict[str, Any]] = {"hidden_states": ViTLayer, "attentions": ViTAttention}

    def __init__(self, config: FtConfig) -> None:
        super().__init__(config)
        self.embeddings = ColumnTokens(config)
        self.layers = nn.ModuleList([ViTLayer(config) for _ in range(config.num_hidden_layers)])
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels, bias=config.intercept)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ColumnTokens):
            bound = self.config.hidden_size**-0.5
            for parameter in module.parameters(recurse=False):
                nn.init.uniform_(parameter, -bound, bound)

    @capture_outputs(tie_last_hidden_states=False)
    def forward(self, numbers: Tensor, categories: Tensor, **keywords: Any) -> SequenceClassifierOutput:
        found = self.embeddings(numbers, categories)
        for layer in self.layers:
            found = layer(found, None, **keywords)
        return SequenceClassifierOutput(logits=self.classifier(self.layernorm(found)[:, 0]))


def ft_transformer(spec: ModelSpec) -> FtTransformer:
    own = settings_of("ft_transformer", spec.config, FtConfig, SETTINGS)
    numbers, levels, outputs, intercept = table_sizes("ft_transformer", spec, *own)
    dropout = own.pop("dropout", 0.0)
    settings: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4} | own
    settings.setdefault("intermediate_size", 2 * settings["hidden_size"])
    if settings["hidden_size"] % settings["num_attention_heads"]:
        raise UserError(
            f"the hidden size ({settings['hidden_size']}) is not a multiple of the number of attention heads "
            f"({settings['num_attention_heads']})"
        )
    model = FtTransformer(
        FtConfig(
            numbers,
            levels,
            intercept,
            num_labels=outputs,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            **settings,
        )
    )
    if spec.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model
