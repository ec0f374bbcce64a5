"""Clients whose objectives are fᵢ(w) = aᵢ/2 (w − bᵢ)², behind the real messages, strategies and algorithms.

A round is then arithmetic that a reader can redo. What clients keep is in `kept`, by client.
"""

from dataclasses import dataclass, replace

import torch
from flwr.clientapp import ClientApp

from fedfrozen_app.config import ClientConfig
from fedfrozen_app.exchange.arrays import to_record
from fedfrozen_app.exchange.cache import Cache
from fedfrozen_app.exchange.hello_messages import Hello, hello_reply
from fedfrozen_app.exchange.messages import Reply, read_train, train_reply
from fedfrozen_app.exchange.names import by_namespace, flattened, parameters_in
from fedfrozen_app.exchange.role import Role
from fedfrozen_app.local.algorithm import Start
from fedfrozen_app.local.own_step import OwnStep, starting_state
from fedfrozen_app.runtimes.inprocess.grid import InProcessGrid
from fedfrozen_app.server.base import Federation
from fedfrozen_app.server.connection import connect

ROLES = {"query": Role("query", 0), "head": Role("head")}


@dataclass(frozen=True)
class Quadratic:
    a: float
    b: float
    examples: int = 1
    steps: int = 1

    def loss(self, parameters, batch):
        return sum((self.a / 2 * (value - self.b) ** 2).sum() for value in parameters.values())

    def gradient(self, parameters):
        return {name: self.a * (value - self.b) for name, value in parameters.items()}


TWO = (Quadratic(1.0, 1.0, examples=1, steps=2), Quadratic(2.0, -1.0, examples=3, steps=1))


def local_steps(request, start, task, client):
    """SGD as torch does it, on the algorithm's loss; or the algorithm's own steps."""
    if request.method.has_step():
        return own_steps(request, start, task, client)
    live = {name: start.model[name].clone().requires_grad_(True) for name in request.plan.trained}
    optimizer = torch.optim.SGD(live.values(), lr=client.lr, momentum=client.momentum)
    for _ in range(task.steps):
        optimizer.zero_grad()
        request.method.loss({**start.model, **live}, None, task, start).backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in live.items()}, {}


def own_steps(request, start, task, client):
    method = request.method
    live = {name: start.model[name].clone().requires_grad_(True) for name in request.plan.trained}
    start = replace(start, client_state={**start.client_state, **starting_state(method, start)})
    optimizer = OwnStep(method, live, start, client.lr, request.plan.trained)
    for _ in range(task.steps):
        for value in live.values():
            value.grad = None
        method.loss({**start.model, **live}, None, task, start).backward()
        optimizer.step()
    kept = {space: start.client_state[space] for space in method.step_state if space in method.client_state}
    return {name: value.detach().clone() for name, value in live.items()}, kept


def make_app(clients, settings, kept):
    app, cache = ClientApp(), Cache()

    @app.query()
    def hello(message, context):
        return hello_reply(message, Hello(str(context.node_config["partition-id"]), len(clients)))

    @app.train()
    def train(message, context):
        request, sent = read_train(message)
        base, lacks = cache.complete(request.base, sent, verify=True)
        if lacks:
            return train_reply(message, Reply(request.digest, lacks=lacks), local=True)
        name = str(context.node_config["partition-id"])
        task, method, names = clients[int(name)], request.method, request.plan.trained
        model = parameters_in(base)
        mine = {key: value for key, value in kept.get(name, {}).items() if key.rpartition("/")[2] in names}
        own = method.start({n: model[n] for n in names}, by_namespace(mine))
        start = Start(model, names, by_namespace(base), own)
        if method.evaluates_start():
            start = replace(start, loss=task.loss(start.anchor, None), gradient=task.gradient(start.anchor))
        trained, stepped = local_steps(request, start, task, settings)
        steps = torch.tensor(float(task.steps), dtype=torch.float64)
        done = method.finish(start, trained, steps, settings.lr)
        kept[name] = flattened(stepped) | flattened(done.client_state)
        arrays = {n: trained[n] for n in request.plan.shared} | dict(done.model) | flattened(done.to_server)
        figures = {key: float(value) for key, value in done.metrics.items()}
        return train_reply(message, Reply(request.digest, task.examples, arrays, figures), local=True)

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
    federation = Federation(connect(grid, ROLES, local=True), client=client)
    if cohorts:
        federation.cohort = lambda names, number: cohorts[(number - 1) % len(cohorts)]
    strategy = cls(federation, cls.Settings(**settings).checked(rounds), hooks=[Hook()])
    model = {name: torch.zeros(1, dtype=torch.float64) for name in ROLES}
    strategy.start(grid, to_record(model, local=True), num_rounds=rounds)
    return strategy, kept


def value(arrays, name="head"):
    return arrays[name].item()
