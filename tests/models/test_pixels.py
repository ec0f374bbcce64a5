"""The small convolutional networks, with and without dropout."""

from dataclasses import replace

import pytest
import torch
from torch.func import vmap

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.table import InputShape
from fedfrozen_app.models.pixels import cnn, lenet, linear, moderate_cnn
from fedfrozen_app.models.roles import roles_of
from fedfrozen_app.models.spec import ModelSpec
from tests.conftest import slowly
from tests.local.runners import RUNNERS, THREE_ROUNDS, compare

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


@pytest.mark.parametrize(("build", "count"), [(lenet, 62_006), (moderate_cnn, 3_491_530)])
def test_the_networks_of_others_have_their_sizes(build, count):
    """Counted by hand from what they publish."""
    cifar = InputShape("image", tuple("abcdefghij"), channels=3, image_size=32)
    model = build(ModelSpec(build.__name__, cifar))
    assert sum(value.numel() for value in model.parameters()) == count
    assert model(torch.zeros(2, 3, 32, 32)).logits.shape == (2, 10)
    assert {role.kind for role in roles_of(model).values()} == {"embedding", "mlp", "head"}
    with pytest.raises(UserError, match=r"needs pictures of \d+ pixels a side, and these have 7"):
        build(ModelSpec(build.__name__, replace(cifar, image_size=7)))


SMALL_RUN = [
    *("strategy=fedavg", "client=sgd", "client.local_steps=1", "client.batch_size=4", "model.dtype=float64"),
    *("dataset.limit=40", "dataset.image_size=16", "num_clients=2", "partition=iid", *THREE_ROUNDS),
]


@pytest.mark.parametrize("model", ["lenet", *slowly("moderate_cnn")])
def test_both_runners_train_them_alike(train, model):
    without = ["+model.config.dropout=false"] if model == "moderate_cnn" else []
    words = [*SMALL_RUN, f"model={model}", *without]
    one, other = (train(*words, f"runtime.runner={r}", folder=r, small=False) for r in RUNNERS)
    compare(one, other, 1e-9, per_tensor=True)


def test_clients_side_by_side_drop_channels_and_units_of_their_own():
    model = moderate_cnn(ModelSpec("moderate_cnn", SHAPE)).train()
    same = torch.randn(1, 2, 1, 8, 8).repeat(2, 1, 1, 1, 1)
    found = vmap(lambda pictures: model(pictures).logits, randomness="different")(same)
    assert not torch.equal(*found) and torch.isfinite(found).all()
