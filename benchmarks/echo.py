"""Our rounds around a client that does not train, and a way to be told when a round begins and ends."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from common import blank_model
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedfrozen_app import client_app
from fedfrozen_app.core import registry
from fedfrozen_app.exchange.arrays import to_record
from fedfrozen_app.exchange.cache import Cache
from fedfrozen_app.exchange.messages import Reply, read_train, train_reply
from fedfrozen_app.exchange.role import Role
from fedfrozen_app.files.rows import Row
from fedfrozen_app.runtimes.inprocess.grid import InProcessGrid
from fedfrozen_app.server.base import PlannedFedAvg
from fedfrozen_app.server.connection import connect
from fedfrozen_app.server.federation import Federation, Hook


@dataclass(frozen=True)
class Told:
    """Whom to tell of the rounds: `begins` before anything is done in one, `ends` after its outputs."""

    begins: Callable[[int], None] = lambda number: None
    ends: Callable[[int], None] = lambda number: None

    def after_round(self, strategy: PlannedFedAvg, row: Row) -> tuple[bool, Row]:
        if row["round"]:
            self.ends(row["round"])
        return False, {}


def telling(strategy: type[PlannedFedAvg], told: Told) -> type[PlannedFedAvg]:
    """The same strategy, and the last of its hooks is `told`."""

    class Telling(strategy):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any, hooks: Sequence[Hook] = (), **named: Any) -> None:
            super().__init__(*arguments, hooks=[*hooks, told], **named)

        def _train_round(self, server_round: int) -> Row:
            told.begins(server_round)
            return super()._train_round(server_round)

    return Telling


@contextmanager
def app_telling(name: str, told: Told) -> Iterator[None]:
    """Let the app's strategy of this name tell of its rounds."""
    registry.register("strategies", name, telling(registry.find("strategies", name), told))
    try:
        yield
    finally:
        del registry.REGISTERED["strategies", name]


def echo_app() -> ClientApp:
    """Sends every array back plus one: with the same values, a second round would have nothing to send."""
    app, cache = ClientApp(), Cache()
    app.query()(client_app.hello)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        request, sent = read_train(message)
        base, lacks = cache.complete(request.base, sent, verify=False)
        assert not lacks, "a shared process lacks nothing"
        reply = Reply(
            request.digest, examples=1, arrays={name: base[name] + 1 for name in request.plan.shared}
        )
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


def run_echo(megabytes: float, clients: int, rounds: int, told: Told) -> list[Row]:
    """Whole rounds in one process, aggregation included, with a model of so many MB; the rounds' rows."""
    grid = InProcessGrid(echo_app(), clients, {})
    connection = connect(grid, {name: Role("mlp") for name in blank_model(megabytes)}, local=True)
    kept = Rows()
    strategy = telling(PlannedFedAvg, told)(Federation(connection), hooks=[kept])
    # Nothing here keeps the initial arrays: a copy that stays in memory is the app's own.
    strategy.start(grid, to_record(blank_model(megabytes), local=True), num_rounds=rounds)
    last = next(iter(strategy.model.values()))
    assert (last == rounds).all(), "an echo went missing"
    return kept.rows
