"""Prompts inside frozen encoders, against the same thing written out."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    CLIPConfig,
    CLIPModel,
    PreTrainedTokenizerFast,
)

from fedfrozen_app.adapters.design import PromptDesign
from fedfrozen_app.adapters.dual import DualEncoder
from fedfrozen_app.adapters.prompts import CrossFusion, PromptedDual
from fedfrozen_app.models.roles import roles_of
from tests.adapters.dual_encoders import clip, dinov2_bert
from tests.strategies.dual import CLIP

CLASSES = ("dog", "ice_cream", "art-work")


BACKBONES = pytest.mark.parametrize("backbone", [clip, dinov2_bert])


def prompted(backbone, **design):
    torch.manual_seed(1)
    settings = {"text_tokens": 3, "vision_tokens": 2, "heads": 2, **design}
    model = PromptedDual(backbone(), PromptDesign(**settings).checked_design(), CLASSES).eval()
    model.settle()
    return model


@BACKBONES
def test_every_parameter_has_a_role_and_encoders_are_frozen(backbone):
    model = prompted(backbone)
    roles = roles_of(model)
    kinds = {name: role.kind for name, role in roles.items() if name not in model.frozen_names}
    assert list(roles) == [name for name, _ in model.named_parameters()]
    assert set(kinds.values()) == {"prompt", "fusion"}
    assert {role.tower for name, role in roles.items() if name in kinds} == {"text", "vision"}
    assert not any(p.requires_grad for n, p in model.named_parameters() if n in model.frozen_names)


@BACKBONES
@pytest.mark.parametrize("design", [{}, {"depth": 2}, {"fusion": "concat"}, {"fusion": "sum"}])
def test_gradients_reach_prompts_and_nothing_else(backbone, design):
    model = prompted(backbone, **design).train()
    if model.fusion:
        for fusion in model.fusion.values():
            torch.nn.init.normal_(fusion.output.weight)
    model(pixel_values=torch.randn(4, 1, 8, 8)).logits.sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (name not in model.frozen_names), name
        if name.startswith("prompts"):
            assert parameter.grad.abs().sum() > 0, name


def test_deep_prompts_replace_the_tokens_of_their_block():
    """Depth 2 on two blocks: what block one made of the first tokens must not matter to the second's."""
    dual = clip()
    pixels, prompt = torch.randn(2, 1, 8, 8), torch.randn(2, 2, 24)
    vision = dual.model.vision_model
    hidden = vision.embeddings(pixels)
    hidden = vision.pre_layrnorm(torch.cat([hidden, prompt[0].expand(2, -1, -1)], dim=1))
    for number, layer in enumerate(vision.encoder.layers):
        if number == 1:
            hidden = torch.cat([hidden[:, :-2], prompt[1].expand(2, -1, -1)], dim=1)
        hidden = layer(hidden, attention_mask=None)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
    expected = dual.model.visual_projection(vision.post_layernorm(hidden[:, 0]))
    torch.testing.assert_close(dual.image(pixels, prompt), expected)


def test_class_names_are_spoken_and_prompts_stand_before_them():
    words = clip().words(CLASSES, 3, "{}")
    text = [bytes(i - 3 for i in row[words.count :].tolist() if i > 2).decode() for row in words.ids]
    assert text == ["dog.", "ice cream.", "art work."] and words.start == 0
    assert words.mask.sum(dim=1).tolist() == [3 + len(name) + 1 for name in text]


def clip_of_words():
    """A CLIP whose tokenizer reads whole words and, like the published one, marks start and end."""
    words = ["[start]", "[end]", "a", "photo", "of", "dog", "ice", "cream", "art", "work", "."]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[start] $A [end]", special_tokens=[("[start]", 0), ("[end]", 1)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="[start]", eos_token="[end]", pad_token="[end]"
    )
    torch.manual_seed(0)
    config = CLIPConfig(**CLIP)
    config.text_config.bos_token_id, config.text_config.eos_token_id = 0, 1
    return DualEncoder(CLIPModel(config), fast)


def test_a_prompt_of_word_vectors_is_the_sentence_that_clip_reads():
    """[start] P1..P4 [class] . [end] with the vectors of "a photo of a": CLIP's own features of that text."""
    dual = clip_of_words()
    words = dual.words(CLASSES, 4, "{}")
    assert words.start == 1 and words.count == 4 and (words.ids[:, 0] == 0).all()
    prompt = dual.model.text_model.embeddings.token_embedding(torch.tensor([2, 3, 4, 2]))
    encoded = dual.tokenizer(
        [f"a photo of a {name}." for name in ("dog", "ice cream", "art work")],
        padding=True,
        return_tensors="pt",
    )
    own = dual.model.get_text_features(**{key: encoded[key] for key in ("input_ids", "attention_mask")})
    own = getattr(own, "pooler_output", own)
    torch.testing.assert_close(dual.text(words, prompt), own)
    torch.testing.assert_close(dual.text(dual.words(CLASSES, 0, "a photo of a {}.")), own)
    assert not torch.allclose(dual.text(words, prompt.flip(0)), own, atol=1e-3)


def test_bf16_is_for_the_encoders_alone():
    """What multiplies in bf16: the encoders. Prompts, fusion, scores and gradients stay in float32."""
    model = prompted(clip).train()
    torch.nn.init.normal_(model.fusion["text"].output.weight)
    seen = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda m, i, output, name=name: seen.update({name: output.dtype}))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(pixel_values=torch.randn(4, 1, 8, 8)).logits
    logits.sum().backward()
    assert {kind for name, kind in seen.items() if name.startswith("backbone.")} == {torch.bfloat16}
    assert {kind for name, kind in seen.items() if name.startswith("fusion.")} == {torch.float32}
    own = [p for name, p in model.named_parameters() if name not in model.frozen_names]
    assert {p.dtype for p in own} == {p.grad.dtype for p in own} == {logits.dtype} == {torch.float32}


def test_cross_fusion_is_multi_head_attention():
    torch.manual_seed(0)
    fusion = CrossFusion(8, 2)
    of, by = torch.randn(1, 3, 8), torch.randn(1, 3, 8)
    assert not fusion(of, by).any()  # zero at first
    torch.nn.init.normal_(fusion.output.weight)
    twin = torch.nn.MultiheadAttention(8, 2, bias=False, batch_first=True)
    with torch.no_grad():
        twin.in_proj_weight.copy_(torch.cat([fusion.query.weight, fusion.key.weight, fusion.value.weight]))
        twin.out_proj.weight.copy_(fusion.output.weight)
    torch.testing.assert_close(fusion(of, by), twin(of, by, by)[0])


@BACKBONES
def test_fixed_images_and_kept_texts_give_the_same_scores(backbone):
    model = prompted(backbone, modalities="text")
    pixels = torch.randn(5, 1, 8, 8)
    with torch.inference_mode():
        whole = model(pixel_values=pixels).logits
        kept = model(image_features=model.encode_images(pixels)).logits
        assert model.text_features() is model.text_features()
        torch.testing.assert_close(whole, kept)
    with torch.no_grad():
        model.prompts["text"].local.add_(1.0)
        torch.nn.init.normal_(model.fusion["text"].output.weight)
    with torch.inference_mode():
        assert not torch.allclose(model(pixel_values=pixels).logits, whole)  # a change is noticed
        with model.only_global():
            torch.testing.assert_close(model(pixel_values=pixels).logits, whole)  # W_O was 0 before
