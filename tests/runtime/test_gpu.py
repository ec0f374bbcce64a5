"""What only a GPU can show: recorded and compiled steps give what plain ones give."""

import logging

import pytest
import torch

from fedfrozen_app.privacy.dpsgd import ExampleGradients, plain_loss
from fedfrozen_app.runtime import cohort
from tests.conftest import same_bits
from tests.privacy.test_dpsgd import parts, task_of
from tests.runtime.test_runtimes import is_key_bias

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

WORDS = ["device=cuda", "num_rounds=3", "checkpoint.keep=9", "client.local_steps=5", "num_clients=4"]
WORDS += ["client.lr_schedule=constant"]  # FedFrozen freezes after the first round
EAGER = ["runtime.runner=sequential", "runtime.capture=false"]


def distance(start, one, other):
    """Between two runs' ends, as a share of how far the first moved from its start; key biases left out."""
    end, twin = one.model_after(3), other.model_after(3)
    names = [name for name in end if not is_key_bias(name)]
    apart = sum((end[n].double() - twin[n].double()).square().sum() for n in names) ** 0.5
    moved = sum((end[n].double() - start[n].double()).square().sum() for n in names) ** 0.5
    return float(apart / moved)


@pytest.mark.parametrize("runner", ["cohort", "sequential"])
@pytest.mark.parametrize("client", ["client=adamw", "client=sgd"])
@pytest.mark.parametrize("strategy", ["fedavg", "fedprox", "fedfrozen"])
def test_compiled_and_recorded_steps_equal_plain_ones(train, strategy, client, runner):
    words = [*WORDS, f"strategy={strategy}", client]
    plain = train(*words, *EAGER, folder="plain")
    quick = train(*words, f"runtime.runner={runner}", folder="quick")
    start = train(*words, "num_rounds=0", "strategy=fedavg", folder="start").model
    assert distance(start, plain, quick) <= 1e-3
    for row, twin in zip(plain.rows, quick.rows, strict=True):
        for key in ("bytes_up", "bytes_down", "bytes_up_by_role", "clients", "stage", "trained_params"):
            assert row.get(key) == twin.get(key), key


def test_the_same_seed_gives_the_same_bits(train):
    words = [*WORDS, "runtime.runner=sequential"]
    assert same_bits(train(*words, folder="one").model, train(*words, folder="other").model)


def test_a_cohort_larger_than_the_free_memory_trains_in_turns_and_says_so(train, caplog, monkeypatch):
    monkeypatch.setattr(cohort, "SPARE", 0.0)  # as if the card were full: one client at a time
    words = [*WORDS, "runtime.runner=cohort", "num_clients=10", "dataset.limit=400", "partition=iid"]
    with caplog.at_level(logging.INFO, "fedfrozen_app"):
        run = train(*words)
    assert "free memory holds 1 of the 10" in caplog.text and "trains 1 clients at a time" in caplog.text
    assert run.rows[-1]["clients_ok"] == 10


def test_private_gradients_are_those_of_the_host(train):
    model, inputs, labels = parts("bert")
    names = [name for name, _ in model.named_parameters()]
    _, host = ExampleGradients(model, task_of(model), names, plain_loss)(inputs, labels)
    model = model.to("cuda")
    moved = {key: value.to("cuda") for key, value in inputs.items()}
    _, found = ExampleGradients(model, task_of(model), names, plain_loss)(moved, labels.to("cuda"))
    for name in names:
        torch.testing.assert_close(found[name].cpu(), host[name], rtol=1e-4, atol=1e-7)
    run = train(*WORDS, "privacy=dp_sgd", "strategy=safl", "strategy.top_k=1")
    assert run.rows[-1]["clients_ok"] == 4
    assert 0 < run.rows[-1]["epsilon_max"] <= 8
