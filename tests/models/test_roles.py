"""Every parameter of every family has one role, and the right one."""

import dataclasses

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DeiTConfig,
    DeiTForImageClassificationWithTeacher,
    Dinov2Config,
    Dinov2ForImageClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTForMaskedImageModeling,
    ViTModel,
)

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.exchange.role import KERNEL, KINDS, Role
from fedfrozen_app.models import architectures
from fedfrozen_app.models.pixels import LinearClassifier, PixelConfig
from fedfrozen_app.models.roles import roles_of

FAMILIES = [
    "vit",
    "deit",
    "dinov2",
    "bert",
    "distilbert",
    "roberta",
    "electra",
    "gpt2",
    "llama",
    "clip",
]
D, LAYERS, MLP = 8, 2, 24  # width, blocks and MLP width of the tiny models
SMALL = {
    "hidden_size": D,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "intermediate_size": MLP,
}


def share(model: nn.Module, kinds: tuple[str, ...]) -> float:
    found = roles_of(model)
    size = {name: parameter.numel() for name, parameter in model.named_parameters()}
    return sum(size[name] for name in size if found[name].kind in kinds) / sum(size.values())


def feeding(model: nn.Module) -> set[str]:
    """The modules whose parameters feed attention, each of which must be marked as a whole."""
    marks: dict[str, set[bool]] = {}
    for name, role in roles_of(model).items():
        marks.setdefault(name.rpartition(".")[0], set()).add(role.feeds_attention)
    assert all(len(mark) == 1 for mark in marks.values())
    return {module for module, mark in marks.items() if mark == {True}}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_has_one_role_and_every_layer_its_kinds(family, tiny):
    model = tiny(family)
    found = roles_of(model)

    assert list(found) == [name for name, _ in model.named_parameters()]
    assert {role.kind for role in found.values()} <= set(KINDS)
    towers = ("vision", "text") if family == "clip" else ("",)
    for tower in towers:
        inside = [role for role in found.values() if role.tower == tower]
        assert {role.layer for role in inside} == {None, *range(LAYERS)}
        for layer in range(LAYERS):
            kinds = {role.kind for role in inside if role.layer == layer}
            assert kinds == {"query", "key", "value", "output", "mlp", "norm"}
        outside = {role.kind for role in inside if role.layer is None}
        assert {"embedding", "head"} <= outside <= {"embedding", "norm", "head"}


@pytest.mark.parametrize("family", FAMILIES)
def test_projections_have_the_expected_shapes(family, tiny):
    model = tiny(family)
    found = roles_of(model)
    narrow = D // 2 if family == "llama" else D  # one key head for two query heads
    weights = {"query": (D, D), "key": (narrow, D), "value": (narrow, D), "output": (D, D)}
    towers = 2 if family == "clip" else 1
    for name, role in found.items():
        if role.kind in ("query", "key", "value"):  # q_proj, k_lin, value, ...
            assert name.split(".")[-2][0] == role.kind[0]
    for kind, shape in weights.items():
        matrices = [
            tuple(parameter.shape)
            for name, parameter in model.named_parameters()
            if found[name].kind == kind and parameter.ndim == 2
        ]
        assert matrices == [shape] * LAYERS * towers
        biases = [
            parameter.numel()
            for name, parameter in model.named_parameters()
            if found[name].kind == kind and name.endswith("bias")
        ]
        assert biases == ([] if family == "llama" else [D] * LAYERS * towers)


@pytest.mark.parametrize("family", [*FAMILIES, "linear"])
def test_no_name_is_claimed_by_two_rows(family, tiny, monkeypatch):
    """The table is checked, not trusted: a second claim on any name is an error."""
    model = LinearClassifier(PixelConfig("linear", 1, 2, 2)) if family == "linear" else tiny(family)
    roles_of(model)
    architecture = architectures.ARCHITECTURES[family]
    row = architecture.rows[-1]
    twice = dataclasses.replace(architecture, rows=(*architecture.rows, row))
    monkeypatch.setitem(architectures.ARCHITECTURES, family, twice)
    with pytest.raises(RuntimeError, match="two roles"):
        roles_of(model)


def test_kernel_share_by_hand_vit(tiny):
    block = 4 * (D * D + D) + (D * MLP + MLP) + (MLP * D + D) + 2 * 2 * D
    # class token, 4 patches + 1 positions, patches of 3 x 4 x 4; final norm; three classes
    rest = D + 5 * D + (3 * 16 * D + D) + 2 * D + (3 * D + 3)
    expected = LAYERS * 2 * (D * D + D) / (LAYERS * block + rest)
    assert share(tiny("vit"), KERNEL) == expected


def test_kernel_share_by_hand_bert(tiny):
    block = 4 * (D * D + D) + (D * MLP + MLP) + (MLP * D + D) + 2 * 2 * D
    # 20 words, 6 positions, 2 segments and their norm; pooler; two classes
    rest = 20 * D + 6 * D + 2 * D + 2 * D + (D * D + D) + (2 * D + 2)
    expected = LAYERS * 2 * (D * D + D) / (LAYERS * block + rest)
    assert share(tiny("bert"), KERNEL) == expected


def test_kernel_share_of_the_published_models():
    with torch.device("meta"):
        vit = ViTForImageClassification(ViTConfig(num_labels=1000))
        bert = BertForSequenceClassification(BertConfig(num_labels=2))
    assert 100 * share(vit, KERNEL) == pytest.approx(16.4, abs=0.1)
    assert 100 * share(bert, KERNEL) == pytest.approx(12.9, abs=0.1)


@pytest.mark.parametrize(
    ("family", "modules"),
    [
        ("vit", {"vit.layers.0.layernorm_before", "vit.layers.1.layernorm_before"}),
        ("dinov2", {"dinov2.encoder.layer.0.norm1", "dinov2.encoder.layer.1.norm1"}),
        ("bert", {"bert.embeddings.LayerNorm", "bert.encoder.layer.0.output.LayerNorm"}),
        ("roberta", {"roberta.embeddings.LayerNorm", "roberta.encoder.layer.0.output.LayerNorm"}),
        (
            "distilbert",
            {
                "distilbert.embeddings.LayerNorm",
                "distilbert.transformer.layer.0.output_layer_norm",
            },
        ),
        ("gpt2", {"transformer.h.0.ln_1", "transformer.h.1.ln_1"}),
        ("llama", {"model.layers.0.input_layernorm", "model.layers.1.input_layernorm"}),
        (
            "clip",
            {
                f"{tower}_model.encoder.layers.{layer}.layer_norm1"
                for tower in ("vision", "text")
                for layer in (0, 1)
            },
        ),
        # Between ELECTRA's embeddings and its first block stands a projection, unless both are
        # of one width.
        ("electra", {"electra.encoder.layer.0.output.LayerNorm"}),
    ],
)
def test_norms_that_feed_attention(family, modules, tiny):
    model = tiny(family)
    assert feeding(model) == modules
    assert all(r.kind == "norm" for r in roles_of(model).values() if r.feeds_attention)


def test_electra_of_one_width_feeds_its_first_block_from_the_embeddings(tiny):
    assert feeding(tiny("electra", embedding_size=D)) == {
        "electra.embeddings.LayerNorm",
        "electra.encoder.layer.0.output.LayerNorm",
    }


@pytest.mark.parametrize("family", ["vit", "bert", "distilbert", "roberta", "gpt2", "llama"])
def test_what_feeds_attention_is_what_the_queries_read(family, tiny, logits):
    """Seen from the running model: the norms whose output enters a query projection."""
    model = tiny(family)
    found = roles_of(model)
    outputs: dict[int, str] = {}
    read: set[str] = set()
    norms = {name.rpartition(".")[0] for name, role in found.items() if role.kind == "norm"}
    queries = {name.rpartition(".")[0] for name, role in found.items() if role.kind == "query"}
    kept = []  # a freed tensor's address could be used again

    def note_output(name):
        def hook(_module, _inputs, output):
            kept.append(output)
            outputs[output.data_ptr()] = name

        return hook

    def note_input(_module, inputs):
        read.add(outputs[inputs[0].data_ptr()])

    for name in norms:
        model.get_submodule(name).register_forward_hook(note_output(name))
    for name in queries:
        model.get_submodule(name).register_forward_pre_hook(note_input)
    logits(family, model)
    assert read == feeding(model)


def test_outside_the_blocks():
    model = DeiTForImageClassificationWithTeacher(DeiTConfig(**SMALL, image_size=8, patch_size=4))
    found = roles_of(model)
    assert found["deit.embeddings.distillation_token"] == Role("embedding")
    assert found["cls_classifier.weight"] == Role("head")
    assert found["distillation_classifier.bias"] == Role("head")
    assert found["deit.layernorm.weight"] == Role("norm")


def test_layer_scales_and_gates_of_dinov2():
    config = Dinov2Config(**SMALL, image_size=8, patch_size=4, use_swiglu_ffn=True)
    model = Dinov2ForImageClassification(config)
    found = roles_of(model)
    assert found["dinov2.encoder.layer.1.layer_scale1.lambda1"] == Role("output", 1)
    assert found["dinov2.encoder.layer.1.layer_scale2.lambda1"] == Role("mlp", 1)
    assert found["dinov2.embeddings.mask_token"] == Role("embedding")


def test_clip_heads_and_towers(tiny):
    found = roles_of(tiny("clip"))
    assert found["logit_scale"] == Role("head")
    assert found["visual_projection.weight"] == Role("head", tower="vision")
    assert found["text_projection.weight"] == Role("head", tower="text")
    assert found["vision_model.pre_layrnorm.weight"] == Role("norm", tower="vision")
    assert found["text_model.encoder.layers.1.self_attn.k_proj.bias"] == Role("key", 1, "text")


def test_headless_models_have_roles_too():
    vit = roles_of(ViTModel(ViTConfig(**SMALL, image_size=8, patch_size=4)))
    assert vit["pooler.dense.weight"] == Role("head")
    bert = roles_of(BertModel(BertConfig(**SMALL, vocab_size=9)))
    assert bert["encoder.layer.0.attention.self.value.weight"] == Role("value", 0)


@pytest.mark.parametrize(
    ("model_type", "name", "role"),
    [
        ("vit", "vit.encoder.layer.11.attention.attention.query.weight", ("query", 11)),
        ("deit", "deit.encoder.layer.3.attention.attention.key.bias", ("key", 3)),
        ("vit", "vit.encoder.layer.3.attention.output.dense.bias", ("output", 3)),
        ("vit", "vit.encoder.layer.3.intermediate.dense.bias", ("mlp", 3)),
        ("vit", "vit.encoder.layer.3.output.dense.weight", ("mlp", 3)),
        ("dinov2", "dinov2.encoder.layer.3.attention.attention.value.bias", ("value", 3)),
        ("dinov2", "dinov2.encoder.layer.3.mlp.weights_in.weight", ("mlp", 3)),
    ],
)
def test_names_of_transformers_4(model_type, name, role):
    model = nn.Module()
    model.config = type("Config", (), {"model_type": model_type})
    *path, leaf = name.split(".")
    module = model
    for part in path:
        module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(leaf, nn.Parameter(torch.zeros(1)))
    (found,) = roles_of(model).values()
    assert (found.kind, found.layer) == role


def test_linear_is_all_head():
    assert set(roles_of(LinearClassifier(PixelConfig("linear", 1, 2, 2))).values()) == {Role("head")}


def test_unknown_architecture_is_refused():
    with pytest.raises(UserError, match=r"'Linear' has no role table: add its rows"):
        roles_of(nn.Linear(2, 2))


def test_unmapped_name_is_refused():
    model = ViTForMaskedImageModeling(ViTConfig(**SMALL, image_size=8, patch_size=4, encoder_stride=4))
    with pytest.raises(UserError, match=r"'decoder.0.weight' of the architecture 'vit' has no"):
        roles_of(model)


@pytest.mark.parametrize(
    "module",
    [
        nn.MultiheadAttention(4, 2),
        nn.ModuleDict({"qkv": nn.Linear(2, 6)}),
        nn.ModuleDict({"block": nn.ModuleDict({"Wqkv": nn.Linear(2, 6, bias=False)})}),
        nn.ModuleDict({"query_key_value": nn.Linear(2, 6)}),
        GPT2ForSequenceClassification(GPT2Config(n_embd=4, n_layer=1, n_head=1, vocab_size=9)),
    ],
    ids=["in_proj", "qkv", "Wqkv", "query_key_value", "c_attn"],
)
def test_fused_tensor_is_refused(module):
    with pytest.raises(UserError, match="would freeze the value too"):
        roles_of(module)


def test_gpt2_cross_attention_is_refused(tiny):
    with pytest.raises(UserError, match=r"crossattention.c_attn.weight.*value too"):
        roles_of(tiny("gpt2", add_cross_attention=True))


def test_running_statistics_are_refused(tiny):
    model = tiny("vit")
    model.add_module("batch", nn.BatchNorm1d(2, affine=False))
    with pytest.raises(UserError, match=r"'batch.running_mean'.*neither trained nor averaged"):
        roles_of(model)
