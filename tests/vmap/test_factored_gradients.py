"""Weights that few rows meet: their slopes stay factors. The kernels themselves are a GPU's: test_gpu.py."""

import weakref

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

from fedfrozen_app.local import step_optimizer
from fedfrozen_app.vmap import factored_gradients
from fedfrozen_app.vmap.factored_gradients import FactoredGradients, descend, keep_factored, wide_layers
from fedfrozen_app.vmap.per_client_products import per_client_products
from tests.conftest import slowly

WORDS = ["model=simple_cnn", "dataset.limit=200", "runtime.runner=cohort", "client=sgd", "client.momentum=0"]
WORDS += ["strategy=fedavg", "client.weight_decay=0", "client.lr=0.1", "num_rounds=2", "participation=0.5"]
WORDS += ["num_clients=4", "partition.min_size=8", "client.batch_size=8", "dataset=digits"]


@pytest.fixture
def asked(monkeypatch):
    """On a CPU, and for small layers; of whom the slopes stayed factors."""
    monkeypatch.setattr(step_optimizer, "DESCENT_ON", ("cpu",))
    monkeypatch.setattr(factored_gradients, "LEAST", 1000)
    asked = []
    monkeypatch.setattr(
        step_optimizer, "descend", lambda weight, *given: (asked.append(weight), descend(weight, *given))
    )
    return asked


def test_a_run_by_factors_is_the_same_run(train, asked, monkeypatch):
    quick = train(*WORDS, folder="quick", small=False)
    assert {tuple(weight.shape[1:]) for weight in asked} == {(128, 256)}  # the classifier is too small
    monkeypatch.setattr(step_optimizer, "DESCENT_ON", ())
    asked.clear()
    usual = train(*WORDS, folder="usual", small=False)
    assert not asked
    for name, value in usual.model.items():
        assert torch.allclose(quick.model[name], value, atol=1e-6), name
    assert [row["train_loss"] for row in quick.rows[1:]] == pytest.approx(
        [row["train_loss"] for row in usual.rows[1:]]
    )


@pytest.mark.parametrize(
    "word",
    [
        *("client.clip=1", "strategy=fedprox"),
        *slowly("client.momentum=0.9", "client.weight_decay=0.1", "client=adamw"),
        *slowly("client.head_lr=0.2", "client.precision=bf16"),
    ],
)
def test_whoever_does_more_than_descend_has_slopes(train, asked, word):
    train(*WORDS, word, "num_rounds=1", small=False)
    assert not asked


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, rows):
        return self.layer(self.layer(rows).tanh()) + (rows @ self.layer.weight.T)


def test_weights_that_are_read_several_times_lose_nothing(monkeypatch):
    """One product's slope stays factors; what the others make is a slope, and both are taken off."""
    monkeypatch.setattr(factored_gradients, "LEAST", 1000)
    model, rows = Twice().double(), torch.randn(3, 4, 64, dtype=torch.float64)
    weight = torch.randn(3, 64, 64, dtype=torch.float64).requires_grad_()
    bias = torch.randn(3, 64, dtype=torch.float64)

    def loss(weight, bias, rows):
        given = {"layer.weight": weight, "layer.bias": bias}
        return functional_call(model, given, (rows,)).square().sum()

    (expected,) = torch.autograd.grad(vmap(loss)(weight, bias, rows).sum(), weight)
    kept = FactoredGradients({"layer.weight": weight})
    with per_client_products(model, wide_layers(model, ["layer.weight"])), keep_factored(kept):
        (gradient,) = torch.autograd.grad(vmap(loss)(weight, bias, rows).sum(), weight)
    assert list(kept.factors) == ["layer.weight"] and not torch.allclose(gradient, expected)
    moved = weight.detach() - 0.5 * gradient
    descend(moved, kept.factors["layer.weight"], torch.tensor([0.5]))
    assert torch.allclose(moved, weight.detach() - 0.5 * expected, atol=1e-12, rtol=1e-12)


def test_what_a_step_has_kept_ends_with_it(monkeypatch):
    """Factors that knew how their rows were made would hold the weights of layers before them for ever."""
    monkeypatch.setattr(factored_gradients, "LEAST", 1000)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    parts = {name: torch.randn(3, *value.shape).requires_grad_() for name, value in model.named_parameters()}
    kept = FactoredGradients(parts)
    with per_client_products(model, wide_layers(model, parts)), keep_factored(kept):
        losses = vmap(lambda given, rows: functional_call(model, given, (rows,)).square().sum())(
            parts, torch.randn(3, 4, 64)
        )
    torch.autograd.grad(losses.sum(), list(parts.values()), allow_unused=True)
    assert set(kept.factors) == {"0.weight", "2.weight"}
    left = [weakref.ref(each) for each in (kept, *kept.factors["2.weight"], parts["0.weight"])]
    del kept, losses, parts
    assert [each() for each in left] == [None] * 4


def test_each_run_s_clients_move_at_its_rate():
    weight, rates = torch.zeros(4, 3, 5), torch.tensor([1.0, 10.0])
    gradients, rows = torch.randn(4, 2, 3), torch.randn(4, 2, 5)
    descend(weight, (gradients, rows), rates)
    expected = -torch.bmm(gradients.mT, rows) * torch.tensor([1.0, 1.0, 10.0, 10.0]).view(-1, 1, 1)
    assert torch.allclose(weight, expected)


@pytest.mark.parametrize("count, wide, fits", [(10, 12544, True), (65, 12544, False), (40, 256, False)])
def test_factors_are_kept_where_they_are_much_smaller(count, wide, fits, monkeypatch):
    monkeypatch.setattr(factored_gradients, "LEAST", 1000)
    weight, rows = torch.empty(1, 128, wide), torch.empty(1, count, wide)
    assert FactoredGradients({"weight": weight}).suits(rows, weight) is fits
    assert not FactoredGradients({"other": torch.empty(1, 128, wide)}).suits(rows, weight)
