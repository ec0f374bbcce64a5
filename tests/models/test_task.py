"""Losses and figures of the text tasks, by hand and on real models."""

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from fedfrozen_app.data.table import CONTINUED, IGNORED, Table
from fedfrozen_app.models.task import Batch, Task
from fedfrozen_app.tasks.target import target_of

TAGS = ("O", "B-problem", "I-problem", "B-test", "I-test")


class Given(torch.nn.Module):
    """A model whose logits are its only parameter."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor(logits))

    def forward(self, **inputs):
        return self


def loss_of(kind, logits, labels, mask=None):
    task = Task(Given(logits), kind=kind)
    return task.loss({}, Batch({}, torch.tensor(labels), None, mask)).item()


def test_several_labels_are_judged_one_by_one():
    # Row 1: -log σ(0) twice; row 2: -log σ(2) and -log(1 - σ(-1)).
    second = (math.log1p(math.exp(-2)) + math.log1p(math.exp(-1))) / 2
    expected = (math.log(2) + second) / 2
    assert loss_of("multilabel", [[0.0, 0.0], [2.0, -1.0]], [[1, 0], [1, 0]]) == pytest.approx(expected)


def test_tokens_are_averaged_within_their_sentence_first():
    """So that a long neighbour changes nothing: what per-example privacy needs."""
    logits = [[[0.0, 0.0]] * 4, [[math.log(3), 0.0]] * 4]
    labels = [[0, 1, CONTINUED, IGNORED], [0, IGNORED, IGNORED, IGNORED]]
    expected = (math.log(2) + math.log(4 / 3)) / 2
    assert loss_of("tokens", logits, labels) == pytest.approx(expected)
    assert loss_of("tokens", logits, labels, torch.tensor([0.0, 1.0])) == pytest.approx(math.log(4 / 3))
    nothing = [[IGNORED] * 4] * 2
    assert loss_of("tokens", logits, nothing) == 0.0


def test_strict_entities():
    labels = torch.tensor([[IGNORED, 1, 2, CONTINUED, 0, 3, IGNORED], [IGNORED, 1, 0, 0, 0, 0, IGNORED]])
    exact = labels.clamp(min=0)
    assert target_of("tokens").measure(exact, labels, TAGS) == {"f1": 1.0}
    short = exact.clone()
    short[0, 2] = 0  # "problem" ends too early: wrong, though most of its words are right
    # 3 true entities, 3 said, 2 right
    assert target_of("tokens").measure(short, labels, TAGS)["f1"] == pytest.approx(2 / 3)
    loose = exact.clone()
    loose[1, 1] = 2  # an I without a B is no entity in strict reading: 2 right, 2 said, 3 true
    assert target_of("tokens").measure(loose, labels, TAGS)["f1"] == pytest.approx(2 * 2 / (2 + 3))
    pieces = exact.clone()
    pieces[0, 3] = 4  # what it says of a word's later pieces is not looked at
    assert target_of("tokens").measure(pieces, labels, TAGS) == {"f1": 1.0}


def test_micro_and_macro_f1():
    labels = torch.tensor([[1, 1, 0], [1, 0, 0]])
    said = torch.tensor([[1, 0, 0], [1, 0, 1]]).bool()
    found = target_of("multilabel").measure(said, labels, ("a", "b", "c"))
    assert found["f1"] == pytest.approx(4 / 6)  # 2 right; 3 said; 3 true
    assert found["f1_macro"] == pytest.approx(1 / 3)
    one = target_of("text").measure(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]), ("a", "b"))
    assert one == {"accuracy": pytest.approx(2 / 3), "f1_macro": pytest.approx(2 / 3)}
    assert target_of("image").measure(torch.tensor([0]), torch.tensor([1]), ("a", "b")) == {"accuracy": 0.0}


def test_a_decoder_answers_from_its_last_real_token():
    torch.manual_seed(0)
    config = LlamaConfig(
        **{"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 2, "intermediate_size": 8},
        **{"num_attention_heads": 2, "pad_token_id": 0, "num_labels": 3},
    )
    model = LlamaForSequenceClassification(config).eval()

    def logits(ids, mask):
        return model(input_ids=torch.tensor([ids]), attention_mask=torch.tensor([mask])).logits

    short = logits([5, 6, 7], [1, 1, 1])
    assert torch.allclose(short, logits([5, 6, 7, 0, 0], [1, 1, 1, 0, 0]), atol=1e-6)
    assert not torch.allclose(short, logits([5, 6, 8], [1, 1, 1]), atol=1e-6)


def test_predictions_have_the_shape_of_the_labels():
    task = Task(Given([[1.0, -1.0], [-2.0, 3.0]]), kind="multilabel", classes=("a", "b"))
    loss, said = task.predict(Table({"x": torch.zeros(2)}, torch.tensor([[1, 0], [0, 1]])))
    assert said.tolist() == [[True, False], [False, True]] and loss > 0
    assert task.headline == "f1" and Task(Given([[0.0]]), kind="text").headline == "accuracy"
