"""Small models and single steps of DP-SGD."""

import copy
import math

import numpy as np
import torch
from torch.optim import SGD

from fedfrozen_app.models.task import Task
from fedfrozen_app.privacy.dpsgd import Recipe, train_steps
from fedfrozen_app.privacy.example_gradients import ExampleGradients
from fedfrozen_app.privacy.noise import SeededNoise
from tests.models.conftest import _build, _example

CPU = torch.device("cpu")


def plain(parameters, batch, task):
    return task.loss(parameters, batch)


def parts(model_type, **settings):
    """A tiny model in float64, four examples, and their labels."""
    model = _build(model_type, dtype="float64", **settings).eval()
    inputs = _example(model_type, torch.float64)
    return model, inputs, torch.tensor([0, 1, 1, 0])


def task_of(model):
    return Task(model, mean=(0.0,) * 3, std=(1 / 255,) * 3)  # which leaves pixels as they are


def steps(model, table, *, trained=None, units=None, seed=0, make=None, **settings):
    """The change of every parameter after SGD with rate 1: minus the sum of the noisy gradients."""
    model = copy.deepcopy(model)
    names = trained or [name for name, _ in model.named_parameters()]
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    parameters = {name: value for name, value in model.named_parameters() if name in names}
    recipe = Recipe(
        **{"rate": 1.0, "steps": 1, "noise": 0.0, "max_grad_norm": 1.0, "batch": 1.0, "physical_batch": 3}
        | settings
    )
    train_steps(
        make(model, recipe.max_grad_norm) if make else ExampleGradients(model, task_of(model), names, plain),
        parameters,
        SGD(list(parameters.values()), lr=1.0),
        table,
        units or [np.array([row]) for row in range(len(table))],
        recipe,
        SeededNoise(CPU, seed, "0", 1),
    )
    return {name: value.detach() - before[name] for name, value in model.named_parameters()}


def norm(change):
    return math.sqrt(sum(float(value.square().sum()) for value in change.values()))
