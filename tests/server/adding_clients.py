"""Clients that add a fixed number to the model."""

import torch
from flwr.clientapp import ClientApp

from fedfrozen_app.core import registry
from fedfrozen_app.exchange.arrays import to_record
from fedfrozen_app.exchange.cache import Cache
from fedfrozen_app.exchange.hello_messages import Hello, hello_reply
from fedfrozen_app.exchange.messages import Reply, read_train, train_reply
from fedfrozen_app.exchange.role import Role
from fedfrozen_app.runtimes.inprocess.grid import InProcessGrid
from fedfrozen_app.server.base import Federation
from fedfrozen_app.server.connection import connect

ROLES = {
    "embed": Role("embedding"),
    "block.query.weight": Role("query", 0),
    "block.query.bias": Role("query", 0),
    "block.key.weight": Role("key", 0),
    "block.key.bias": Role("key", 0),
    "block.value.weight": Role("value", 0),
    "block.value.bias": Role("value", 0),
    "block.out.weight": Role("output", 0),
    "block.out.bias": Role("output", 0),
    "block.ln1": Role("norm", 0, feeds_attention=True),
    "block.ln2": Role("norm", 0),
    "block.mlp": Role("mlp", 0),
    "head": Role("head"),
}


def start_model():
    return {name: torch.zeros(2, 2) if "weight" in name else torch.zeros(2) for name in ROLES}


def adding_app():
    """Adds its number to what it trains; `orders` and `sent` remember what it was told and given."""
    app, cache, seen = ClientApp(), Cache(), []

    @app.query()
    def hello(message, context):
        return hello_reply(message, Hello(str(context.node_config["partition-id"]), 2))

    @app.train()
    def train(message, context):
        request, sent = read_train(message)
        seen.append((context.node_config["partition-id"], request, sorted(sent)))
        base, lacks = cache.complete(request.base, sent, verify=False)
        if lacks:
            return train_reply(message, Reply(request.digest, lacks=lacks), local=True)
        number = int(context.node_config["partition-id"]) + 1
        arrays = {name: base[name] + number for name in request.plan.shared}
        return train_reply(message, Reply(request.digest, number, arrays, {"train_loss": 1.0}), local=True)

    return app, seen


def run(name, num_rounds=1, model=None, **settings):
    app, seen = adding_app()
    grid = InProcessGrid(app, 2, {"overrides": ""})
    rows = []

    class Keep:
        def after_round(self, strategy, row):
            rows.append(row)
            return False, {}

    cls = registry.find("strategies", name)
    strategy = cls(
        Federation(connect(grid, ROLES, local=True)),
        cls.Settings(**settings).checked(num_rounds),
        hooks=[Keep()],
    )
    strategy.start(grid, to_record(model or start_model(), local=True), num_rounds=num_rounds)
    return strategy, rows, seen


MEAN = (1 * 1 + 2 * 2) / 3  # what a round adds: (n₁u₁ + n₂u₂) / (n₁ + n₂) with nᵢ = uᵢ = i
