"""Ghost clipping gives the clipped sums of the per-example way, and is refused where it could not."""

import math

import pytest
import torch
from torch import nn

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.table import Table
from fedfrozen_app.exchange.role import is_embedding
from fedfrozen_app.models.roles import roles_of
from fedfrozen_app.models.task import Task
from fedfrozen_app.privacy.example_gradients import ExampleGradients, plain_loss
from fedfrozen_app.privacy.ghost import GhostClipping
from tests.models.conftest import SETTINGS
from tests.privacy.dpsgd_steps import norm, parts, steps, task_of

SAFL = ("strategy=safl", "strategy.top_k=1", "privacy=dp_sgd", "privacy.seeded_noise=true", "num_rounds=1")


def layers_and_head(model: nn.Module) -> list[str]:
    """What SAFL trains when K = L."""
    return [name for name, role in roles_of(model).items() if not is_embedding(role)]


def clipped(model, inputs, labels, names, bound):
    """The clipped sum, from every single example's gradient."""
    _, gradients = ExampleGradients(model, task_of(model), names, plain_loss)(inputs, labels)
    norms = torch.stack([value.flatten(1).norm(dim=1) for value in gradients.values()]).norm(dim=0)
    factor = (bound / (norms + 1e-6)).clamp(max=1.0)
    return norms, {name: torch.einsum("e...,e->...", value, factor) for name, value in gradients.items()}


@pytest.mark.parametrize("model_type", SETTINGS)
def test_clipped_sums_are_those_of_single_examples(model_type):
    model, inputs, labels = parts(model_type)
    names = layers_and_head(model)
    norms, _ = clipped(model, inputs, labels, names, 1.0)
    bound = float(norms.median())  # some are clipped, some are not
    assert norms.min() < bound < norms.max()
    _, expected = clipped(model, inputs, labels, names, bound)
    parameters = {name: value for name, value in model.named_parameters() if name in names}
    ghost = GhostClipping(model, task_of(model), names, bound)
    losses = ghost.load(Table(inputs, labels), torch.arange(len(labels)), parameters)
    assert losses.shape == (4,)
    for name, value in parameters.items():
        torch.testing.assert_close(value.grad, expected[name], rtol=1e-4, atol=1e-5 * bound)


@pytest.mark.parametrize("task", ["classification", "multilabel", "entities"])
@pytest.mark.slow
def test_a_round_ends_with_the_same_model(train, task):
    words = (*SAFL, "model=bert_tiny", "dataset.limit=60", "partition.min_size=4", f"dataset.task={task}")
    one, other = (
        train(*words, "client=sgd", "client.local_steps=2", f"privacy.clipping={way}", folder=way).model
        for way in ("per_example", "ghost")
    )
    assert any(name.startswith("classifier") for name in one)
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=0, atol=1e-5)


def ghostly(model, table, names, **settings):
    return steps(
        model,
        table,
        trained=names,
        make=lambda own, bound: GhostClipping(own, task_of(own), names, bound),
        **settings,
    )


def test_steps_are_the_same_in_any_chunks_noise_and_all():
    model, inputs, labels = parts("llama")
    table, names = Table(inputs, labels), layers_and_head(model)
    expected = steps(model, table, trained=names, noise=0.5, max_grad_norm=0.1, steps=2)
    for size in (1, 3, 4):
        found = ghostly(model, table, names, noise=0.5, max_grad_norm=0.1, steps=2, physical_batch=size)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
            assert (name in names) == bool(found[name].abs().max() > 0)


def test_an_outlier_is_clipped_and_an_empty_sample_is_noise_alone():
    model, inputs, labels = parts("vit")
    inputs["pixel_values"][0] *= 1e4
    one, names = Table({"pixel_values": inputs["pixel_values"][:1]}, labels[:1]), layers_and_head(model)
    assert norm(ghostly(model, one, names, max_grad_norm=1e9)) > 0.05
    assert norm(ghostly(model, one, names, max_grad_norm=0.01)) <= 0.01 * (1 + 1e-6)
    empty = ghostly(model, one, names, rate=0.0, noise=1.0)
    assert float(torch.cat([empty[name].flatten() for name in names]).std()) == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("model_type", ["bert", "llama"])
def test_an_example_that_overflows_gives_no_gradient(model_type):
    model, inputs, labels = parts(model_type)
    names, words = layers_and_head(model), inputs["input_ids"]
    words[words == 13] = 12
    words[1, 0] = 13
    model.get_input_embeddings().weight.data[13] = math.inf
    rest = torch.tensor([0, 2, 3])
    for way in (ghostly, lambda *args, **more: steps(*args[:2], trained=names, **more)):
        whole = way(model, Table(inputs, labels), names, physical_batch=4)
        expected = way(model, Table(inputs, labels).take(rest), names, physical_batch=4)
        assert norm({name: expected[name] for name in names}) > 0.05
        for name in names:
            torch.testing.assert_close(whole[name], expected[name], rtol=1e-4, atol=1e-9)
        alone = way(model, Table(inputs, labels).take(torch.tensor([1])), names)
        assert norm({name: alone[name] for name in names}) == 0


def test_the_model_is_left_as_it_was():
    model, inputs, labels = parts("bert")
    names = layers_and_head(model)
    before = {name: (value.requires_grad, set(vars(value))) for name, value in model.named_parameters()}
    modules = {name: (part.training, len(part._forward_hooks)) for name, part in model.named_modules()}
    parameters = {name: value for name, value in model.named_parameters() if name in names}
    GhostClipping(model, task_of(model), names, 1.0).load(
        Table(inputs, labels), torch.arange(len(labels)), parameters
    )
    after = {name: (value.requires_grad, set(vars(value))) for name, value in model.named_parameters()}
    assert after == before
    assert modules == {name: (p.training, len(p._forward_hooks)) for name, p in model.named_modules()}


@pytest.mark.slow
def test_where_norms_cannot_be_read_off_it_is_refused(train):
    model, _, _ = parts("bert")
    task = Task(model)
    for name in ("bert.embeddings.word_embeddings.weight", "bert.embeddings.position_embeddings.weight"):
        with pytest.raises(UserError, match=r"privacy.clipping=ghost .*\(Embedding\)"):
            GhostClipping(model, task, [name], 1.0)
    with pytest.raises(UserError, match=r"privacy.clipping=ghost .*cls_token"):
        train("strategy=fedavg", *SAFL[2:], "privacy.clipping=ghost")
    with pytest.raises(UserError, match="plain loss alone, not that of fedprox"):
        train("strategy=fedprox", *SAFL[2:], "privacy.clipping=ghost")
    with pytest.raises(UserError, match=r"client.precision=bf16"):
        train(*SAFL, "privacy.clipping=ghost", "client.precision=bf16")
    with pytest.raises(UserError, match=r"privacy.clipping=magic"):
        train(*SAFL, "privacy.clipping=magic")
