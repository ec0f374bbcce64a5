"""What every parameter is for: the one table from parameter names to roles.

Strategies speak of roles ("freeze the queries and keys"), never of parameter names. That holds only
if every parameter has exactly one role, so a name the table does not know is refused, not guessed.
To support another architecture, write its rows into a file (`model.roles`, read by role_file.py), or add them
to ``ARCHITECTURES`` under its ``config.model_type``; or let the module name the roles of its parameters
itself, by a method or an attribute ``roles``: by name a `Role`, or plainly "mlp", or ("mlp", 3) for a
parameter of the fourth layer.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fedfrozen_app.errors import UserError

KINDS = (
    "embedding",
    "query",
    "key",
    "value",
    "output",
    "mlp",
    "norm",
    "head",
    "prompt",
    "fusion",
)
KERNEL = ("query", "key")  # with their biases: what fixes the attention weights


@dataclass(frozen=True)
class Role:
    """What a parameter is for.

    layer: the block's number from 0, None outside the blocks.
    tower: "vision" or "text" in a model with two towers, else "".
    feeds_attention: true for a norm whose output is what the query and key projections read.
    adapter: true for an adapter, which has the kind and layer of the projection that it adapts.
    """

    kind: str
    layer: int | None = None
    tower: str = ""
    feeds_attention: bool = False
    adapter: bool = False

    @property
    def word(self) -> str:
        """What a site's policy calls what travels: adapters by that name, and all else by its kind."""
        return "adapter" if self.adapter else self.kind


def is_embedding(role: Role) -> bool:
    """Embeddings, and the norm that closes them: outside the layers, read by the first one's attention."""
    return role.kind == "embedding" or (role.kind == "norm" and role.layer is None and role.feeds_attention)


@dataclass(frozen=True)
class Row:
    """One line of the table: the names that match `pattern` in full have this role.

    The pattern sees the name without the architecture's prefix and without `.weight` or `.bias`;
    a group called `layer` gives the block's number. `feeds` says which block's query and key
    projections read this norm's output: its "own" block's (pre-norm), the "next" block's
    (post-norm; before the blocks, the first's) or none's. `unless` names a module which, where
    the model has it, stands between the norm and the attention.
    """

    pattern: str
    kind: str
    feeds: str = ""
    tower: str = ""
    unless: str = ""
    said: str = ""  # the pattern as a person wrote it, where that is another


@dataclass(frozen=True)
class Architecture:
    prefix: str  # the name of the headless model inside the model with a head
    rows: tuple[Row, ...]
    causal: bool = False  # whether a token sees only what came before it
    own_mask: bool = False  # whether its attention makes what it needs of the padding mask itself
    source: str = ""  # the file that it was read from, where it is not of the table below


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
    # A layer scale multiplies what its branch gives back: it belongs to that branch's last matrix.
    Row(_BLOCK + r"layer_scale1\.lambda1", "output"),
    Row(_BLOCK + r"layer_scale2\.lambda1", "mlp"),
    Row(_BLOCK + r"mlp\.(fc[12]|weights_in|weights_out|(gate|up|down)_proj)", "mlp"),
)

_BERT = (
    Row(r"embeddings\.(word|position|token_type)_embeddings", "embedding"),
    Row(r"embeddings\.LayerNorm", "norm", feeds="next", unless="embeddings_project"),
    Row(r"embeddings_project", "embedding"),  # ELECTRA, where embeddings and blocks differ in width
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
    # Where queries and keys are normed before they meet (Qwen3, Gemma 3), that fixes attention as they do.
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
    Row(r"embeddings\.embed_proj", "embedding"),  # where embeddings and blocks differ in width
    Row(r"embeddings\.LayerNorm", "norm", feeds="next"),
    # Relative positions, which every block's position projections read.
    Row(r"encoder\.rel_embeddings", "embedding"),
    Row(r"encoder\.LayerNorm", "norm", feeds="next"),
    # Content meets content, and content meets position: all four fix where a token looks.
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
    Row(r"classifier", "head"),  # of the vision tower alone
    Row(r"logit_scale", "head"),
)

_SIGLIP = (
    *_clip_tower("vision", r"vision_model\."),
    *_clip_tower("text", r"text_model\."),
    # What pools a picture's tokens into one looks for nothing among them that freezing the kernel is about.
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
    "simple_cnn": Architecture("", _CNN),
    "lenet": Architecture("", _CNN),
    "moderate_cnn": Architecture("", _CNN),
}

_FUSED = re.compile(
    r"(?:.*\.)?(?:in_proj_(?:weight|bias)"
    r"|(?:qkv|qkv_proj|Wqkv|query_key_value|c_attn)(?:\.(?:weight|bias))?)"
)


def architecture_of(model: nn.Module) -> Architecture | None:
    """By the file that the model was built with, or by its kind; None where neither knows it."""
    if (read := getattr(model, "architecture", None)) is not None:
        return read
    return ARCHITECTURES.get(getattr(getattr(model, "config", None), "model_type", ""))


def roles_of(model: nn.Module) -> dict[str, Role]:
    """One role for each name of `model.named_parameters()`, in that order."""
    names = [name for name, _ in model.named_parameters()]
    what = getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__
    _refuse_statistics(what, model)
    if (own := getattr(model, "roles", None)) is not None:
        _refuse_fused(what, names)
        return _own_roles(what, names, own() if callable(own) else own)
    architecture = architecture_of(model)
    if architecture is None:
        _refuse_fused(what, names)
        raise UserError(
            f"the architecture '{what}' has no role table: add its rows in a file (model.roles=FILE), let "
            f"the module say its `roles`, or choose one of {', '.join(ARCHITECTURES)}"
        )
    matched = {name: _match(architecture, what, name) for name in names}
    _refuse_fused(what, [name for name, found in matched.items() if found is None or found[0].kind != "head"])
    if nameless := [name for name, found in matched.items() if found is None]:
        raise UserError(_nameless(architecture, what, nameless))
    found = {name: row for name, row in matched.items() if row is not None}
    blocks: dict[str, int] = {}
    for row, layer in found.values():
        if layer is not None:
            blocks[row.tower] = max(blocks.get(row.tower, 0), layer + 1)
    return {
        name: Role(
            row.kind,
            layer,
            row.tower,
            _feeds_attention(row, layer, blocks.get(row.tower, 0), names),
        )
        for name, (row, layer) in found.items()
    }


def unused_rows(architecture: Architecture, names: Collection[str]) -> list[Row]:
    """The rows that none of these names matches."""
    short = [_short(architecture, name) for name in names]
    return [row for row in architecture.rows if not any(re.fullmatch(row.pattern, name) for name in short)]


def _nameless(architecture: Architecture, what: str, names: list[str]) -> str:
    if architecture.source:
        shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
        return f"{len(names)} parameters of '{what}' match no pattern of {architecture.source}: {shown}"
    return (
        f"the parameter '{names[0]}' of the architecture '{what}' has no role: add a row for it to "
        "ARCHITECTURES in fedfrozen_app/models/roles.py, or give a table of your own with model.roles=FILE"
    )


def _own_roles(what: str, names: Collection[str], own: Mapping[str, Any]) -> dict[str, Role]:
    """The roles that a module names itself: of every parameter, and none that strategies do not know."""
    found = {}
    for name in names:
        if name not in own:
            raise UserError(f"'{what}' names no role for its parameter '{name}': add it to its roles")
        given = own[name]
        role = given if isinstance(given, Role) else Role(*((given,) if isinstance(given, str) else given))
        if role.kind not in KINDS:
            raise UserError(
                f"'{what}' calls its parameter '{name}' a '{role.kind}', which is no role: choose one of "
                f"{', '.join(KINDS)}"
            )
        found[name] = role
    return found


def _short(architecture: Architecture, name: str) -> str:
    short = name.removeprefix(architecture.prefix + ".")
    return short.removesuffix(".weight").removesuffix(".bias")


def _match(architecture: Architecture, what: str, name: str) -> tuple[Row, int | None] | None:
    """The one row for this name, and the number of its block; None where there is no row."""
    short = _short(architecture, name)
    matches = [(row, m) for row in architecture.rows if (m := re.fullmatch(row.pattern, short))]
    if not matches:
        return None
    if len(matches) > 1:
        patterns = " and ".join(row.said or row.pattern for row, _ in matches)
        if architecture.source:
            raise UserError(f"'{name}' matches two patterns of {architecture.source}: {patterns}")
        raise RuntimeError(f"'{name}' of '{what}' has two roles, by {patterns}")
    row, match = matches[0]
    layer = match.groupdict().get("layer")
    return row, None if layer is None else int(layer)


def _feeds_attention(row: Row, layer: int | None, blocks: int, names: Collection[str]) -> bool:
    if row.unless and any(row.unless in name.split(".") for name in names):
        return False
    if row.feeds == "next":
        following = 0 if layer is None else layer + 1
        return following < blocks  # the last block's output norm feeds the head
    return row.feeds == "own"


def _refuse_fused(what: str, names: Collection[str]) -> None:
    for name in names:
        if _FUSED.fullmatch(name):
            raise UserError(
                f"the parameter '{name}' of '{what}' holds query, key and value in one tensor, so "
                "freezing the kernel would freeze the value too: split it first by split_fused, "
                "adding a row for it to FUSED in fedfrozen_app/models/split.py where it has none"
            )


def _refuse_statistics(what: str, model: nn.Module) -> None:
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, tensor in model.state_dict().items():
        if name in parameters or not isinstance(tensor, torch.Tensor):
            continue
        if tensor.is_floating_point():
            raise UserError(
                f"the buffer '{name}' of '{what}' is a running statistic, which would be neither "
                "trained nor averaged: use a model without one (LayerNorm in place of BatchNorm)"
            )


def is_causal(model: nn.Module) -> bool:
    """Whether a token sees only what came before it."""
    found = architecture_of(model)
    return found is not None and found.causal


def head_of(model: nn.Module, roles: Mapping[str, Role]) -> nn.Module | None:
    """The module that turns a row's representation into its scores; None where the model has none."""
    heads = [name for name, role in roles.items() if role.kind == "head"]
    return model.get_submodule(heads[-1].rpartition(".")[0]) if heads else None
