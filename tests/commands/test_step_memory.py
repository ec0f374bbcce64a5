"""What a step takes of memory, against what a real model keeps; and gradients that are computed again."""

import json
from contextlib import nullcontext

import pytest
import torch

from fedfrozen_app.commands import step_memory as memory
from fedfrozen_app.commands.show_plan import plan
from fedfrozen_app.commands.step_memory import kept_for_gradients, step_memory
from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.table import InputShape
from fedfrozen_app.models.build import build_model, outline_model, parameters_of
from fedfrozen_app.models.task import Batch, Task
from tests.conftest import SMALL
from tests.models.conftest import IMAGE, SETTINGS, TEXT

LANGUAGE = InputShape("language", (), vocab_size=50, max_tokens=12, pad_token_id=0)
DROPOUT = {
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}
SHAPES = {"llama": LANGUAGE, "gpt2": LANGUAGE, "bert": TEXT, "vit": IMAGE}


def given(family):
    config = {"source": "config", "path": None, "model_type": family, "config": SETTINGS[family]}
    return {**config, "shape": SHAPES[family]}


@pytest.mark.parametrize("family", SHAPES)
def test_what_is_kept_is_what_a_real_model_keeps(family, monkeypatch):
    """Without dropout: with it, the CPU's attention keeps more than a GPU's, which is what is counted."""
    settings = given(family)
    settings["config"] = settings["config"] | DROPOUT.get(family, {})
    real = build_model(**settings, dtype="float32", seed=0)
    outline = outline_model(**settings, dtype="float32")
    found = kept_for_gradients(outline, SHAPES[family], 4)
    assert kept_for_gradients(outline, SHAPES[family], 8) == pytest.approx(2 * found, rel=0.1)
    monkeypatch.setattr(memory, "attention_by", lambda *args: nullcontext())  # but its own attention
    assert found == pytest.approx(kept_for_gradients(real, SHAPES[family], 4), rel=0.05)


@pytest.mark.parametrize("family", SHAPES)
def test_activations_that_are_computed_again_take_less_and_gradients_are_the_same(family):
    settings = given(family)
    settings["config"] = settings["config"] | DROPOUT.get(family, {})
    plain = build_model(**settings, dtype="float64", seed=0)
    again = build_model(**settings, dtype="float64", seed=0, checkpointing=True)
    shape = SHAPES[family]
    assert kept_for_gradients(again, shape, 4) < 0.8 * kept_for_gradients(plain, shape, 4)
    for model in (plain, again):
        model.train()
        assert model.is_gradient_checkpointing == (model is again)
        task = Task(model, kind=shape.task, mean=(0.5,) * shape.channels, std=(0.2,) * shape.channels)
        torch.manual_seed(0)
        if shape is IMAGE:
            batch = Batch({"pixel_values": torch.randint(0, 256, (4, 3, 8, 8))}, torch.arange(4) % 3)
        else:
            ids = torch.randint(1, 20, (4, shape.max_tokens))
            labels = ids if shape is LANGUAGE else torch.arange(4) % 2
            batch = Batch({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, labels)
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        task.loss({}, batch).backward()
    for (name, one), other in zip(plain.named_parameters(), again.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            assert torch.allclose(one.grad, other.grad, rtol=1e-10, atol=1e-14), name


def test_the_parts_of_a_step_by_hand():
    words = ["dataset.limit=100", *SMALL, "client=adamw"]
    config = read(resolved(compose_config(words)))
    shape = InputShape("image", tuple("abcdefghij"), channels=1, image_size=8)
    outline = outline_model(
        source="config", path=None, model_type="vit", config=config.model.config, shape=shape, dtype="float32"
    )
    sizes = {name: value.nbytes for name, value in parameters_of(outline).items()}
    whole, head = sum(sizes.values()), sizes["classifier.weight"] + sizes["classifier.bias"]
    everything = step_memory(config, shape, tuple(sizes))
    assert (everything.parameters, everything.gradients, everything.optimizer) == (whole, whole, 2 * whole)
    only_head = step_memory(config, shape, ("classifier.weight", "classifier.bias"))
    assert (only_head.parameters, only_head.gradients, only_head.optimizer) == (whole, head, 2 * head)
    assert only_head.activations < everything.activations / 5
    plain = read(resolved(compose_config([*words, "client=sgd", "client.momentum=0"])))
    assert step_memory(plain, shape, tuple(sizes)).optimizer == 0
    private = read(resolved(compose_config([*words, "privacy=dp_sgd", "privacy.physical_batch=4"])))
    assert step_memory(private, shape, tuple(sizes)).gradients == 5 * whole


def test_the_plan_tells_memory_and_on_request_seconds(capsys):
    words = [*SMALL, "strategy=fedfrozen", "strategy.warmup_rounds=1"]
    plan([*words, "--json", "--measure"])
    found = json.loads(capsys.readouterr().out)
    warm, frozen = found["memory"]
    assert warm["total"] == sum(warm[key] for key in ("parameters", "gradients", "optimizer", "activations"))
    assert frozen["total"] < warm["total"]
    real = found["measured"]
    assert real["seconds_a_round"] == pytest.approx(real["seconds_a_step"] * real["steps_a_round"])
    # 160 rows less the server's tenth, over 3 clients of which each holds a tenth out, in batches of 16.
    assert real["steps_a_round"] in range(9, 12) and real["peak_bytes"] is None
    plan(words)
    assert "Seconds a round: add --measure" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(UserError, match="takes plain steps"):
        plan([*words, "--measure", "privacy=dp_sgd"])


def test_a_run_whose_activations_are_computed_again_gives_the_same_model(train):
    words = ["model.dtype=float64", "client=sgd", "num_rounds=2", "strategy=fedavg", "runtime.runner=auto"]
    one = train(*words, "runtime.runner=sequential", folder="plain")
    other = train(*words, "model.gradient_checkpointing=true", folder="again")
    for name, value in one.model.items():
        assert torch.allclose(value, other.model[name], rtol=1e-10, atol=1e-12), name


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["runtime.runner=cohort"], "clients that train together"),
        (["privacy=dp_sgd"], "hides activations that privacy=dp_sgd needs"),
    ],
)
def test_what_cannot_compute_activations_again_says_so(words, sentence):
    with pytest.raises(UserError, match=sentence):
        read(resolved(compose_config(["model.gradient_checkpointing=true", *words])))


def test_a_model_without_checkpointing_says_so():
    from transformers import ViTForImageClassification

    before = ViTForImageClassification.supports_gradient_checkpointing
    ViTForImageClassification.supports_gradient_checkpointing = False
    try:
        with pytest.raises(UserError, match="knows no gradient checkpointing"):
            build_model(**given("vit"), dtype="float32", seed=0, checkpointing=True)
    finally:
        ViTForImageClassification.supports_gradient_checkpointing = before
