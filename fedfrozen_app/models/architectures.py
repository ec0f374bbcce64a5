"""The one table from parameter names to roles, by architecture.

Every parameter has exactly one role. To support another architecture, write its rows into a file
(`model.roles`, read by role_file.py), or add them to ``ARCHITECTURES`` under its ``config.model_type``.
"""

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Row:
    """One line of the table: names that fully match `pattern` have this role.

    The pattern is matched against the name without the architecture's prefix and without `.weight` or
    `.bias`; a group named `layer` captures the block's number. `feeds` is the block whose query and key
    projections read this norm's output: its "own" (pre-norm), the "next" one (post-norm; before the blocks,
    the first) or none. `unless` names a module which, if the model has it, lies between the norm and the
    attention.
    """

    pattern: str
    kind: str
    feeds: str = ""
    tower: str = ""
    unless: str = ""
    written: str = ""  # the pattern as written in a file, if it differs


@dataclass(frozen=True)
class Architecture:
    prefix: str  # the name of the headless model inside the model with a head
    rows: tuple[Row, ...]
    causal: bool = False  # whether a token attends only to earlier tokens
    own_mask: bool = False  # whether its attention expands the padding mask itself
    source: str = ""  # the file it was read from, if not of the table below


# Blocks are `encoder.layer.N` up to transformers 4 and in part of 5, `layers.N` in the rest.
_BLOCK = r"(?:encoder\.layer|encoder\.layers|layers)\.(?P<layer>\d+)\."

_IMAGE = (
    Row(r"embeddings\.(cls_token|mask_token|distillation_token)", "embedding"),
    Row(r"embeddings\.(position_embeddings|patch_embeddings\.projection)", "embedding"),
    Row(_BLOCK + r"attention\.(attention\.query|q_proj)", "query"),
    Row(_BLOCK + r"attention\.(attention\.key|k_proj)", "key"),
    Row(_BLOCK + r"attention\.(attention\.value|v_proj)", "value"),
    Row(_BLOCK + r"attention\.(output\.dense|o_proj)", "output"),
    Row(r"layernorm", "norm"),
    Row(r"pooler\.dense", "head"),
    Row(r"classifier|cls_classifier|distillation_classifier", "head"),
)

_VIT = (
    *_IMAGE,
    Row(_BLOCK + r"layernorm_before", "norm", feeds="own"),
    Row(_BLOCK + r"layernorm_after", "norm"),
    Row(_BLOCK + r"(intermediate\.dense|output\.dense|mlp\.fc[12])", "mlp"),
)

_DINOV2 = (
    *_IMAGE,
    Row(_BLOCK + r"norm1", "norm", feeds="own"),
    Row(_BLOCK + r"norm2", "norm"),
    # A layer scale multiplies its branch's output: it belongs to that branch's last matrix.
    Row(_BLOCK + r"layer_scale1\.lambda1", "output"),
    Row(_BLOCK + r"layer_scale2\.lambda1", "mlp"),
    Row(_BLOCK + r"mlp\.(fc[12]|weights_in|weights_out|(gate|up|down)_proj)", "mlp"),
)

_BERT = (
    Row(r"embeddings\.(word|position|token_type)_embeddings", "embedding"),
    Row(r"embeddings\.LayerNorm", "norm", feeds="next", unless="embeddings_project"),
    Row(r"embeddings_project", "embedding"),  # ELECTRA, if embeddings and blocks differ in width
    Row(_BLOCK + r"attention\.self\.query", "query"),
    Row(_BLOCK + r"attention\.self\.key", "key"),
    Row(_BLOCK + r"attention\.self\.value", "value"),
    Row(_BLOCK + r"attention\.output\.dense", "output"),
    Row(_BLOCK + r"attention\.output\.LayerNorm", "norm"),
    Row(_BLOCK + r"(intermediate|output)\.dense", "mlp"),
    Row(_BLOCK + r"output\.LayerNorm", "norm", feeds="next"),
    Row(r"pooler\.dense", "head"),
    Row(r"classifier(\.dense|\.out_proj)?", "head"),
)

_DISTIL = r"transformer\.layer\.(?P<layer>\d+)\."
_DISTILBERT = (
    Row(r"embeddings\.(word|position)_embeddings", "embedding"),
    Row(r"embeddings\.LayerNorm", "norm", feeds="next"),
    Row(_DISTIL + r"attention\.q_lin", "query"),
    Row(_DISTIL + r"attention\.k_lin", "key"),
    Row(_DISTIL + r"attention\.v_lin", "value"),
    Row(_DISTIL + r"attention\.out_lin", "output"),
    Row(_DISTIL + r"sa_layer_norm", "norm"),
    Row(_DISTIL + r"ffn\.lin[12]", "mlp"),
    Row(_DISTIL + r"output_layer_norm", "norm", feeds="next"),
    Row(r"pre_classifier|classifier", "head"),
)

_H = r"h\.(?P<layer>\d+)\."
_GPT2 = (  # after split_fused
    Row(r"wte|wpe", "embedding"),
    Row(_H + r"ln_1", "norm", feeds="own"),
    Row(_H + r"attn\.c_attn\.query", "query"),
    Row(_H + r"attn\.c_attn\.key", "key"),
    Row(_H + r"attn\.c_attn\.value", "value"),
    Row(_H + r"attn\.c_proj", "output"),
    Row(_H + r"ln_2", "norm"),
    Row(_H + r"mlp\.(c_fc|c_proj)", "mlp"),
    Row(r"ln_f", "norm"),
    Row(r"score|classifier|lm_head", "head"),
)

_LLAMA = (
    Row(r"embed_tokens", "embedding"),
    Row(_BLOCK + r"input_layernorm", "norm", feeds="own"),
    Row(_BLOCK + r"self_attn\.q_proj", "query"),
    Row(_BLOCK + r"self_attn\.k_proj", "key"),
    Row(_BLOCK + r"self_attn\.v_proj", "value"),
    Row(_BLOCK + r"self_attn\.o_proj", "output"),
    # Norms of queries and keys (Qwen3, Gemma 3) also belong to the attention kernel.
    Row(_BLOCK + r"self_attn\.q_norm", "query"),
    Row(_BLOCK + r"self_attn\.k_norm", "key"),
    Row(_BLOCK + r"(post_attention|pre_feedforward|post_feedforward)_layernorm", "norm"),
    Row(_BLOCK + r"mlp\.(gate|up|down)_proj", "mlp"),
    Row(r"norm", "norm"),
    Row(r"score|lm_head", "head"),
)


_MODERNBERT = (  # after split_fused
    Row(r"embeddings\.tok_embeddings", "embedding"),
    Row(r"embeddings\.norm", "norm", feeds="next"),  # its first block has no norm before attention
    Row(_BLOCK + r"attn_norm", "norm", feeds="own"),
    Row(_BLOCK + r"attn\.Wqkv\.query", "query"),
    Row(_BLOCK + r"attn\.Wqkv\.key", "key"),
    Row(_BLOCK + r"attn\.Wqkv\.value", "value"),
    Row(_BLOCK + r"attn\.Wo", "output"),
    Row(_BLOCK + r"mlp_norm", "norm"),
    Row(_BLOCK + r"mlp\.W[io]", "mlp"),
    Row(r"final_norm", "norm"),
    Row(r"head\.(dense|norm)|classifier", "head"),
)

_DEBERTA = (
    Row(r"embeddings\.(word|position|token_type)_embeddings", "embedding"),
    Row(r"embeddings\.embed_proj", "embedding"),  # if embeddings and blocks differ in width
    Row(r"embeddings\.LayerNorm", "norm", feeds="next"),
    # Relative positions, the input of every block's position projections.
    Row(r"encoder\.rel_embeddings", "embedding"),
    Row(r"encoder\.LayerNorm", "norm", feeds="next"),
    # Content-to-content and content-to-position projections: all four belong to the attention kernel.
    Row(_BLOCK + r"attention\.self\.(pos_)?query_proj", "query"),
    Row(_BLOCK + r"attention\.self\.(pos_)?key_proj", "key"),
    Row(_BLOCK + r"attention\.self\.value_proj", "value"),
    Row(_BLOCK + r"attention\.output\.dense", "output"),
    Row(_BLOCK + r"attention\.output\.LayerNorm", "norm"),
    Row(_BLOCK + r"(intermediate|output)\.dense", "mlp"),
    Row(_BLOCK + r"output\.LayerNorm", "norm", feeds="next"),
    Row(r"pooler\.dense|classifier", "head"),
)


def _clip_tower(tower: str, root: str) -> tuple[Row, ...]:
    block = root + r"encoder\.layers\.(?P<layer>\d+)\."
    embeddings = r"embeddings\.(token_embedding|position_embedding|class_embedding|patch_embedding)"
    return (
        Row(root + embeddings, "embedding", tower=tower),
        Row(root + r"(pre_layrnorm|post_layernorm|final_layer_norm)", "norm", tower=tower),
        Row(block + r"layer_norm1", "norm", feeds="own", tower=tower),
        Row(block + r"self_attn\.q_proj", "query", tower=tower),
        Row(block + r"self_attn\.k_proj", "key", tower=tower),
        Row(block + r"self_attn\.v_proj", "value", tower=tower),
        Row(block + r"self_attn\.out_proj", "output", tower=tower),
        Row(block + r"layer_norm2", "norm", tower=tower),
        Row(block + r"mlp\.fc[12]", "mlp", tower=tower),
    )


_CLIP = (
    *_clip_tower("vision", r"vision_model\."),
    *_clip_tower("text", r"text_model\."),
    Row(r"visual_projection", "head", tower="vision"),
    Row(r"text_projection", "head", tower="text"),
    Row(r"classifier", "head"),  # of the vision tower only
    Row(r"logit_scale", "head"),
)

_SIGLIP = (
    *_clip_tower("vision", r"vision_model\."),
    *_clip_tower("text", r"text_model\."),
    # Attention pooling of an image's tokens is part of the head, not of the attention kernel.
    Row(r"vision_model\.head\..+", "head", tower="vision"),
    Row(r"text_model\.head", "head", tower="text"),
    Row(r"logit_scale|logit_bias", "head"),
    Row(r"classifier", "head"),
)

_CNN = (
    Row(r"conv1", "embedding"),
    Row(r"conv[2-6]|hidden[12]?", "mlp"),
    Row(r"classifier", "head"),
)

_FT = (
    Row(r"embeddings\.(cls_token|number_weights|number_biases|level_embeddings|level_biases)", "embedding"),
    Row(_BLOCK + r"layernorm_before", "norm", feeds="own"),
    Row(_BLOCK + r"attention\.q_proj", "query"),
    Row(_BLOCK + r"attention\.k_proj", "key"),
    Row(_BLOCK + r"attention\.v_proj", "value"),
    Row(_BLOCK + r"attention\.o_proj", "output"),
    Row(_BLOCK + r"layernorm_after", "norm"),
    Row(_BLOCK + r"mlp\.fc[12]", "mlp"),
    Row(r"layernorm", "norm"),
    Row(r"classifier", "head"),
)

_UNET = (
    Row(r"down\.0\.conv1", "embedding"),
    Row(r"down\.0\.conv2|down\.[1-9]\d*\.conv[12]|up\.\d+\.(rise|conv[12])", "mlp"),
    Row(r"(down|up)\.\d+\.norm[12]", "norm"),
    Row(r"classifier", "head"),
)

_VIT_SEGMENTER = (
    *_VIT,
    Row(r"stem|decoder\.\d+\.conv", "mlp"),
    Row(r"decoder\.\d+\.norm", "norm"),
)

ARCHITECTURES = {
    "vit": Architecture("vit", _VIT),
    "deit": Architecture("deit", _VIT),
    "dinov2": Architecture("dinov2", _DINOV2),
    "bert": Architecture("bert", _BERT),
    "distilbert": Architecture("distilbert", _DISTILBERT),
    "roberta": Architecture("roberta", _BERT),
    "electra": Architecture("electra", _BERT),
    "gpt2": Architecture("transformer", _GPT2, causal=True),
    "llama": Architecture("model", _LLAMA, causal=True),
    "qwen2": Architecture("model", _LLAMA, causal=True),
    "qwen3": Architecture("model", _LLAMA, causal=True),
    "mistral": Architecture("model", _LLAMA, causal=True),
    "gemma": Architecture("model", _LLAMA, causal=True),
    "gemma3_text": Architecture("model", _LLAMA, causal=True),
    "modernbert": Architecture("model", _MODERNBERT),
    "deberta-v2": Architecture("deberta", _DEBERTA, own_mask=True),
    "clip": Architecture("", _CLIP),
    "siglip": Architecture("", _SIGLIP),
    "linear": Architecture("", (Row(r"classifier", "head"),)),
    "mlp": Architecture("", (Row(r"hidden\.\d+", "mlp"), Row(r"classifier", "head"))),
    "ft_transformer": Architecture("", _FT),
    "unet": Architecture("", _UNET),
    "vit_segmenter": Architecture("vit", _VIT_SEGMENTER),
    "simple_cnn": Architecture("", _CNN),
    "lenet": Architecture("", _CNN),
    "moderate_cnn": Architecture("", _CNN),
}


def architecture_of(model: nn.Module) -> Architecture | None:
    """The architecture from the model's role file, or from the table by its type; None if unknown."""
    if (read := getattr(model, "architecture", None)) is not None:
        return read
    return ARCHITECTURES.get(getattr(getattr(model, "config", None), "model_type", ""))
