"""Every example's gradient is its own, is really clipped, and is noised in trained names only."""

import copy
import math

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

from fedfrozen_app.data.table import Table
from fedfrozen_app.models.frozen_backbone import frozen_backbone
from fedfrozen_app.models.pixels import Output
from fedfrozen_app.models.task import Batch
from fedfrozen_app.privacy.example_gradients import ExampleGradients, Packed
from fedfrozen_app.vmap.blocks import outermost_lists
from tests.models.conftest import SETTINGS, _example
from tests.privacy.dpsgd_steps import norm, parts, plain, steps, task_of


@pytest.mark.parametrize("model_type", SETTINGS)
def test_example_gradients_are_those_of_batches_of_one(model_type):
    model, inputs, labels = parts(model_type)
    task = task_of(model)
    names = [name for name, _ in model.named_parameters()]
    losses, per_example = ExampleGradients(model, task, names, plain)(inputs, labels)
    for number, (loss, expected) in enumerate(each_alone(model, task, names, inputs, labels)):
        torch.testing.assert_close(losses[number], loss, rtol=1e-10, atol=0)
        for name, gradient in expected.items():
            torch.testing.assert_close(per_example[name][number], gradient, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("model_type", SETTINGS)
def test_gradients_of_clients_side_by_side_are_those_of_each(model_type, recorded):
    """Whose weights differ, and whose batches: two examples of the four, and one of these twice."""
    model, inputs, labels = parts(model_type)
    rows = {name: torch.stack([value, value * 1.1, value + 0.01]) for name, value in detached(model).items()}
    index = torch.tensor([[0, 1], [2, 3], [1, 1]])
    own = {key: value[index] for key, value in inputs.items()}
    together = ExampleGradients(model, task_of(model), list(rows), plain)
    losses, per_example = together.of_clients(rows, own, labels[index], recorded=recorded)
    for client in range(3):
        alone = copy.deepcopy(model)
        alone.load_state_dict({name: row[client] for name, row in rows.items()}, strict=False)
        part = {key: value[client] for key, value in own.items()}
        each = ExampleGradients(alone, task_of(alone), list(rows), plain)
        expected, by_name = each(part, labels[index[client]])
        torch.testing.assert_close(losses[client], expected, rtol=1e-10, atol=0)
        for name, gradient in by_name.items():
            torch.testing.assert_close(per_example[name][client], gradient, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize(
    "model_type", [kind for kind in SETTINGS if "input_ids" in _example(kind, torch.float64)]
)
def test_what_one_text_is_changes_nothing_for_others(model_type):
    """Not the last digit, of other clients or its own: with all of the model, and with layers below it."""
    model, inputs, labels = parts(model_type)
    index = torch.tensor([[0, 1], [1, 3]])
    own = {key: value[index] for key, value in inputs.items()}
    own["attention_mask"] = torch.ones_like(own["attention_mask"])
    shorter = own | {"attention_mask": own["attention_mask"].clone()}
    shorter["attention_mask"][1, 1, 2:] = 0
    (stack,) = outermost_lists(model)
    last = set(stack[-1].parameters())
    for kept in (detached(model), {n: v.detach() for n, v in model.named_parameters() if v in last}):
        rows = {name: torch.stack([value, value]) for name, value in kept.items()}
        one, other = (
            ExampleGradients(model, task_of(model), list(rows), plain).of_clients(rows, given, labels[index])
            for given in (own, shorter)
        )
        assert torch.equal(one[0].flatten()[:3], other[0].flatten()[:3])
        assert one[0][1, 1] != other[0][1, 1]
        for name in rows:
            assert torch.equal(one[1][name].flatten(0, 1)[:3], other[1][name].flatten(0, 1)[:3]), name


@pytest.mark.parametrize("model_type", ["gpt2", "bert"])
def test_a_text_without_a_word_has_the_same_gradient_alone_and_beside_others(model_type):
    model, inputs, labels = parts(model_type)
    inputs["attention_mask"][2] = 0
    rows = {name: value.unsqueeze(0) for name, value in detached(model).items()}
    gradients = ExampleGradients(model, task_of(model), list(rows), plain)
    losses, per_example = gradients(inputs, labels)
    together = {key: value.unsqueeze(0) for key, value in inputs.items()}
    found, by_name = gradients.of_clients(rows, together, labels.unsqueeze(0))
    torch.testing.assert_close(found[0], losses, rtol=1e-10, atol=0)
    for name, gradient in per_example.items():
        torch.testing.assert_close(by_name[name][0], gradient, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("model_type", SETTINGS)
def test_what_lies_below_reads_only_examples_that_are_there(model_type):
    """Of two clients with three examples and one; the places of two that are not there hold another's."""
    model, inputs, labels = parts(model_type)
    (stack,) = outermost_lists(model)
    last = set(stack[-1].parameters())
    rows = {n: torch.stack([v.detach(), v.detach() * 1.1]) for n, v in model.named_parameters() if v in last}
    index, places = torch.tensor([[0, 1, 3], [2, 0, 0]]), torch.tensor([[0, 1, 2], [3, 0, 0]])
    own = {key: value[index] for key, value in inputs.items()}
    gradients = ExampleGradients(model, task_of(model), list(rows), plain)
    losses, per_example = gradients.of_clients(rows, own, labels[index])
    sizes = []
    hook = stack[0].register_forward_hook(
        lambda module, given, output: sizes.append(len(tree_leaves(output)[0]))
    )
    packed = Packed(Table(inputs, labels).take(torch.tensor([0, 1, 3, 2])), places)
    found, by_name = gradients.of_clients(rows, own, labels[index], packed)
    hook.remove()
    assert max(sizes) == 4
    torch.testing.assert_close(found, losses, rtol=1e-10, atol=0)
    for name, gradient in per_example.items():
        torch.testing.assert_close(by_name[name], gradient, rtol=1e-8, atol=1e-12)


def detached(model):
    return {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("model_type", SETTINGS)
@pytest.mark.parametrize("layers", [False, True], ids=["head", "last layer"])
def test_what_trains_has_the_same_gradients_and_what_lies_below_reads_all_rows_at_once(model_type, layers):
    model, inputs, labels = parts(model_type)
    task = task_of(model)
    # With BERT's pooler, which stands within its base.
    names = [name for name, _ in model.named_parameters() if name not in inside(model) or ".pooler." in name]
    pooled = any(".pooler." in name for name in names)
    backbone = frozen_backbone(model, names)
    assert backbone.parts == ((model.base_model.encoder if pooled else model.base_model),)
    if layers:
        (stack,) = outermost_lists(model)
        last = set(stack[-1].parameters())
        names += [name for name, value in model.named_parameters() if value in last]
        backbone = frozen_backbone(model, names)
        assert backbone.parts == tuple(stack[:-1]) and backbone.above == (stack[-1],)
    sizes = []
    # Each call of the last one: with its first tensor's rows.
    note = lambda module, given, output: sizes.append(len(tree_leaves(output)[0]))  # noqa: E731
    hook = backbone.parts[-1].register_forward_hook(note)
    losses, per_example = ExampleGradients(model, task, names, plain)(inputs, labels)
    two = {name: value.detach().expand(2, *value.shape) for name, value in model.named_parameters()}
    pairs = {key: value.unflatten(0, (2, 2)) for key, value in inputs.items()}
    rows = {name: two[name] for name in names}
    _, beside = ExampleGradients(model, task, names, plain).of_clients(rows, pairs, labels.view(2, 2))
    hook.remove()
    # Tried twice with two rows; then all rows at once, and each row is given what was made of it.
    assert sizes == [2, 2, 4, 1, 4, 1]
    for number, (loss, expected) in enumerate(each_alone(model, task, names, inputs, labels)):
        torch.testing.assert_close(losses[number], loss, rtol=1e-6, atol=0)
        for name, gradient in expected.items():
            torch.testing.assert_close(per_example[name][number], gradient, rtol=1e-4, atol=1e-7)
            torch.testing.assert_close(beside[name][number // 2, number % 2], gradient, rtol=1e-4, atol=1e-7)


def each_alone(model, task, names, inputs, labels):
    """Of each row by itself: the loss, and its gradient by name."""
    for number in range(len(labels)):
        one = Batch({key: value[number : number + 1] for key, value in inputs.items()}, labels[number, None])
        loss = task.loss(dict(model.named_parameters()), one)
        own = [model.get_parameter(name) for name in names]
        per_example = torch.autograd.grad(loss, own, materialize_grads=True)
        yield loss.detach(), dict(zip(names, per_example, strict=True))


def inside(model):
    return {f"{model.base_model_prefix}.{name}" for name, _ in model.base_model.named_parameters()}


def test_a_backbone_in_which_rows_influence_each_other_is_not_computed_as_one_batch():
    model, _, _ = parts("vit")
    head = [name for name, _ in model.named_parameters() if name not in inside(model)]
    assert frozen_backbone(model, head).parts == (model.vit,)
    assert frozen_backbone(model, [*head, "vit.layernorm.weight"]) is None
    assert frozen_backbone(model, [*head, "vit.pooler.dense.weight", "vit.layernorm.weight"]) is None
    model.vit.mixing = torch.nn.BatchNorm1d(4)
    assert frozen_backbone(model, head) is None


def looks_back(stack):
    """The last layer sees what went into the first."""
    came = []
    stack[0].register_forward_pre_hook(lambda module, given: came.append(given[0]))
    return stack[-1].register_forward_pre_hook(lambda module, given: (given[0] + came[-1], *given[1:]))


@pytest.mark.parametrize("spoiled", ["an earlier part trains", "a later one looks back"])
def test_layers_of_which_more_is_needed_than_the_last_output_are_no_backbone(spoiled):
    model, inputs, labels = parts("vit")
    (stack,) = outermost_lists(model)
    last = set(stack[-1].parameters())
    names = [name for name, value in model.named_parameters() if value in last or name not in inside(model)]
    if spoiled == "an earlier part trains":
        names.append("vit.embeddings.cls_token")
    else:
        looks_back(stack)
    task = task_of(model)
    assert frozen_backbone(model, names) is not None
    _, per_example = ExampleGradients(model, task, names, plain)(inputs, labels)
    for number, (_, expected) in enumerate(each_alone(model, task, names, inputs, labels)):
        for name, gradient in expected.items():
            torch.testing.assert_close(per_example[name][number], gradient, rtol=1e-4, atol=1e-7)


def test_rows_that_overflow_do_not_change_the_backbone():
    """Where the first rows give no numbers, the others' gradients are computed as ever."""
    model, inputs, labels = parts("vit")
    (stack,) = outermost_lists(model)
    last = set(stack[-1].parameters())
    names = [name for name, value in model.named_parameters() if value in last]
    broken = {
        key: value.clone().index_fill_(0, torch.tensor([0, 1]), torch.inf) for key, value in inputs.items()
    }
    task = task_of(model)
    sizes = []
    stack[0].register_forward_hook(lambda module, given, output: sizes.append(len(tree_leaves(output)[0])))
    _, per_example = ExampleGradients(model, task, names, plain)(broken, labels)
    assert sizes == [2, 2, 4, 1]  # tried, read, and given row by row
    expected = list(each_alone(model, task, names, inputs, labels))
    for number in (2, 3):
        for name, gradient in expected[number][1].items():
            torch.testing.assert_close(per_example[name][number], gradient, rtol=1e-4, atol=1e-7)


class Linear(torch.nn.Module):
    """As transformers' classifiers are called."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))

    def forward(self, x):
        return Output(x @ self.weight.T)


def test_an_outlier_is_clipped_by_hand():
    # At zero weights the softmax is (1/2, 1/2): the gradient of class 0 is the outer product of (-1/2, 1/2)
    # with x, whose norm is |x|/√2. x = (3, 4)·10⁶ is clipped to norm 1; (0.3, 0.4) with norm 0.3536 stays.
    model = Linear()
    rows = torch.tensor([[3e6, 4e6], [0.3, 0.4]], dtype=torch.float64)
    table = Table({"x": rows}, torch.tensor([0, 0]))
    change = steps(model, table)["weight"]
    direction = torch.tensor([[0.6, 0.8], [-0.6, -0.8]], dtype=torch.float64) / math.sqrt(2)
    expected = direction * (1 + 0.5 / math.sqrt(2))
    torch.testing.assert_close(change, expected, rtol=1e-5, atol=0)


def test_an_outlier_moves_a_transformer_no_further_than_the_bound():
    model, inputs, labels = parts("vit")
    inputs["pixel_values"][0] *= 1e4
    one = Table({"pixel_values": inputs["pixel_values"][:1]}, labels[:1])
    assert norm(steps(model, one, max_grad_norm=1e9)) > 0.05
    assert norm(steps(model, one, max_grad_norm=0.01)) <= 0.01 * (1 + 1e-9)
    assert norm(steps(model, Table(inputs, labels), max_grad_norm=0.01)) <= 0.04 * (1 + 1e-9)


@pytest.mark.parametrize("broken", [math.inf, math.nan, 1e200])
def test_an_example_that_overflows_gives_no_gradient(broken):
    """A server may send weights with which only the rows that hold some word overflow: were the sum not
    finite then, it would tell that there is such a row."""
    rows = torch.tensor([[broken, 4.0], [0.3, 0.4]], dtype=torch.float64)
    both = steps(Linear(), Table({"x": rows}, torch.tensor([0, 0])), physical_batch=1)["weight"]
    assert torch.equal(both, steps(Linear(), Table({"x": rows}, torch.tensor([0, 0])))["weight"])
    assert torch.equal(both, steps(Linear(), Table({"x": rows[1:]}, torch.tensor([0])))["weight"])


def test_noise_reaches_trained_names_only():
    model, inputs, labels = parts("bert")
    trained = [name for name, _ in model.named_parameters() if ".layer.1." in name or "classifier" in name]
    change = steps(model, Table(inputs, labels), trained=trained, noise=2.0, steps=3)
    moved = {name for name, value in change.items() if value.abs().max() > 0}
    assert moved == set(trained)
    # Three steps of noise 2 · C on every element, whether or not an example reached it.
    noise = torch.cat([change[name].flatten() for name in trained])
    assert float(noise.std()) == pytest.approx(2 * math.sqrt(3), rel=0.05)


def test_chunks_do_not_change_a_step():
    model, inputs, labels = parts("llama")
    table = Table(inputs, labels)
    whole = steps(model, table, physical_batch=4, noise=0.5)
    for size in (1, 3):
        split = steps(model, table, physical_batch=size, noise=0.5)
        for name in whole:
            torch.testing.assert_close(split[name], whole[name], rtol=1e-9, atol=1e-12)


def test_an_empty_sample_is_a_step_of_noise_alone():
    model, inputs, labels = parts("vit")
    change = steps(model, Table(inputs, labels), rate=0.0, noise=1.0)
    values = torch.cat([value.flatten() for value in change.values()])
    assert float(values.std()) == pytest.approx(1.0, rel=0.1)
    assert norm(steps(model, Table(inputs, labels), rate=0.0)) == 0


def test_the_sum_is_divided_by_the_expected_size_not_by_the_sample_s():
    model, inputs, labels = parts("vit")
    table = Table(inputs, labels)
    once, tenth = steps(model, table, batch=1.0), steps(model, table, batch=10.0)
    for name in once:
        torch.testing.assert_close(tenth[name], once[name] / 10)


def test_a_patient_gives_one_row_whatever_it_has():
    model = Linear()
    rows = torch.tensor([[1e3, 0.0]] * 50, dtype=torch.float64)
    table = Table({"x": rows}, torch.zeros(50, dtype=torch.int64))
    patient = steps(model, table, units=[np.arange(50)])
    assert norm(patient) == pytest.approx(1.0, rel=1e-6)
    assert norm(steps(model, table)) == pytest.approx(50.0, rel=1e-6)
