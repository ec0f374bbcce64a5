"""The stacked arrays of a step: views of the clients' rows, rounded once, gradients in their own columns."""

import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

from clients.apfl import APFL
from fedfrozen_app.exchange.block import Layout
from fedfrozen_app.local import round_work
from fedfrozen_app.local.parts import parts_of, rounded_names
from fedfrozen_app.vmap import attention, per_client_products
from tests.conftest import slowly

WORDS = ["runtime.runner=cohort", "client.local_steps=2", "num_rounds=1", "client.precision=bf16"]


def layout_and_rows():
    arrays = {"a.weight": torch.zeros(3, 5), "b": torch.zeros(()), "c": torch.zeros(64), "d": torch.zeros(7)}
    layout = Layout.of(arrays)
    generator = torch.Generator().manual_seed(0)
    return layout, torch.randn(4, layout.width, generator=generator, dtype=torch.float64)


def test_parts_and_their_gradients_are_those_of_plain_views():
    layout, rows = layout_and_rows()
    gradients = []
    for split in (layout.views, lambda given: parts_of(given, layout)):
        given = rows.clone().requires_grad_(True)
        parts = split(given)
        # "d" is read twice, "c" never.
        loss = (parts["a.weight"].sin().sum() * parts["b"].exp().sum()) + (parts["d"] ** 3 + parts["d"]).sum()
        gradients.append(torch.autograd.grad(loss, given)[0])
    assert torch.equal(*gradients)
    assert gradients[1][:, layout.spans[0] - 1].eq(0).all()  # padding


class Twice(nn.Module):
    """Reads one layer twice, another once."""

    def __init__(self):
        super().__init__()
        self.often, self.once = nn.Linear(6, 6), nn.Linear(6, 4, bias=False)

    def forward(self, rows):
        return self.once(self.often(self.often(rows).tanh()).tanh())


@pytest.mark.parametrize("lead", [(3,), (2, 3)], ids=["clients", "clients of runs"])
@pytest.mark.parametrize("rounded", [(), ("often.weight", "once.weight")], ids=["as they are", "rounded"])
def test_products_write_their_gradients_where_they_belong(lead, rounded, monkeypatch):
    model = Twice()
    layout = Layout.of(dict(model.named_parameters()))
    count = math.prod(lead)
    rows, seen = torch.randn(count, layout.width), torch.randn(*lead, 5, 6)
    places, place = [], per_client_products.GradientBuffer.place

    def noted(room, part):
        places.append(place(room, part))
        return places[-1]

    monkeypatch.setattr(per_client_products.GradientBuffer, "place", noted)

    def gradient(room):
        given = rows.clone().requires_grad_()
        parts = parts_of(given, layout, rounded, room=room)
        by_lead = {name: part.unflatten(0, lead) for name, part in parts.items()}

        def one(own, seen):
            if rounded:
                own = own | {name: own[name].float() for name in rounded if room is None}
            found = functional_call(model, own, (seen,))
            return found.float().square().sum()

        for _ in lead:
            one = vmap(one)
        ways = per_client_products.per_client_products(model, list(layout.names)) if room else nullcontext()
        with ways, per_client_products.offered(room), torch.autocast("cpu", enabled=bool(rounded and room)):
            losses = one(by_lead, seen)
        return torch.autograd.grad(losses.sum(), given)[0]

    found, expected = gradient(per_client_products.GradientBuffer()), gradient(None)
    # The layer that is read twice has a place for one of its gradients.
    assert [each is None for each in places] == [False, False, True]
    bound = 0.05 if rounded else 1e-5
    assert (found - expected).abs().max() <= bound * expected.abs().max()
    assert found[:, layout.spans[0] - 1].eq(0).all()  # padding


def test_rounded_parts_give_the_gradients_of_rounded_weights_in_full_precision():
    layout, rows = layout_and_rows()
    rows = rows.float().requires_grad_(True)
    parts = parts_of(rows, layout, {"a.weight"})
    assert {name: part.dtype for name, part in parts.items() if name != "a.weight"} == dict.fromkeys(
        ("b", "c", "d"), torch.float32
    )
    assert torch.equal(parts["a.weight"], layout.views(rows)["a.weight"].bfloat16())
    (gradient,) = torch.autograd.grad((parts["a.weight"] * 3).float().sum() + parts["d"].sum(), rows)
    found = layout.views(gradient)
    assert gradient.dtype == torch.float32
    assert found["a.weight"].eq(3).all() and found["d"].eq(1).all() and found["c"].eq(0).all()


def test_only_what_products_alone_read_is_rounded():
    model = nn.Module()
    model.words, model.norm = nn.Embedding(4, 8), nn.LayerNorm(8)
    model.dense, model.tied = nn.Linear(8, 8), nn.Linear(8, 4)
    model.tied.weight = model.words.weight  # embeddings are not rounded by autocast
    model.exact = nn.Linear(8, 8)

    def run():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            seen = model.tied(model.dense(model.norm(model.words(torch.arange(4)))))
            with torch.autocast("cpu", enabled=False):
                model.exact(torch.zeros(1, 8))
        return seen

    assert rounded_names(model, run) == {"dense.weight", "dense.bias", "tied.bias"}


@pytest.mark.parametrize("strategy", ["apfl", *slowly("fedavg", "fedprox", "ditto", "moon")])
def test_attention_of_stacked_clients_is_given_bf16(train, monkeypatch, strategy):
    plain, given = attention.scaled_dot_product_attention, []

    def spied(*tensors, **settings):
        given.extend(tensor.dtype for tensor in tensors[:3])
        return plain(*tensors, **settings)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", spied)
    train(*WORDS, f"strategy={strategy}")
    assert set(given) == {torch.bfloat16}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fedavg", "fedprox", "apfl"])
def test_bf16_of_stacked_clients_is_that_of_one_after_another(train, strategy):
    """Both lie about as far from float32; what is rounded is the same."""
    words = [*WORDS[:3], f"strategy={strategy}", "client=sgd"]
    exact = train(*words, folder="exact").model
    sequential = train(*words, WORDS[3], "runtime.runner=sequential", folder="sequential").model
    stacked = train(*words, WORDS[3], folder="stacked").model
    apart = [
        sum(float((one[n] - exact[n]).square().sum()) for n in exact) ** 0.5 for one in (sequential, stacked)
    ]
    assert 0 < apart[1] <= 1.5 * apart[0]


@pytest.mark.slow
def test_frozen_convolutions_of_stacked_clients_in_bf16(train):
    """Rounded as trained ones are, which only autocast outside of a stack does by itself."""
    stages = "strategy.stages=[{from:1,name:all,freeze:[embedding]}]"
    small = ("num_clients=3", "dataset.limit=160", "partition.min_size=8", "model=simple_cnn", "client=sgd")
    run = train(*WORDS, *small, "strategy=schedule", stages, small=False)
    assert run.rows[1]["clients_ok"] == 3


def test_a_look_that_fails_leaves_the_model_training(train, monkeypatch):
    plain, seen = round_work.adapt_rows, []

    def spied(worker, *given):
        before = worker.model.training
        try:
            return plain(worker, *given)
        finally:
            seen.append((before, worker.model.training))

    def fails(self, *given):
        raise RuntimeError("seen enough")

    monkeypatch.setattr(round_work, "adapt_rows", spied)
    monkeypatch.setattr(APFL, "first_batch_loss", fails)
    with pytest.raises(RuntimeError, match="seen enough"):
        train("strategy=apfl", "runtime.runner=cohort", "num_rounds=1")
    assert seen == [(True, True)]
