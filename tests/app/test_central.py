"""FedAvg with one full-batch SGD step a client is one central step on the pooled data."""

import pytest
import torch

from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.models.task import Batch
from tests.conftest import SMALL

STEP = [
    *("strategy=fedavg", "num_rounds=1", "client=sgd", "client.lr=0.5", "client.momentum=0"),
    *("client.local_epochs=1", "client.batch_size=100000", "client.clip=null"),
    *("dataset.client_validation=0", "dataset.validation=0", "client.lr_schedule=constant"),
]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-10)])
def test_one_federated_step_is_one_central_step(train, dtype, tolerance):
    words = [*STEP, f"model.dtype={dtype}"]
    run = train(*words)
    config = read(resolved(compose_config([*SMALL, *words])))
    corpus = load_corpus(config)
    shares = share_out(corpus, config, config.num_clients)
    assert len({len(rows) for rows in shares.partition.indices}) > 1  # unequal sizes: weights matter
    central = Worker(config, corpus, shares=shares)
    start = {name: value.detach().clone() for name, value in central.parameters.items()}
    loss = central.task.loss(central.parameters, Batch(corpus.train.inputs, corpus.train.labels))
    loss.backward()
    difference, update = 0.0, 0.0
    for name, value in central.parameters.items():
        step = -0.5 * value.grad
        difference += (run.model[name].double() - start[name] - step).square().sum().item()
        update += step.double().square().sum().item()
    assert update > 0 and difference**0.5 <= tolerance * update**0.5


@pytest.mark.slow
def test_class_weights_and_clipping_change_the_step(train):
    plain = train(*STEP, folder="a").model
    for number, extra in enumerate(["client.class_weights=true", "client.clip=0.01"]):
        other = train(*STEP, extra, folder=str(number)).model
        assert not all(torch.equal(plain[name], other[name]) for name in plain)


@pytest.mark.slow
def test_bf16_autocast_trains_in_float32_weights(train):
    run = train("client.precision=bf16", "num_rounds=1")
    assert all(value.dtype == torch.float32 for value in run.model.values())
    assert run.rows[-1]["clients_ok"] == 3
