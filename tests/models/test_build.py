"""Models are built to fit the data, to the bit from a seed, and survive export."""

import json
import logging

import huggingface_hub.constants
import pytest
import torch
from transformers import (
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    Dinov2Config,
    Dinov2Model,
    GPT2Config,
    GPT2Model,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.table import InputShape
from fedfrozen_app.models.build import build_model, parameters_of
from fedfrozen_app.models.export import export_model
from fedfrozen_app.models.roles import roles_of
from tests.conftest import slowly

SMALL = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
VIT = {**SMALL, "patch_size": 4}
FAMILIES = ["vit", "deit", "dinov2", "bert", "distilbert", "roberta", "electra", "gpt2", "llama"]


def build(shape, *, source="config", path=None, model_type="vit", dtype="float32", seed=0, **given):
    return build_model(
        source=source,
        path=None if path is None else str(path),
        model_type=model_type,
        config=given,
        shape=shape,
        dtype=dtype,
        seed=seed,
    )


def same(a, b):
    a, b = parameters_of(a), parameters_of(b)
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_reads_the_data_and_scores_its_classes(family, tiny, logits):
    model = tiny(family)
    classes = ("cat", "dog", "emu") if family in ("vit", "deit", "dinov2") else ("bad", "good")
    assert logits(family, model).shape == (4, len(classes))
    assert model.config.id2label == dict(enumerate(classes))
    assert not model.training


def test_same_seed_same_bits_and_the_global_generator_is_left_alone(tiny):
    torch.manual_seed(7)
    state = torch.get_rng_state()
    first = tiny("vit", seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    assert same(first, tiny("vit", seed=3))
    assert not same(first, tiny("vit", seed=4))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_dtype_is_a_cast_of_the_same_draw(dtype, tiny, logits):
    model = tiny("llama", dtype=dtype)
    for name, parameter in parameters_of(tiny("llama")).items():
        assert torch.equal(parameters_of(model)[name], parameter.to(getattr(torch, dtype)))
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert logits("llama", model).dtype == getattr(torch, dtype)


def test_settings_win_over_what_the_data_say(text_shape):
    model = build(text_shape, model_type="gpt2", n_embd=8, n_head=2, n_layer=1, n_positions=9)
    assert model.config.n_positions == 9
    assert model.transformer.wpe.weight.shape == (9, 8)
    model = build(text_shape, model_type="bert", **SMALL, vocab_size=33)
    assert model.bert.embeddings.word_embeddings.weight.shape == (33, 8)


def test_roberta_has_room_for_its_shifted_positions():
    shape = InputShape("text", ("a", "b"), vocab_size=20, max_tokens=6, pad_token_id=1)
    model = build(shape, model_type="roberta", **SMALL)
    assert model.roberta.embeddings.position_embeddings.weight.shape == (6 + 1 + 1, 8)


def test_linear_is_logistic_regression(image_shape):
    model = build(image_shape, source="linear", model_type=None, dtype="float64")
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    parameters = parameters_of(model)
    expected = x.reshape(2, 192) @ parameters["classifier.weight"].T + parameters["classifier.bias"]
    torch.testing.assert_close(model(pixel_values=x).logits, expected)
    assert same(model, build(image_shape, source="linear", model_type=None, dtype="float64"))


def test_linear_refuses_text_settings_and_export(image_shape, text_shape, tmp_path):
    with pytest.raises(UserError, match="reads pixels"):
        build(text_shape, source="linear")
    with pytest.raises(UserError, match="remove hidden_size"):
        build(image_shape, source="linear", hidden_size=8)
    model = build(image_shape, source="linear")
    with pytest.raises(UserError, match="cannot be exported"):
        export_model(model, tmp_path, image_shape.classes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hiden_size": 8}, "'hiden_size' is no setting of.*did you mean 'hidden_size'"),
        ({"rope_theta": 8}, "'rope_theta' is no setting"),
        ({"hidden_size": 10, "num_attention_heads": 3}, r"hidden size \(10\) is not a multiple"),
        ({"num_attention_heads": 0}, "not a multiple"),
        ({"hidden_size": "wide"}, "cannot build 'vit'.*hidden_size"),
        ({"hidden_act": "nonsense"}, "cannot build 'vit'.*nonsense"),
        ({"patch_size": 3}, "8 pixels a side cannot be cut into patches of 3"),
        ({"patch_size": 16}, "8 pixels a side cannot be cut into patches of 16"),
        ({"image_size": 16}, "set dataset.image_size=16"),
        ({"num_channels": 1}, "reads 1 channels but the images have 3"),
        ({"num_labels": 7}, "7 classes but the data have 3"),
        ({"attn_implementation": "nonsense"}, "cannot build 'vit'.*nonsense"),
    ],
)
def test_bad_settings_are_one_sentence(given, message, image_shape):
    with pytest.raises(UserError, match=message) as error:
        build(image_shape, **{**VIT, **given})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model_type": "bert", "vocab_size": 10}, "knows 10 tokens but the tokenizer has 20"),
        ({"model_type": "bert", "pad_token_id": 3}, "padding token is 3 but the data.*with 0"),
        ({"model_type": "bert", "max_position_embeddings": 4}, "set dataset.max_tokens=4"),
        ({"model_type": "vit"}, "'vit' does not read text data"),
        ({"model_type": "resnet"}, "'resnet' is no architecture"),
        ({"model_type": "clip"}, "'clip' does not read text data"),
        ({"model_type": None}, "choose one of vit"),
        ({"model_type": "bert", "dtype": "float16"}, "must be one of float32"),
        (
            {"model_type": "bert", "source": "disk"},
            "choose one of config, checkpoint, hub, aligned, linear, mlp, ft_transformer, unet, "
            "vit_segmenter, cnn, lenet, "
            "moderate_cnn.",
        ),
        ({"model_type": "bert", "num_hidden_layers": 1, "hidden_size": 9}, "not a multiple"),
    ],
)
def test_what_cannot_be_built_is_refused(given, message, text_shape):
    settings = {**SMALL, **given} if given.get("model_type") == "bert" else given
    with pytest.raises(UserError, match=message):
        build(text_shape, **settings)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"task": "sound", "classes": ("a", "b")}, "Unknown dataset.task 'sound'"),
        ({"task": "image", "classes": ("a",), "channels": 1, "image_size": 8}, "two or more"),
        ({"task": "image", "classes": ("a", "a"), "channels": 1, "image_size": 8}, "different"),
        ({"task": "image", "classes": ("a", "b"), "channels": 1}, "image_size"),
        ({"task": "text", "classes": ("a", "b"), "max_tokens": 4}, "vocab_size"),
    ],
)
def test_impossible_shapes_are_refused(given, message):
    with pytest.raises(UserError, match=message):
        InputShape(**given)


@pytest.mark.parametrize("dtype", ["float32", *slowly("float64")])
@pytest.mark.parametrize("family", FAMILIES)
def test_exported_models_give_the_same_logits(family, dtype, tiny, logits, tmp_path):
    model = tiny(family, dtype=dtype)
    image = family in ("vit", "deit", "dinov2")
    classes = ("un", "deux", "trois") if image else ("no", "yes")
    before = list(model.state_dict())
    export_model(model, tmp_path, classes)

    auto = AutoModelForImageClassification if image else AutoModelForSequenceClassification
    again = auto.from_pretrained(tmp_path, local_files_only=True).eval()
    assert torch.allclose(logits(family, again), logits(family, model), rtol=0, atol=1e-7)
    assert again.config.id2label == dict(enumerate(classes))
    assert again.dtype == getattr(torch, dtype)
    assert list(model.state_dict()) == before
    if family == "gpt2":
        assert again.transformer.h[0].attn.c_attn.weight.shape == (8, 24)
    else:
        assert torch.equal(logits(family, again), logits(family, model))


def test_export_then_checkpoint_is_the_same_model(tiny, text_shape, tmp_path):
    model = tiny("gpt2", dtype="float64")
    export_model(model, tmp_path, text_shape.classes)
    assert same(model, build(text_shape, source="checkpoint", path=tmp_path, dtype="float64"))


def test_export_refuses_wrong_classes_and_a_file(tiny, tmp_path):
    with pytest.raises(UserError, match="3 classes with 2 class names"):
        export_model(tiny("vit"), tmp_path, ("a", "b"))
    (tmp_path / "taken").write_text("")
    with pytest.raises(UserError, match="it is a file"):
        export_model(tiny("vit"), tmp_path / "taken", ("a", "b", "c"))


@pytest.fixture
def headless(tmp_path):
    """A checkpoint without a classifier, as pretrained ones are."""
    model = ViTModel(ViTConfig(**VIT, image_size=8))
    model.save_pretrained(tmp_path)
    return tmp_path, model


def test_headless_checkpoint_gets_a_seeded_head(headless, image_shape, caplog, capfd):
    folder, original = headless
    capfd.readouterr()
    with caplog.at_level(logging.INFO):
        model = build(image_shape, source="checkpoint", path=folder, model_type=None, seed=1)
    ours = [r.getMessage() for r in caplog.records if r.name.startswith("fedfrozen_app")]
    assert ours == [f"{folder}: fresh weights for classifier.bias, classifier.weight"]
    assert capfd.readouterr() == ("", "")
    stored = parameters_of(original)
    for name, parameter in parameters_of(model).items():
        if roles_of(model)[name].kind != "head":
            assert torch.equal(parameter, stored[name.removeprefix("vit.")])
    assert same(model, build(image_shape, source="checkpoint", path=folder, seed=1))
    other = parameters_of(build(image_shape, source="checkpoint", path=folder, seed=2))
    assert not torch.equal(other["classifier.weight"], parameters_of(model)["classifier.weight"])


def test_checkpoint_with_another_head_gets_a_fresh_one(image_shape, tmp_path, caplog):
    ViTForImageClassification(ViTConfig(**VIT, image_size=8, num_labels=9)).save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO):
        model = build(image_shape, source="checkpoint", path=tmp_path)
    assert model.classifier.weight.shape == (3, 8)
    assert "fresh weights for classifier.bias, classifier.weight" in caplog.text


def test_headless_gpt2_is_split_and_padded(text_shape, tmp_path):
    config = GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=20, n_positions=6)
    original = GPT2Model(config)
    original.save_pretrained(tmp_path)
    model = build(text_shape, source="checkpoint", path=tmp_path, model_type=None)
    assert model.config.pad_token_id == 0
    key = model.transformer.h[0].attn.c_attn.key.weight
    assert torch.equal(key, original.h[0].attn.c_attn.weight[:, 8:16])


def test_dropout_of_a_checkpoint_can_be_set(headless, image_shape):
    folder, _ = headless
    model = build(
        image_shape,
        source="checkpoint",
        path=folder,
        hidden_dropout_prob=0.25,
        attn_implementation="eager",
    )
    assert model.config.hidden_dropout_prob == 0.25
    assert model.config._attn_implementation == "eager"


def test_checkpoint_that_does_not_fit_is_refused(headless, image_shape, text_shape):
    folder, _ = headless
    big = InputShape("image", image_shape.classes, channels=3, image_size=16)
    with pytest.raises(UserError, match=r"set dataset.image_size=8"):
        build(big, source="checkpoint", path=folder)
    with pytest.raises(UserError, match="does not read text"):
        build(text_shape, source="checkpoint", path=folder)
    with pytest.raises(UserError, match="7 classes but the data have 3"):
        build(image_shape, source="checkpoint", path=folder, num_labels=7)
    with pytest.raises(UserError, match=r"lacks \d+ weights.*another shape"):
        build(image_shape, source="checkpoint", path=folder, intermediate_size=32)


def test_dinov2_resamples_to_the_data(tmp_path):
    Dinov2Model(Dinov2Config(**VIT, image_size=16)).save_pretrained(tmp_path)
    shape = InputShape("image", ("a", "b"), channels=3, image_size=8)
    model = build(shape, source="checkpoint", path=tmp_path)
    assert model(pixel_values=torch.zeros(1, 3, 8, 8)).logits.shape == (1, 2)


def test_broken_checkpoints_are_refused(headless, image_shape, tmp_path):
    folder, _ = headless

    def refused(message, path):
        with pytest.raises(UserError, match=message):
            build(image_shape, source="checkpoint", path=path)

    refused("has no path", None)
    refused("does not exist", folder / "nowhere")
    (folder / "empty").mkdir()
    refused("has no config.json", folder / "empty")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    refused("cannot load the model", folder)
    weights.unlink()
    refused("cannot read the checkpoint", folder)
    (folder / "config.json").write_text("{")
    refused("cannot read the checkpoint", folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "nonsense"}))
    refused("cannot load the model", folder)


def test_hub_out_of_reach_is_one_sentence(image_shape, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"hub could not be reached or has no model 'no/such'") as e:
        build(image_shape, source="hub", path="no/such")
    assert "local folder" in str(e.value)
    assert "\n" not in str(e.value)
    with pytest.raises(UserError, match="has no name"):
        build(image_shape, source="hub")
