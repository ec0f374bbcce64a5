"""A language model's loss and figures, against values worked out by hand."""

import math

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.table import IGNORED, InputShape, Table
from fedfrozen_app.models.build import build_model
from fedfrozen_app.models.export import export_model
from fedfrozen_app.models.roles import roles_of
from fedfrozen_app.models.task import Batch, Task
from tests.models.conftest import SETTINGS

LANGUAGE = InputShape("language", (), vocab_size=20, max_tokens=8, pad_token_id=0)


def build(model_type, dtype="float64", **more):
    config = {**SETTINGS[model_type], **more}
    return build_model(
        source="config", path=None, model_type=model_type, config=config, shape=LANGUAGE, dtype=dtype, seed=0
    )


class Says(nn.Module):
    """Scores that are given: row by row and token by token those of the token's own number."""

    def __init__(self, scores):
        super().__init__()
        self.scores = nn.Parameter(scores, requires_grad=False)  # (vocabulary, vocabulary)
        self.config = type("Config", (), {"vocab_size": len(scores)})()

    def forward(self, input_ids, attention_mask):
        return type("Answer", (), {"logits": self.scores[input_ids]})()


# After token 1 the model says 2 with 3/4, after 2 it says 1 and 2 alike, after 0 anything.
SCORES = torch.log(torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 6.0], [1e-300, 1.0, 1.0]], dtype=torch.float64))
ROWS = Table(
    {"input_ids": torch.tensor([[1, 2, 2, 1], [1, 1, 0, 0]]), "attention_mask": torch.ones(2, 4).long()},
    torch.tensor([[IGNORED, 2, 2, 1], [1, 1, IGNORED, IGNORED]]),  # a first token's label counts for nothing
)
# Row 0: 2 after 1 (3/4), 2 after 2 (1/2), 1 after 2 (1/2). Row 1: 1 after 1 (1/8).
NEGATIVE = [-math.log(3 / 4) + 2 * math.log(2), math.log(8)]


def test_the_loss_is_a_mean_over_tokens_and_each_example_s_own_over_its_own():
    task = Task(Says(SCORES), kind="language")
    each = task.losses(SCORES[ROWS.inputs["input_ids"]], ROWS.labels)
    assert each.tolist() == pytest.approx([NEGATIVE[0] / 3, NEGATIVE[1]])
    batch = Batch(ROWS.inputs, ROWS.labels)
    assert float(task.loss({}, batch)) == pytest.approx(sum(NEGATIVE) / 4)
    only_first = Batch(ROWS.inputs, ROWS.labels, mask=torch.tensor([1.0, 0.0]))
    assert float(task.loss({}, only_first)) == pytest.approx(NEGATIVE[0] / 3)
    nothing = Batch(ROWS.inputs, ROWS.labels, mask=torch.zeros(2))
    assert float(task.loss({}, nothing)) == 0.0


def test_figures_are_by_tokens_and_do_not_depend_on_how_many_rows_are_read_at_once():
    task = Task(Says(SCORES), kind="language")
    found = task.evaluate(ROWS)
    assert found["loss"] == pytest.approx(sum(NEGATIVE) / 4)
    assert found["perplexity"] == pytest.approx(math.exp(sum(NEGATIVE) / 4))
    assert found["tokens"] == 4
    # After 1 it says 2: right once, wrong once. After 2 it says 1 or 2, whichever it finds first: right once.
    assert found["accuracy"] == pytest.approx(2 / 4)
    one, two = task.predict(ROWS, 1), task.predict(ROWS, 2)
    assert one[0] == pytest.approx(two[0]) and torch.equal(one[1], two[1])
    assert task.headline == "accuracy"


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_the_loss_is_transformers_own(model_type):
    model = build(model_type)
    ids = torch.randint(1, 20, (3, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    labels = ids.masked_fill(mask == 0, IGNORED)
    labels[:, :2] = IGNORED
    task = Task(model, kind="language", loaded=dict(model.named_parameters()))
    inputs = {"input_ids": ids, "attention_mask": mask}
    ours = task.loss(dict(model.named_parameters()), Batch(inputs, labels))
    assert float(ours.detach()) == pytest.approx(
        float(model(**inputs, labels=labels).loss.detach()), rel=1e-6
    )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_a_head_is_a_head_unless_it_is_the_embedding(model_type, tied):
    roles = roles_of(build(model_type, tie_word_embeddings=tied))
    assert ("lm_head.weight" in roles) == (not tied)
    assert {role.kind for role in roles.values()} >= {"query", "key", "value", "embedding"}
    if not tied:
        assert roles["lm_head.weight"].kind == "head"


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_an_export_loads_in_transformers_and_says_the_same(model_type, tmp_path):
    model = build(model_type, dtype="float32")
    export_model(model, tmp_path, ())
    twin = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(1, 8)[None]
    with torch.no_grad():
        assert torch.allclose(twin(ids).logits, model(ids).logits, atol=1e-6)
    assert twin.config.use_cache
    assert "lm_head" not in str([name for name, _ in twin.named_parameters()]) or model_type == "llama"


def test_a_model_of_two_bytes_has_a_loss_of_four():
    model = build("llama", dtype="bfloat16")
    task = Task(model, kind="language", loaded=(parameters := dict(model.named_parameters())))
    ids = torch.arange(1, 9)[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    loss = task.loss(parameters, Batch(inputs, ids))
    assert loss.dtype is torch.float32 and task.evaluate(Table(inputs, ids))["loss"] == pytest.approx(
        float(loss.detach()), rel=1e-6
    )


def test_a_model_that_sees_what_comes_next_is_refused():
    with pytest.raises(UserError, match="sees a text's next tokens"):
        build("bert")
