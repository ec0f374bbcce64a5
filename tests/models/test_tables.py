"""Models of tables: their inputs, their roles, and that each example's gradient is its own."""

import numpy as np
import pytest
import torch

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.table import InputShape, Table
from fedfrozen_app.models.build import build_model
from fedfrozen_app.models.profile import layer_scores
from fedfrozen_app.models.roles import head_of, roles_of
from fedfrozen_app.models.table_models import TableInputs
from fedfrozen_app.models.task import Batch, Task
from fedfrozen_app.privacy.dpsgd import Recipe, train_steps
from fedfrozen_app.privacy.example_gradients import ExampleGradients
from fedfrozen_app.privacy.ghost import GhostClipping
from fedfrozen_app.privacy.noise import SeededNoise
from tests.privacy.dpsgd_steps import plain

SMALL = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
CONFIGS = {"linear": {}, "mlp": {"hidden_size": 8}, "ft_transformer": SMALL}
KINDS = {"table": ("a", "b", "c"), "regression": (), "survival_discrete": (), "survival": ()}
PER_EXAMPLE = [kind for kind in KINDS if kind != "survival"]
SETTINGS = {"survival_discrete": {"edges": [1.0, 2.0, 3.0]}}
INPUTS = {
    "numbers": torch.tensor([[0.5, -1.0], [2.0, 0.1], [0.0, 0.3], [-1.0, 1.0]], dtype=torch.float64),
    "categories": torch.tensor([[0, 1], [2, 0], [1, 1], [2, 0]]),
}
LABELS = {
    "table": torch.tensor([0, 1, 2, 1]),
    "regression": torch.tensor([0.5, 2.0, -1.0, 0.0], dtype=torch.float64),
    "survival_discrete": torch.tensor([[1.0, 1], [2.5, 0], [9, 1], [3, 1]], dtype=torch.float64),
}


def task_of(source, kind="table", **config):
    shape = InputShape(kind, KINDS[kind], numbers=2, levels=(3, 2), settings=SETTINGS.get(kind, {}))
    model = build_model(
        source=source,
        path=None,
        model_type=None,
        config=CONFIGS[source] | config,
        shape=shape,
        dtype="float64",
        seed=0,
    )
    return Task(model, kind=kind, settings=shape.settings, classes=shape.classes)


def names_of(task):
    return [name for name, _ in task.model.named_parameters()]


def test_a_category_is_its_levels_but_the_first():
    found = TableInputs(task_of("linear").model.config)(INPUTS["numbers"], INPUTS["categories"])
    assert found[:, 2:].tolist() == [[0, 0, 1], [0, 1, 0], [1, 0, 1], [0, 1, 0]]


@pytest.mark.parametrize("source", CONFIGS)
def test_every_parameter_has_a_role(source):
    model = task_of(source).model
    kinds = {role.kind for role in roles_of(model).values()}
    known = {
        "linear": {"head"},
        "mlp": {"mlp", "head"},
        "ft_transformer": {"embedding", "query", "key", "value", "output", "mlp", "norm", "head"},
    }
    assert kinds == known[source]
    assert head_of(model, roles_of(model)) is model.classifier


def test_the_roles_of_ft_transformer_name_its_layers():
    roles = roles_of(task_of("ft_transformer").model)
    assert roles["layers.1.attention.q_proj.weight"].layer == 1
    assert roles["layers.0.layernorm_before.weight"].feeds_attention
    assert not roles["layernorm.weight"].feeds_attention


@pytest.mark.parametrize("source", CONFIGS)
def test_a_cox_model_has_no_intercept(source):
    """It cancels in the likelihood, so that rounding noise alone would move it."""
    model = task_of(source, "survival").model
    assert "classifier.bias" not in dict(model.named_parameters())
    assert model(**INPUTS).logits.shape == (4, 1)


def test_a_reference_class_makes_logistic_regression_with_one_logit():
    """Against torch's own: one linear layer, a sigmoid and the binary cross-entropy."""
    shape = InputShape("table", ("well", "ill"), numbers=2, levels=(3, 2))
    model = build_model(
        source="linear", path=None, model_type=None, config={"reference": True}, shape=shape, dtype="float64",
        seed=7,
    )  # fmt: skip
    torch.manual_seed(7)
    plain_layer = torch.nn.Linear(5, 1).double()
    assert torch.equal(model.classifier.weight, plain_layer.weight)
    assert torch.equal(model.classifier.bias, plain_layer.bias)
    labels = torch.tensor([0, 1, 1, 0])
    task = Task(model, kind="table", settings={}, classes=shape.classes)
    own = task.loss(dict(model.named_parameters()), Batch(INPUTS, labels))
    answer = plain_layer(model.inputs(**INPUTS))[:, 0].sigmoid()
    theirs = torch.nn.functional.binary_cross_entropy(answer, labels.double())
    torch.testing.assert_close(own, theirs, rtol=1e-12, atol=0)
    gradients = torch.autograd.grad(own, list(model.parameters()))
    expected = torch.autograd.grad(theirs, list(plain_layer.parameters()))
    torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    ("kind", "value", "sentence"),
    [("survival", True, "needs one class for each row"), ("table", 1, "must be true or false")],
)
def test_a_reference_class_that_cannot_be_is_refused(kind, value, sentence):
    with pytest.raises(UserError, match=sentence):
        task_of("linear", kind, reference=value)


def test_a_token_for_each_column_and_one_that_reads_them():
    task = task_of("ft_transformer")
    tokens = task.model.embeddings(INPUTS["numbers"], INPUTS["categories"])
    assert tokens.shape == (4, 5, 8)
    own = dict(task.model.embeddings.named_parameters())
    torch.testing.assert_close(tokens[1, 1], 2.0 * own["number_weights"][0] + own["number_biases"][0])
    torch.testing.assert_close(tokens[1, 4], own["level_embeddings"][3] + own["level_biases"][1])
    other = INPUTS | {"categories": INPUTS["categories"].flip(0)}
    changed = task.model.embeddings(**other)
    assert torch.equal(changed[:, :3], tokens[:, :3])


def test_layers_are_scored_by_their_attention():
    """What SAFL chooses layers by: as by hand from the maps that the model gives."""
    task = task_of("ft_transformer")
    found = layer_scores(task.model, Batch(INPUTS, LABELS["table"]), "cls")
    with torch.no_grad():
        task.model.config._attn_implementation = "eager"
        maps = task.model(**INPUTS, output_attentions=True).attentions
    expected = torch.stack([part[:, :, :, 0].mean(dim=(1, 2)) for part in maps], dim=1)
    torch.testing.assert_close(found, expected.to(found), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", PER_EXAMPLE)
@pytest.mark.parametrize("source", CONFIGS)
def test_example_gradients_are_those_of_batches_of_one(source, kind):
    task, labels = task_of(source, kind), LABELS[kind]
    names = names_of(task)
    losses, found = ExampleGradients(task.model, task, names, plain)(INPUTS, labels)
    for number in range(len(labels)):
        part = {key: value[number : number + 1] for key, value in INPUTS.items()}
        loss = task.loss(dict(task.model.named_parameters()), Batch(part, labels[number : number + 1]))
        own = torch.autograd.grad(loss, list(task.model.parameters()), materialize_grads=True)
        torch.testing.assert_close(losses[number], loss.detach(), rtol=1e-10, atol=1e-14)
        for name, gradient in zip(names, own, strict=True):
            torch.testing.assert_close(found[name][number], gradient, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("source", CONFIGS)
def test_ghost_clipping_gives_the_sum_of_clipped_examples(source):
    task, labels = task_of(source), LABELS["table"]
    names = [name for name in names_of(task) if not name.startswith("embeddings")]
    _, each = ExampleGradients(task.model, task, names, plain)(INPUTS, labels)
    norms = torch.stack([value.flatten(1).norm(dim=1) for value in each.values()]).norm(dim=0)
    bound = float(norms.median())
    factor = (bound / (norms + 1e-6)).clamp(max=1.0)
    parameters = {name: value for name, value in task.model.named_parameters() if name in names}
    GhostClipping(task.model, task, names, bound).load(Table(INPUTS, labels), torch.arange(4), parameters)
    for name, value in parameters.items():
        expected = torch.einsum("e...,e->...", each[name], factor)
        torch.testing.assert_close(value.grad, expected, rtol=1e-4, atol=1e-5 * bound)


@pytest.mark.parametrize("source", CONFIGS)
def test_a_private_step_is_the_sum_of_examples_clipped_one_at_a_time(source):
    """Without noise: each example alone, its gradient scaled down to the bound, and all of them added."""
    task, labels, bound = task_of(source), LABELS["table"], 0.1
    names, parameters = names_of(task), dict(task.model.named_parameters())
    expected = {name: torch.zeros_like(value) for name, value in parameters.items()}
    for number in range(len(labels)):
        part = {key: value[number : number + 1] for key, value in INPUTS.items()}
        loss = task.loss(parameters, Batch(part, labels[number : number + 1]))
        own = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
        factor = min(1.0, bound / (float(torch.stack([each.norm() for each in own]).norm()) + 1e-6))
        for name, gradient in zip(parameters, own, strict=True):
            expected[name] += factor * gradient
    before = {name: value.detach().clone() for name, value in parameters.items()}
    recipe = Recipe(rate=1.0, steps=1, noise=0.0, max_grad_norm=bound, batch=1.0, physical_batch=3)
    gradients = ExampleGradients(task.model, task, names, plain)
    units = [np.array([row]) for row in range(len(labels))]
    step = torch.optim.SGD(list(parameters.values()), lr=1.0)
    noise = SeededNoise(torch.device("cpu"), 0, "0", 1)
    train_steps(gradients, parameters, step, Table(INPUTS, labels), units, recipe, noise)
    for name, value in parameters.items():
        torch.testing.assert_close(before[name] - value.detach(), expected[name], rtol=1e-9, atol=1e-12)


def test_ghost_clipping_of_column_tokens_is_refused():
    task = task_of("ft_transformer")
    with pytest.raises(
        UserError, match=r"privacy\.clipping=ghost cannot read the gradient norm of embeddings"
    ):
        GhostClipping(task.model, task, names_of(task), 1.0)


@pytest.mark.parametrize(
    ("source", "config", "sentence"),
    [
        ("mlp", {"hidden_size": 0}, r"model\.config\.hidden_size is 0, but must be a whole number"),
        ("mlp", {"dropout": 1.0}, r"model\.config\.dropout is 1\.0, but must be a share below 1"),
        ("mlp", {"heads": 2}, "'heads' is no setting of the model 'mlp'"),
        ("linear", {"hidden_size": 8}, "the linear model has no setting hidden_size"),
        ("ft_transformer", {"num_attention_heads": 3}, "not a multiple of the number of attention heads"),
    ],
)
def test_settings_that_do_not_fit_are_refused(source, config, sentence):
    with pytest.raises(UserError, match=sentence):
        task_of(source, **config)


def test_pictures_and_tables_do_not_mix():
    pictures = InputShape("image", ("a", "b"), channels=1, image_size=8)
    asked = {"path": None, "dtype": "float32", "seed": 0}
    with pytest.raises(UserError, match="the mlp model reads the rows of a table"):
        build_model(source="mlp", model_type=None, config={}, shape=pictures, **asked)
    table = InputShape("table", ("a", "b"), numbers=2)
    with pytest.raises(UserError, match="'vit' does not read tables: choose model=ft_transformer"):
        build_model(source="config", model_type="vit", config={}, shape=table, **asked)
