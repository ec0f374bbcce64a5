"""Models that give a class for each pixel: shapes, roles, and gradients of single examples."""

from dataclasses import replace

import pytest
import torch
from torch.nn import GroupNorm

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.table import InputShape, Table
from fedfrozen_app.exchange.role import KERNEL
from fedfrozen_app.models.build import build_model
from fedfrozen_app.models.roles import roles_of
from fedfrozen_app.models.task import Batch, Task
from fedfrozen_app.models.unet import group_norm, twice
from fedfrozen_app.privacy.example_gradients import ExampleGradients
from tests.privacy.dpsgd_steps import plain, steps

SHAPE = InputShape("segmentation", ("0", "1", "2"), channels=3, image_size=8)
CONFIG = {
    "unet": {"width": 4, "levels": 2},
    "vit_segmenter": {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "patch_size": 4,
        "decoder_width": 4,
    },
}


def build(name, shape=SHAPE, **config):
    return build_model(
        source=name, path=None, model_type=None, config=CONFIG[name] | config, shape=shape, dtype="float64",
        seed=0,
    )  # fmt: skip


def rows(count=4):
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(count, 3, 8, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (count, 8, 8), generator=generator, dtype=torch.uint8)
    return {"pixel_values": pixels}, labels


def task_of(model):
    return Task(model, kind="segmentation", mean=(0.0,) * 3, std=(1 / 255,) * 3)


@pytest.mark.parametrize("name", CONFIG)
def test_logits_are_a_class_for_each_pixel_and_every_parameter_has_a_role(name):
    model = build(name)
    assert model(**rows()[0]).logits.shape == (4, 3, 8, 8)
    roles = roles_of(model)
    assert set(roles) == {name for name, _ in model.named_parameters()}
    kinds = {role.kind for role in roles.values()}
    assert {"embedding", "mlp", "norm", "head"} <= kinds
    kernel = [name for name, role in roles.items() if role.kind in KERNEL]
    assert (len(kernel) == 8) == (name == "vit_segmenter")  # two layers' queries and keys, with biases
    assert [name for name, role in roles.items() if role.kind == "head"] == [
        "classifier.weight",
        "classifier.bias",
    ]


def test_a_deeper_u_net_has_roles_too():
    model = build("unet", replace(SHAPE, image_size=16), levels=4)
    assert len(roles_of(model)) == len(list(model.parameters()))


@pytest.mark.parametrize("name", CONFIG)
def test_clipped_sums_are_those_of_one_example_at_a_time(name):
    model = build(name)
    inputs, labels = rows()
    task, names = task_of(model), [name for name, _ in model.named_parameters()]
    _, each = ExampleGradients(model, task, names, plain)(inputs, labels)
    wanted = {key: torch.zeros_like(value) for key, value in model.named_parameters()}
    for row in range(4):
        part = {key: value[row, None] for key, value in inputs.items()}
        loss = task.loss(dict(model.named_parameters()), Batch(part, labels[row, None]))
        alone = torch.autograd.grad(loss, list(model.parameters()))
        size = torch.stack([value.norm() for value in alone]).norm()
        for key, value in zip(names, alone, strict=True):
            torch.testing.assert_close(each[key][row], value, rtol=1e-8, atol=1e-12)
            wanted[key] += value * (0.1 / (size + 1e-6)).clamp(max=1)  # as Opacus
    make = lambda model, norm: ExampleGradients(model, task_of(model), names, plain)  # noqa: E731
    change = steps(model, Table(inputs, labels), max_grad_norm=0.1, batch=4.0, make=make)
    for key, value in wanted.items():
        torch.testing.assert_close(change[key], -value / 4, rtol=1e-6, atol=1e-9)


def test_group_norm_is_torch_s_own():
    seen = torch.randn(2, 12, 5, 5, dtype=torch.float64)
    ours = group_norm(12).double()
    with torch.no_grad():
        ours.weight.normal_(), ours.bias.normal_()
    own = GroupNorm(ours.num_groups, 12).double()
    own.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours(seen), own(seen))
    assert ours.num_groups == 6 and group_norm(16).num_groups == 8


def test_twice_is_every_pixel_four_times():
    seen = torch.arange(4.0).reshape(1, 1, 2, 2)
    expected = torch.nn.functional.interpolate(seen, scale_factor=2, mode="nearest")
    assert torch.equal(twice(seen), expected)


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("unet", {"levels": 5}, "8 pixels: set dataset.image_size to a multiple of 16"),
        ("unet", {"levels": 9}, "must be 6 or less"),
        ("unet", {"depth": 3}, "'depth' is no setting of the model 'unet'"),
        ("vit_segmenter", {"patch_size": 3}, "choose a power of two"),
        ("vit_segmenter", {"patch_size": 16}, "choose a power of two"),
        ("vit_segmenter", {"num_attention_heads": 3}, "not a multiple of the number of attention heads"),
    ],
)
def test_settings_that_do_not_fit(name, settings, sentence):
    with pytest.raises(UserError, match=sentence):
        build(name, **settings)


def test_models_of_other_tasks_are_told_apart():
    pictures = replace(SHAPE, task="image")
    for name in CONFIG:
        with pytest.raises(UserError, match="choose pictures with masks"):
            build(name, pictures)
    for source, kind in (("lenet", None), ("linear", None), ("config", "vit")):
        with pytest.raises(UserError, match="choose model=unet or model=vit_segmenter"):
            build_model(
                source=source, path=None, model_type=kind, config={}, shape=replace(SHAPE, image_size=32),
                dtype="float32", seed=0,
            )  # fmt: skip
