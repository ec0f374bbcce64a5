"""Formula (1), by hand and on real models, and the rules that choose layers by it."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.table import CONTINUED
from fedfrozen_app.models.profile import head_scores, layer_scores, relevant
from fedfrozen_app.models.task import Batch


def bert(**settings):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=16,
        **settings,
    )
    return BertForSequenceClassification(config)


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=8,
        pad_token_id=0,
    )
    return LlamaForSequenceClassification(config)


def texts(ids, mask):
    ids, mask = torch.tensor(ids), torch.tensor(mask)
    return Batch({"input_ids": ids, "attention_mask": mask}, torch.zeros(len(ids), dtype=torch.int64))


class Maps(nn.Module):
    """A model whose attention is given, so that the sums can be done by hand."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = [torch.tensor(layer) for layer in layers]

    def forward(self, input_ids, attention_mask, output_attentions):
        return SimpleNamespace(attentions=self.layers)


def test_formula_one_by_hand():
    # One text of two real tokens and a pad; one layer, two heads; rows are queries.
    first_head = [[0.9, 0.1, 0.0], [0.4, 0.6, 0.0], [0.5, 0.5, 0.0]]
    second_head = [[0.2, 0.8, 0.0], [0.3, 0.7, 0.0], [1.0, 0.0, 0.0]]
    even = [[0.5, 0.5, 0.0]] * 3
    model = Maps([[first_head, second_head]], [[even, even]])
    batch = texts([[5, 6, 0]], [[1, 1, 0]])
    # cls is token 0; the pad's row does not count: (0.9 + 0.4) / 2 and (0.2 + 0.3) / 2
    assert head_scores(model, batch, "cls")[0, 0].tolist() == pytest.approx([0.65, 0.25])
    # A_1 = 0.9 + 0.4 + 0.2 + 0.3 = 1.8, over 2 heads and 2 queries; A_2 = 2 over 4
    assert layer_scores(model, batch, "cls").tolist() == [pytest.approx([0.45, 0.5])]
    assert layer_scores(model, batch, "no_sink").tolist() == [pytest.approx([0.55, 0.5])]
    assert layer_scores(model, batch, [6]).tolist() == [pytest.approx([0.55, 0.5])]


def test_padding_changes_nothing():
    model = bert()
    short = texts([[1, 2, 3]], [[1, 1, 1]])
    padded = texts([[1, 2, 3, 0, 0]], [[1, 1, 1, 0, 0]])
    assert torch.allclose(layer_scores(model, short, "cls"), layer_scores(model, padded, "cls"), atol=1e-6)


def test_scores_are_shares_and_examples_do_not_mix():
    model = bert(hidden_dropout_prob=0.5)
    model.train()
    ids = torch.randint(1, 20, (40, 6), generator=torch.Generator().manual_seed(1))  # more than a chunk
    batch = texts(ids.tolist(), torch.ones_like(ids).tolist())
    scores = layer_scores(model, batch, "cls")
    assert scores.shape == (40, 3) and ((scores > 0) & (scores < 1)).all()
    assert model.training  # as it was
    alone = layer_scores(model, texts(ids[17:18].tolist(), [[1] * 6]), "cls")
    assert torch.allclose(scores[17], alone[0], atol=1e-6)  # no dropout either
    # cls and no_sink are complements: softmax rows sum to 1
    assert torch.allclose(scores + layer_scores(model, batch, "no_sink"), torch.ones(40, 3), atol=1e-5)


def test_a_causal_model_scores_what_is_no_sink():
    model, batch = llama(), texts([[3, 4, 5, 0]], [[1, 1, 1, 0]])
    scores = layer_scores(model, batch, "no_sink")
    # The first query sees only the first token: at most 2 of 3 queries look elsewhere.
    assert ((scores > 0) & (scores < 2 / 3)).all()


def test_sets_that_say_nothing_are_refused():
    model, batch = bert(), texts([[1, 2, 3]], [[1, 1, 1]])
    with pytest.raises(UserError, match="the same score"):
        layer_scores(model, batch, [1, 2, 3])
    with pytest.raises(UserError, match="labelled tokens"):
        layer_scores(model, batch, "entity")


def test_entity_tokens_with_their_later_pieces():
    labels = torch.tensor([[-100, 0, 3, CONTINUED, 4, 0, CONTINUED, -100, -100]])
    real = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1, 0]]).bool()
    found = relevant("entity", None, labels, real)
    assert found.int().tolist() == [[1, 0, 1, 1, 1, 0, 0, 0, 0]]  # the first token is [CLS]
