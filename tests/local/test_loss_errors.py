"""A loss that a runner cannot differentiate ends with one sentence, under both runners."""

from dataclasses import dataclass

import pytest
import torch

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.core import registry
from fedfrozen_app.local.algorithm import Algorithm, Finished
from fedfrozen_app.server.base import PlannedFedAvg
from tests.conftest import SMALL, slowly


class FunctionalGradient(Algorithm):
    def loss(self, parameters, batch, task, start):
        gradient = torch.func.grad(lambda own: task.loss(own, batch))(parameters)
        return task.loss(parameters, batch) + sum(value.square().sum() for value in gradient.values())


class AutogradGradient(Algorithm):
    def loss(self, parameters, batch, task, start):
        loss = task.loss(parameters, batch)
        gradient = torch.autograd.grad(loss, [parameters[name] for name in start.trained])
        return loss + sum(value.square().sum() for value in gradient)


class Backward(Algorithm):
    def loss(self, parameters, batch, task, start):
        loss = task.loss(parameters, batch)
        loss.backward()
        return loss


class Branch(Algorithm):
    def loss(self, parameters, batch, task, start):
        loss = task.loss(parameters, batch)
        return loss if loss > 1 else 2 * loss


class Item(Algorithm):
    def loss(self, parameters, batch, task, start):
        loss = task.loss(parameters, batch)
        return loss * max(loss.item(), 1.0)


class Vector(Algorithm):
    def loss(self, parameters, batch, task, start):
        return task.logits(parameters, batch).mean(dim=0)


@pytest.fixture
def run_with(monkeypatch, tmp_path, capfd):
    """Run the command with this algorithm: its exit code and what it prints to stderr."""

    def run_with(algorithm, *words):
        class Own(PlannedFedAvg):
            pass

        Own.algorithm = f"own {algorithm.__name__}"
        monkeypatch.setitem(registry.REGISTERED, ("strategies", "fedavg"), Own)
        monkeypatch.setitem(registry.REGISTERED, ("algorithms", Own.algorithm), algorithm)
        folder = [f"output_dir={tmp_path}/run", "track.tensorboard=false", "num_rounds=1"]
        code = command(["strategy=fedavg", *SMALL, *folder, *words])
        return code, capfd.readouterr().err

    return run_with


# By default each mistake under one runner: what differs between runners is where the same check is called.
@pytest.mark.parametrize(
    ("algorithm", "runner"),
    [
        (FunctionalGradient, "cohort"),
        (AutogradGradient, "sequential"),
        (Backward, "cohort"),
        pytest.param(FunctionalGradient, "sequential", marks=pytest.mark.slow),
        pytest.param(AutogradGradient, "cohort", marks=pytest.mark.slow),
        pytest.param(Backward, "sequential", marks=pytest.mark.slow),
    ],
)
def test_a_gradient_inside_loss_is_one_sentence(run_with, algorithm, runner):
    code, printed = run_with(algorithm, f"runtime.runner={runner}")
    sentence = "Do not call torch.func.grad inside loss(): return a scalar, and the runner differentiates it."
    assert code == 2 and "Traceback" not in printed
    assert f"Algorithm {algorithm.__name__}: {sentence}" in " ".join(printed.split())


@pytest.mark.parametrize("algorithm", [Branch, Item])
def test_a_tensor_branch_is_one_sentence_under_the_cohort_runner(run_with, algorithm):
    code, printed = run_with(algorithm, "runtime.runner=cohort")
    assert code == 2 and "Traceback" not in printed
    sentence = "Do not branch on a tensor's value inside loss(), nor call .item(): use torch.where,"
    assert f"Algorithm {algorithm.__name__}: {sentence}" in " ".join(printed.split())


@pytest.mark.parametrize("runner", ["cohort", *slowly("sequential")])
def test_a_loss_that_is_no_scalar_is_one_sentence(run_with, runner):
    code, printed = run_with(Vector, f"runtime.runner={runner}")
    assert code == 2 and "Traceback" not in printed
    assert "Algorithm Vector: loss() must return a scalar" in " ".join(printed.split())


def test_a_tensor_branch_trains_under_the_sequential_runner(run_with):
    code, _ = run_with(Branch, "runtime.runner=sequential")
    assert code == 0


def test_private_clients_get_the_same_sentence(run_with):
    private = [
        "privacy=dp_sgd",
        "privacy.epsilon=8",
        "privacy.seeded_noise=true",
        "runtime.runner=sequential",
    ]
    code, printed = run_with(Branch, *private)
    assert code == 2 and "Algorithm Branch: Do not branch" in " ".join(printed.split())


class Reads(Algorithm):
    client_state = ("h",)

    def loss(self, parameters, batch, task, start):
        return task.loss(parameters, batch) + sum(value.sum() for value in start.from_server["h"].values())


class Keeps(Algorithm):
    client_state = ("h",)

    def finish(self, start, trained, steps, rate):
        return Finished(client_state={"drift": dict(trained)})


class Forgets(Algorithm):
    to_server = ("dh",)

    def finish(self, start, trained, steps, rate):
        return Finished()


@dataclass(frozen=True)
class Settings(Algorithm):
    alpha: float


NAMESPACES = {
    Reads: "reads 'h', which is no namespace there: from_server declares nothing, client_state 'h'.",
    Keeps: "finish() returns client_state 'drift', which is not declared: add it to client_state.",
    Forgets: "to_server declares 'dh', which finish() does not return: return it in",
}


@pytest.mark.parametrize(
    ("algorithm", "runner"),
    [
        (Reads, "cohort"),
        (Keeps, "sequential"),
        (Forgets, "cohort"),
        pytest.param(Reads, "sequential", marks=pytest.mark.slow),
        pytest.param(Keeps, "cohort", marks=pytest.mark.slow),
        pytest.param(Forgets, "sequential", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_namespace_is_one_sentence(run_with, algorithm, runner):
    sentence = NAMESPACES[algorithm]
    code, err = run_with(algorithm, f"runtime.runner={runner}")
    assert code == 2 and sentence in err and "Traceback" not in err


def test_settings_that_do_not_fit_the_algorithm_are_one_sentence(run_with):
    code, err = run_with(Settings)
    assert code == 2 and "client_settings of strategy=fedavg returns nothing" in err and "'alpha'" in err
