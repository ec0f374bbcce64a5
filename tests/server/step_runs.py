"""Runs of strategies whose clients add fixed numbers, for tests of the server's step."""

import torch
from flwr.clientapp import ClientApp

from fedfrozen_app.exchange.arrays import to_record
from fedfrozen_app.exchange.cache import Cache
from fedfrozen_app.exchange.hello_messages import Hello, hello_reply
from fedfrozen_app.exchange.messages import Reply, read_train, train_reply
from fedfrozen_app.exchange.role import Role
from fedfrozen_app.runtimes.inprocess.grid import InProcessGrid
from fedfrozen_app.server.base import Federation
from fedfrozen_app.server.connection import connect
from fedfrozen_app.server.optimizer import NoOptimizer

ROLES = {"query": Role("query", 0), "head": Role("head")}


def start_model():
    return {name: torch.zeros(2, dtype=torch.float64) for name in ROLES}


def adding_app(extra=lambda name, number: {}):
    """Adds its number to what it trains; `seen` remembers each message's base and the names that came."""
    app, cache, seen = ClientApp(), Cache(), []

    @app.query()
    def hello(message, context):
        return hello_reply(message, Hello(str(context.node_config["partition-id"]), 2))

    @app.train()
    def train(message, context):
        request, sent = read_train(message)
        base, lacks = cache.complete(request.base, sent, verify=True)
        if lacks:
            return train_reply(message, Reply(request.digest, lacks=lacks), local=True)
        seen.append((request, base, sorted(sent)))
        number = (1, 3)[int(context.node_config["partition-id"])]
        arrays = {name: base[name] + number for name in request.plan.shared}
        more = {key: value for name in arrays for key, value in extra(name, number).items()}
        return train_reply(message, Reply(request.digest, number, arrays | more), local=True)

    return app, seen


def run(cls, num_rounds, *, app=None, optimizer=None, each=lambda strategy, row: None, **settings):
    class Hook:
        def after_round(self, strategy, row):
            each(strategy, row)
            return False, {}

    app, seen = app or adding_app()
    grid = InProcessGrid(app, 2, {"overrides": ""})
    federation = Federation(connect(grid, ROLES, local=True), optimizer=optimizer or NoOptimizer())
    strategy = cls(federation, cls.Settings(**settings).checked(num_rounds), hooks=[Hook()])
    strategy.start(grid, to_record(start_model(), local=True), num_rounds=num_rounds)
    return strategy, seen


def values(model):
    return {name: value[0].item() for name, value in model.items()}
