"""Our rounds around a client that does not train, and a way to be told when a round begins."""

from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor

from fedfrozen_app import client_app
from fedfrozen_app.exchange.arrays import to_record
from fedfrozen_app.exchange.cache import Cache
from fedfrozen_app.exchange.conversation import Conversation
from fedfrozen_app.exchange.messages import Reply, read_train, train_reply
from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.models.roles import Role
from fedfrozen_app.runtime.grid import InProcessGrid
from strategies.base import Federation, PlannedFedAvg, Row


def told(strategy: type[PlannedFedAvg], begins: Callable[[int], None]) -> type[PlannedFedAvg]:
    """The same strategy, calling `begins` with each round's number first of all, and once after the last."""

    class Told(strategy):  # type: ignore[misc, valid-type]
        def start(self, *arguments: Any, **named: Any) -> Any:
            result = super().start(*arguments, **named)
            begins(named["num_rounds"] + 1)
            return result

        def plan(self, server_round: int) -> Plan:
            begins(server_round)
            return super().plan(server_round)

    return Told


def echo_app() -> ClientApp:
    """Sends every array back plus one: with the same values, a second round would have nothing to send."""
    app, cache = ClientApp(), Cache()
    app.query()(client_app.hello)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        order, sent = read_train(message)
        base, lacks = cache.complete(order.base, sent, verify=False)
        assert not lacks, "a shared process lacks nothing"
        reply = Reply(order.digest, examples=1, arrays={name: base[name] + 1 for name in order.plan.shared})
        return train_reply(message, reply, local=True)

    return app


class Rows:
    """A hook that keeps the rounds' rows."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def after_round(self, strategy: PlannedFedAvg, row: Row) -> tuple[bool, Row]:
        if row["round"]:
            self.rows.append(row)
        return False, {}


def run_echo(
    arrays: Mapping[str, Tensor], clients: int, rounds: int, begins: Callable[[int], None]
) -> list[Row]:
    """Whole rounds in one process, aggregation included; the rounds' rows."""
    grid = InProcessGrid(echo_app(), clients, {})
    talk = Conversation(grid, {name: Role("mlp") for name in arrays}, local=True)
    kept = Rows()
    strategy = told(PlannedFedAvg, begins)(Federation(talk), hooks=[kept])
    # Handed over without keeping it: the strategy's model is then the only one on the server.
    strategy.start(grid, to_record(arrays, local=True), num_rounds=rounds)
    last = next(iter(strategy.model.values()))
    assert (last == rounds).all(), "an echo went missing"
    return kept.rows
