"""`model.*`: what is trained."""

from dataclasses import dataclass
from typing import Any

from fedfrozen_app.config.needs import TRANSFORMERS, only_with
from fedfrozen_app.config.settings import MISSING, setting


@dataclass
class ModelConfig:
    name: str = setting(MISSING, "A name for reports")
    source: str = setting(
        MISSING,
        "`config` (random weights), `checkpoint` (local folder), `hub` (download), `linear` (one layer, on "
        "pixels or a table's columns), `mlp` and `ft_transformer` (of a table), `unet` and "
        "`vit_segmenter` (a class for each pixel), `cnn`, `lenet` and `moderate_cnn` (convolutional networks "
        "of others' benchmarks), `aligned` (a dual encoder made on this machine from `dataset.align`)",
    )
    # Every file sets it: null in a file overrides "???", and not the other way round.
    path: str | None = setting(
        MISSING,
        "Folder of a checkpoint, or name on the Hugging Face hub",
        needs=only_with("model", "checkpoint", "hub"),
    )
    model_type: str | None = setting(
        None,
        "Architecture for `source=config`: `vit`, `deit`, `dinov2`, `bert`, `distilbert`, `roberta`, "
        "`electra`, `modernbert`, `deberta-v2`, `gpt2`, `llama`, `qwen2`, `qwen3`, `mistral`, `gemma`, "
        "`gemma3_text`, `clip`, `siglip`; with `model.roles` any other; to be read through prompts `clip` or "
        "`vision-text-dual-encoder`",
        needs=only_with("model", "config", "aligned", add="model=bert_tiny or another model from scratch"),
    )
    seeding: str = setting(
        "derived",
        "How `seed` gives the first weights. `derived`: by a seed of their own; `plain`: by "
        "`torch.manual_seed(seed)` before the model is built, as others' scripts have it, to begin at the "
        "same weights. What real sites keep private begins by `derived`",
        choices=("derived", "plain"),
    )
    dtype: str = setting("float32", "Of the parameters: `float32`, `float64` or `bfloat16`")
    roles: str | None = setting(
        None,
        "A file that gives the roles of another architecture's parameters; see "
        "[Language models](language-models.md#architectures). `null`: the built-in table",
        needs=only_with("model", *TRANSFORMERS),
    )
    gradient_checkpointing: bool = setting(
        False,
        "Compute a block's activations again when its gradients need them: less memory, about a third more "
        "time. Clients then train one after another",
        needs=only_with("model", *TRANSFORMERS),
    )
    config: dict[str, Any] = setting(
        {},
        "Settings of the transformers configuration, such as `model.config.hidden_size=64`. Add one that "
        "the file lacks with `+`: `+model.config.qkv_bias=false`. Sizes that the data decide are filled in",
    )
