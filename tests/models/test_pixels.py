"""The small convolutional network, with and without dropout."""

import pytest
import torch

from fedfrozen_app.data.table import InputShape
from fedfrozen_app.errors import UserError
from fedfrozen_app.models.pixels import cnn, linear
from fedfrozen_app.models.spec import ModelSpec

SHAPE = InputShape("image", ("a", "b", "c"), channels=1, image_size=8)


def spec(source="cnn", **config):
    return ModelSpec(source, SHAPE, config=config)


def test_without_dropout_training_draws_nothing_and_the_weights_are_the_same():
    torch.manual_seed(0)
    plain = cnn(spec(dropout=False)).train()
    torch.manual_seed(0)
    usual = cnn(spec()).train()
    usual.load_state_dict(plain.state_dict())
    pictures = torch.randn(4, 1, 8, 8)
    before = torch.get_rng_state()
    assert torch.equal(plain(pictures).logits, usual.eval()(pictures).logits)
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.equal(usual.train()(pictures).logits, usual(pictures).logits)  # two draws


def test_a_setting_that_they_have_not_is_refused():
    with pytest.raises(UserError, match="no settings but dropout: remove width"):
        cnn(spec(width=3))
    with pytest.raises(UserError, match="must be true or false"):
        cnn(spec(dropout=0.3))
    with pytest.raises(UserError, match="the linear model has no settings: remove dropout"):
        linear(spec("linear", dropout=False))
