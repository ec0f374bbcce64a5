"""Clients whose objectives are fᵢ(w) = aᵢ/2 (w − bᵢ)², behind the real messages, strategies and algorithms.

A round is then arithmetic that a reader can redo. What clients keep is in `kept`, by client.
"""

from dataclasses import dataclass

import torch
from flwr.clientapp import ClientApp

from fedfrozen_app.config import ClientConfig
from fedfrozen_app.exchange.arrays import to_record
from fedfrozen_app.exchange.cache import Cache
from fedfrozen_app.exchange.messages import Hello, Reply, hello_reply, read_train, train_reply
from fedfrozen_app.exchange.names import by_namespace, flattened, parameters_in
from fedfrozen_app.inprocess.grid import InProcessGrid
from fedfrozen_app.local.algorithm import Start
from fedfrozen_app.models.roles import Role
from fedfrozen_app.server.base import Federation
from fedfrozen_app.server.conversation import Conversation

ROLES = {"query": Role("query", 0), "head": Role("head")}


@dataclass(frozen=True)
class Quadratic:
    a: float
    b: float
    examples: int = 1
    steps: int = 1

    def loss(self, parameters, batch):
        return sum((self.a / 2 * (value - self.b) ** 2).sum() for value in parameters.values())


TWO = (Quadratic(1.0, 1.0, examples=1, steps=2), Quadratic(2.0, -1.0, examples=3, steps=1))


def local_steps(order, start, task, client):
    """SGD as torch does it, on the algorithm's loss."""
    live = {name: start.model[name].clone().requires_grad_(True) for name in order.plan.trained}
    optimizer = torch.optim.SGD(live.values(), lr=client.lr, momentum=client.momentum)
    for _ in range(task.steps):
        optimizer.zero_grad()
        order.method.loss({**start.model, **live}, None, task, start).backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in live.items()}


def make_app(clients, settings, kept):
    app, cache = ClientApp(), Cache()

    @app.query()
    def hello(message, context):
        return hello_reply(message, Hello(str(context.node_config["partition-id"]), len(clients)))

    @app.train()
    def train(message, context):
        order, sent = read_train(message)
        base, lacks = cache.complete(order.base, sent, verify=True)
        if lacks:
            return train_reply(message, Reply(order.digest, lacks=lacks), local=True)
        name = str(context.node_config["partition-id"])
        task, method, names = clients[int(name)], order.method, order.plan.trained
        model = parameters_in(base)
        mine = {key: value for key, value in kept.get(name, {}).items() if key.rpartition("/")[2] in names}
        own = method.start({n: model[n] for n in names}, by_namespace(mine))
        start = Start(model, names, by_namespace(base), own)
        trained = local_steps(order, start, task, settings)
        steps = torch.tensor(float(task.steps), dtype=torch.float64)
        done = method.finish(start, trained, steps, settings.lr)
        kept[name] = flattened(done.own)
        arrays = {n: trained[n] for n in order.plan.shared} | dict(done.model) | flattened(done.reply)
        figures = {key: float(value) for key, value in done.figures.items()}
        return train_reply(message, Reply(order.digest, task.examples, arrays, figures), local=True)

    return app


def run(cls, rounds, clients=TWO, *, lr=0.1, momentum=0.0, cohorts=None, kept=None, each=None, **settings):
    """The strategy after so many rounds from w = 0; `cohorts`: who takes part in each, all by default."""
    kept = {} if kept is None else kept
    client = ClientConfig(optimizer="sgd", lr=lr, momentum=momentum)

    class Hook:
        def after_round(self, strategy, row):
            if each:
                each(strategy, row)
            return False, {}

    grid = InProcessGrid(make_app(clients, client, kept), len(clients), {"overrides": ""})
    federation = Federation(Conversation(grid, ROLES, local=True), client=client)
    if cohorts:
        federation.cohort = lambda names, number: cohorts[(number - 1) % len(cohorts)]
    strategy = cls(federation, cls.Settings(**settings).checked(rounds), hooks=[Hook()])
    model = {name: torch.zeros(1, dtype=torch.float64) for name in ROLES}
    strategy.start(grid, to_record(model, local=True), num_rounds=rounds)
    return strategy, kept


def value(arrays, name="head"):
    return arrays[name].item()
