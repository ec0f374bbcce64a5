"""Architectures beside the first ones: every parameter has its role, the kernel is what fixes attention, both
runners agree, and a FedFrozen round leaves the kernel's bits alone. And any other, by a file."""

import json
import logging
import re

import pytest
import torch
from transformers import AutoModelForSequenceClassification, SiglipConfig, SiglipModel

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.table import InputShape
from fedfrozen_app.exchange.role import KERNEL, KINDS
from fedfrozen_app.models.build import build_model
from fedfrozen_app.models.export import export_model
from fedfrozen_app.models.role_file import read_roles, use_roles
from fedfrozen_app.models.roles import roles_of
from tests.conftest import SMALL, slowly

WIDTH, LAYERS = 8, 3
BLOCKS = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
DECODER = {**BLOCKS, "num_key_value_heads": 1, "head_dim": 4}
TOWER = {"vision_config": {**BLOCKS, "patch_size": 4}}
DEBERTA = {
    **BLOCKS,
    **{"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4},
    **{"norm_rel_ebd": "layer_norm", "share_att_key": False, "position_biased_input": False},
    **{"type_vocab_size": 0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    **{"pooler_dropout": 0.0, "pooler_hidden_size": WIDTH},
}
LANGUAGE = InputShape("language", (), vocab_size=20, max_tokens=12, pad_token_id=0)
TEXT = InputShape("text", ("bad", "good"), vocab_size=20, max_tokens=12, pad_token_id=0)
IMAGE = InputShape("image", ("cat", "dog", "emu"), channels=3, image_size=8)
FAMILIES = {
    "qwen2": (LANGUAGE, {**BLOCKS, "num_key_value_heads": 1}),
    "qwen3": (LANGUAGE, DECODER),
    "mistral": (LANGUAGE, {**DECODER, "sliding_window": 4}),
    "gemma": (LANGUAGE, DECODER),
    "gemma3_text": (LANGUAGE, {**DECODER, "sliding_window": 4, "layer_types": MIXED}),
    "modernbert": (TEXT, {**BLOCKS, "local_attention": 4}),
    "deberta-v2": (TEXT, DEBERTA),
    "clip": (IMAGE, TOWER),
    "siglip": (IMAGE, TOWER),
}
# In each block, by hand: what the attention weights depend on.
KERNELS = {
    "qwen2": "self_attn.q_proj.weight self_attn.q_proj.bias self_attn.k_proj.weight self_attn.k_proj.bias",
    "qwen3": "self_attn.q_proj.weight self_attn.q_norm.weight self_attn.k_proj.weight "
    "self_attn.k_norm.weight",
    "mistral": "self_attn.q_proj.weight self_attn.k_proj.weight",
    "gemma": "self_attn.q_proj.weight self_attn.k_proj.weight",
    "gemma3_text": "self_attn.q_proj.weight self_attn.q_norm.weight self_attn.k_proj.weight "
    "self_attn.k_norm.weight",
    "modernbert": "attn.Wqkv.query.weight attn.Wqkv.key.weight",
    "deberta-v2": " ".join(
        f"attention.self.{name}_proj.{leaf}"
        for name in ("query", "key", "pos_query", "pos_key")
        for leaf in ("weight", "bias")
    ),
    "clip": "self_attn.q_proj.weight self_attn.q_proj.bias self_attn.k_proj.weight self_attn.k_proj.bias",
    "siglip": "self_attn.q_proj.weight self_attn.q_proj.bias self_attn.k_proj.weight self_attn.k_proj.bias",
}


def tiny(family, dtype="float32", roles=None):
    shape, config = FAMILIES[family]
    given = {"source": "config", "path": None, "model_type": family, "config": config}
    return build_model(**given, shape=shape, dtype=dtype, seed=0, roles=roles)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_has_a_role_and_the_kernel_is_what_fixes_attention(family):
    model = tiny(family)
    roles = roles_of(model)
    assert list(roles) == [name for name, _ in model.named_parameters()]
    blocks = {number for role in roles.values() if (number := role.layer) is not None}
    assert blocks == set(range(LAYERS))
    kernel = {re.sub(r"^.*layers?\.(\d+)\.", r"\1.", n) for n, role in roles.items() if role.kind in KERNEL}
    assert kernel == {f"{number}.{name}" for number in blocks for name in KERNELS[family].split()}
    for number in blocks:
        kinds = {role.kind for role in roles.values() if role.layer == number}
        assert kinds == {"query", "key", "value", "output", "mlp", "norm"}
    assert {role.kind for role in roles.values()} <= set(KINDS)


def inputs_for(family):
    if FAMILIES[family][0] is IMAGE:
        return {"pixel_values": torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))}
    ids = torch.randint(1, 20, (2, 12), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "deberta-v2"])
def test_the_first_block_s_attention_depends_on_its_kernel_and_not_on_its_value(family):
    """The table against the model itself: attention weights of the first block, before and after a change."""
    model = tiny(family, "float64")
    model.set_attn_implementation("eager")
    roles = roles_of(model)

    def weights():
        with torch.no_grad():
            return model(**inputs_for(family), output_attentions=True).attentions[0]

    before = weights()
    parameters = dict(model.named_parameters())
    for name, role in roles.items():
        if role.layer != 0 or role.kind not in (*KERNEL, "value", "output", "mlp"):
            continue
        if name.endswith("k_proj.bias"):  # softmax ignores what is added to all keys alike
            continue
        kept = parameters[name].detach().clone()
        with torch.no_grad():
            parameters[name] += torch.randn(kept.shape, generator=torch.Generator().manual_seed(0)).double()
        moved = float((weights() - before).abs().max())
        assert (moved > 1e-9) == (role.kind in KERNEL), name
        with torch.no_grad():
            parameters[name].copy_(kept)


@pytest.mark.slow
def test_modernbert_is_split_as_it_computed_and_joined_as_it_was(tmp_path):
    torch.manual_seed(0)
    model = tiny("modernbert")
    export_model(model, tmp_path, ("bad", "good"))
    whole = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    names = dict(whole.named_parameters())
    assert "model.layers.0.attn.Wqkv.weight" in names
    with torch.no_grad():
        given = inputs_for("modernbert")
        assert torch.allclose(whole(**given).logits, model(**given).logits, atol=1e-6)


def test_the_towers_of_clip_and_siglip_and_what_pools_a_picture():
    vision = {**BLOCKS, "image_size": 8, "patch_size": 4}
    config = SiglipConfig(text_config={**BLOCKS, "vocab_size": 20}, vision_config=vision)
    roles = roles_of(SiglipModel(config))
    towers = {name.split("_model.")[0]: role.tower for name, role in roles.items() if "_model." in name}
    assert towers == {"text": "text", "vision": "vision"}
    assert roles["vision_model.head.attention.in_proj_weight"].kind == "head"


def test_means_of_tokens_are_refused_for_modernbert():
    shape, config = FAMILIES["modernbert"]
    given = {"source": "config", "path": None, "model_type": "modernbert"}
    with pytest.raises(UserError, match="classifier_pooling=cls"):
        build_model(
            **given, config={**config, "classifier_pooling": "mean"}, shape=shape, dtype="float32", seed=0
        )


# ---- whole rounds ----

RUN = [word for word in SMALL if not word.startswith("model.")]
EXACT = ["model.dtype=float64", "client=sgd", "client.lr=0.05", "num_rounds=2", "checkpoint.keep=9"]
FROZEN = ["strategy=fedfrozen", "strategy.warmup_rounds=1", "num_clients=2", "dataset.limit=48"]


def words_for(family, tmp_path):
    shape, config = FAMILIES[family]
    words = [f"+model.config.{key}={json.dumps(value).replace(' ', '')}" for key, value in config.items()]
    base = ["model=linear", "model.source=config", f"model.model_type={family}", f"model.name={family}"]
    if shape is IMAGE:
        words = [
            "+model.config.vision_config={"
            + ",".join(f"{k}:{v}" for k, v in TOWER["vision_config"].items())
            + "}"
        ]
        return [*base, *words]
    lines = [{"text": "abcdefgh"[n % 8] * (3 + n % 9), "label": "xy"[n % 2]} for n in range(80)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    kind = "instructions" if shape is LANGUAGE else "text"
    return [f"dataset={kind}", f"dataset.path={tmp_path}/rows.jsonl", "dataset.max_tokens=12", *base, *words]


HARDEST = ("modernbert", "deberta-v2")  # fused, and with projections of positions


@pytest.mark.parametrize("family", [*HARDEST, *slowly(*(f for f in FAMILIES if f not in HARDEST))])
def test_a_round_of_fedfrozen_leaves_the_kernel_alone_and_both_runners_agree(family, train, tmp_path):
    words = [*RUN, *words_for(family, tmp_path), *EXACT, *FROZEN]
    runs = [train(*words, f"runtime.runner={r}", folder=r, small=False) for r in ("sequential", "cohort")]
    before, after = (runs[0].model_after(number) for number in (1, 2))
    kernel = {name for name in before if any(name.endswith(part) for part in KERNELS[family].split())}
    assert len(kernel) == LAYERS * len(KERNELS[family].split())
    assert all(torch.equal(before[name], after[name]) for name in kernel)
    matrices = [name for name in before if before[name].ndim > 1 and name not in kernel]
    assert not [name for name in matrices if torch.equal(before[name], after[name])]
    for name, value in runs[0].model.items():
        if "k_proj.bias" in name or "key_proj.bias" in name:  # softmax ignores them
            continue
        apart = float((runs[1].model[name] - value).norm())
        assert apart <= 1e-9 * max(1.0, float(value.norm())), name


# ---- any other architecture, by a file ----

OPT = """\
prefix: model.decoder
causal: true
roles:
  embed_tokens: embedding
  embed_positions: embedding
  layers.{layer}.self_attn.q_proj: query
  layers.{layer}.self_attn.k_proj: key
  layers.{layer}.self_attn.v_proj: value
  layers.{layer}.self_attn.out_proj: output
  layers.{layer}.self_attn_layer_norm: {role: norm, feeds: own}
  layers.{layer}.final_layer_norm: norm
  layers.{layer}.fc*: mlp
  final_layer_norm: norm
"""
OPT_CONFIG = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 24}
OPT_CONFIG |= {"word_embed_proj_dim": 8, "dropout": 0.0}


def opt(path, text):
    path.write_text(text)
    given = {"source": "config", "path": None, "model_type": "opt", "config": OPT_CONFIG}
    return build_model(**given, shape=LANGUAGE, dtype="float64", seed=0, roles=str(path))


def test_an_architecture_of_no_table_is_opened_by_a_file(tmp_path, caplog):
    roles = roles_of(opt(tmp_path / "opt.yaml", OPT))
    found = roles["model.decoder.layers.1.self_attn.q_proj.bias"]
    assert (found.kind, found.layer) == ("query", 1)
    assert roles["model.decoder.layers.0.self_attn_layer_norm.weight"].feeds_attention
    assert roles["model.decoder.layers.1.fc2.weight"].kind == "mlp"
    assert "no parameter matches" not in caplog.text


def test_a_file_is_told_which_names_match_nothing_and_which_patterns(tmp_path, caplog):
    gone = "".join(line + "\n" for line in OPT.splitlines() if "fc*" not in line and "v_proj" not in line)
    with pytest.raises(
        UserError, match=r"12 parameters of 'opt' match no pattern of .*v_proj\.weight"
    ) as error:
        opt(tmp_path / "a.yaml", gone)
    assert "fc1.weight" in str(error.value) and "q_proj" not in str(error.value)
    with caplog.at_level(logging.WARNING):
        opt(tmp_path / "b.yaml", OPT + "  layers.{layer}.gate: mlp\n")
    assert "no parameter matches layers.{layer}.gate" in caplog.text


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("roles: [a]\n", "must say roles"),
        ("- a\n", "must say roles"),
        ("roles: {a: mlp\n", "cannot be read as YAML"),
        ("roles: {a: mlp}\nfused: x\n", "unknown key fused"),
        ("roles: {a: neck}\n", "has role 'neck': choose one of embedding"),
        ("roles: {a: {feeds: own}}\n", "needs a role"),
        ("roles: {a: {role: norm, feeds: mine}}\n", "has feeds 'mine'"),
        ("roles: {a.{layer}.b.{layer}: mlp}\n", "cannot be read|twice"),
        ("prefix: 3\nroles: {a: mlp}\n", "prefix is a name"),
        (OPT + '  "layers.{layer}.fc1": mlp\n', "matches two patterns"),
    ],
)
def test_a_bad_file_gets_one_sentence(tmp_path, text, sentence):
    with pytest.raises(UserError, match=sentence) as error:
        opt(tmp_path / "a.yaml", text)
    assert "\n" not in str(error.value)


def test_a_file_cannot_make_a_model_causal_that_looks_ahead(tmp_path):
    rows = {
        "bert.embeddings.*": "embedding",
        "bert.encoder.layer.{layer}.attention.self.query": "query",
        "bert.encoder.layer.{layer}.attention.self.key": "key",
        "bert.encoder.layer.{layer}.attention.self.value": "value",
        "bert.encoder.layer.{layer}.attention.output.*": "output",
        "bert.encoder.layer.{layer}.intermediate.dense": "mlp",
        "bert.encoder.layer.{layer}.output.*": "mlp",
        "cls.predictions": "head",
        "cls.predictions.transform.*": "head",
        "cls.predictions.decoder": "head",
    }
    lines = "".join(f"  {pattern}: {role}\n" for pattern, role in rows.items())
    (tmp_path / "bert.yaml").write_text(f"causal: true\nroles:\n{lines}")
    given = {"source": "config", "path": None, "model_type": "bert", "config": BLOCKS}
    with pytest.raises(UserError, match="sees a text's next tokens"):
        build_model(**given, shape=LANGUAGE, dtype="float32", seed=0, roles=str(tmp_path / "bert.yaml"))


def test_a_fused_tensor_is_refused_whatever_a_file_calls_it(tmp_path):
    from transformers import ModernBertConfig, ModernBertForSequenceClassification

    sizes = {"vocab_size": 20, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    sizes |= {"cls_token_id": 0, "sep_token_id": 0}
    model = ModernBertForSequenceClassification(ModernBertConfig(**BLOCKS, **sizes))
    (tmp_path / "a.yaml").write_text("roles: {'model.layers.{layer}.attn.Wqkv': value}\n")
    with pytest.raises(UserError, match="query, key and value in one tensor"):
        use_roles(model, read_roles(tmp_path / "a.yaml"))
