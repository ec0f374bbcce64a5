"""A network small enough to differentiate on paper, and rows of three clients, two of whom train in a round.

    h = tanh(x A + a)      p = softmax(h B + b)      f = −mean log p_y        A, a the body, B, b the head

    ∂f/∂z = (p − 1_y)/n    ∂f/∂B = hᵀ ∂f/∂z    ∂f/∂h = ∂f/∂z Bᵀ ⊙ (1 − h²)    ∂f/∂A = xᵀ ∂f/∂h

Everything is float64 and every epoch one batch: a round of gradient descent is a few lines of numpy.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.core import registry
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.files import checkpoint
from fedfrozen_app.local.worker import Worker

LR, EPOCHS = 0.5, 3
WORDS = [
    *("num_clients=3", "num_rounds=3", "participation=0.67", "dataset.limit=60", "partition.min_size=5"),
    *("partition.alpha=1", "dataset.validation=0", "dataset.client_validation=0", "seed=4"),
    *("model=linear", "model.source=by_hand", "model.dtype=float64", "client=sgd", "client.momentum=0"),
    *(f"client.lr={LR}", "client.lr_schedule=constant", f"client.local_epochs={EPOCHS}"),
    *("client.batch_size=1000", "runtime.threads=1", "checkpoint.keep=9", "track.tensorboard=false"),
]
BODY, HEAD = ("A", "a"), ("B", "b")
HIDDEN = 4


class Net(nn.Module):
    def __init__(self, pixels, classes, body=("embedding", "embedding")):
        super().__init__()
        sizes = {"A": (pixels, HIDDEN), "a": (HIDDEN,), "B": (HIDDEN, classes), "b": (classes,)}
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(0.3 * torch.randn(size)))
        self.roles = {**dict(zip(BODY, body, strict=True)), "B": "head", "b": "head"}

    def forward(self, pixel_values):
        h = (pixel_values.flatten(1) @ self.A + self.a).tanh()
        return SimpleNamespace(logits=h @ self.B + self.b)


def build(spec):
    return Net(spec.shape.channels * spec.shape.image_size**2, len(spec.shape.classes))


def build_attentive(spec):
    """The same network; its body goes by the roles of an attention kernel."""
    sizes = spec.shape.channels * spec.shape.image_size**2, len(spec.shape.classes)
    return Net(*sizes, body=(("query", 0), ("key", 0)))


def loss_and_gradient(w, x, y):
    """f and ∂f of the network with the arrays `w`, by the formulas above."""
    h = np.tanh(x @ w["A"] + w["a"])
    z = h @ w["B"] + w["b"]
    p = np.exp(z - z.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    dz = (p - np.eye(p.shape[1])[y]) / len(y)
    dh = (dz @ w["B"].T) * (1 - h**2)
    loss = -np.log(p[np.arange(len(y)), y]).mean()
    return loss, {"A": x.T @ dh, "a": dh.sum(axis=0), "B": h.T @ dz, "b": dz.sum(axis=0)}


def gradient(w, x, y):
    return loss_and_gradient(w, x, y)[1]


def descend(w, x, y, names=(*BODY, *HEAD), steps=EPOCHS):
    """Plain gradient descent on these names."""
    for _ in range(steps):
        g = gradient(w, x, y)
        w = {name: value - LR * g[name] if name in names else value for name, value in w.items()}
    return w


def mean(arrays, counts):
    """Σ (nᵢ/n) wᵢ of each name."""
    return {
        name: sum(n * own[name] for n, own in zip(counts, arrays, strict=True)) / sum(counts)
        for name in arrays[0]
    }


class Hand:
    """The run's starting model and rows, as numpy arrays, and what the real run left."""

    def __init__(self, train, words):
        self._train, self.words = train, [*WORDS, *words]
        config = read(resolved(compose_config(self.words)))
        corpus = load_corpus(config)
        self.worker = worker = Worker(config, corpus, shares=share_out(corpus, config, config.num_clients))
        self.start = {name: value.numpy() for name, value in worker.initial().items()}
        self.rows, self.test = {}, {}
        for client in map(str, range(config.num_clients)):
            table = worker.train_table.take(worker.rows(client).train)
            self.rows[client] = (self._pixels(worker, table), table.labels.numpy())
            table = worker.data.client_test_rows(client)
            self.test[client] = (self._pixels(worker, table), table.labels.numpy())

    @staticmethod
    def _pixels(worker, table):
        return worker.task.prepare(table.inputs)["pixel_values"].flatten(1).numpy()

    def count(self, client):
        return len(self.rows[client][1])

    def run(self, runner, *words):
        """The real one; `cohorts` are the clients of each round."""
        found = self._train(*self.words, *words, f"runtime.runner={runner}", folder=runner, small=False)
        self.cohorts = [row["clients"] for row in found.rows[1:]]
        assert {client for cohort in self.cohorts for client in cohort} == set(self.rows)
        assert [len(cohort) for cohort in self.cohorts] == [2] * len(self.cohorts)  # of three
        return found


def assert_same(found, expected):
    for name, value in expected.items():
        np.testing.assert_allclose(found[name].numpy(), value, rtol=0, atol=1e-9, err_msg=name)


def kept_by(run, client, namespace=""):
    """What the newest checkpoint says that a client keeps, of this namespace or of parameters."""
    arrays = checkpoint.newest(run.folder).clients.get(client, {})
    return {
        name.rpartition("/")[2]: value
        for name, value in arrays.items()
        if name.rpartition("/")[0] == namespace
    }


def accuracy(w, x, y):
    h = np.tanh(x @ w["A"] + w["a"])
    return float(((h @ w["B"] + w["b"]).argmax(axis=1) == y).mean())


@pytest.fixture
def hand(train, monkeypatch):
    monkeypatch.setitem(registry.REGISTERED, ("models", "by_hand"), build)
    monkeypatch.setitem(registry.REGISTERED, ("models", "attentive"), build_attentive)
    return lambda *words: Hand(train, words)
