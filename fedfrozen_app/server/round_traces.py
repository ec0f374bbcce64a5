"""The server's trace spans of each round, if FEDFROZEN_TRACES is set."""

from dataclasses import dataclass

from fedfrozen_app.core.trace_names import NUMBERS
from fedfrozen_app.core.tracing import is_tracing, record_round, start_tracing
from fedfrozen_app.files.rows import Row
from fedfrozen_app.server.base import PlannedFedAvg
from fedfrozen_app.server.connection import Connection


@dataclass
class RoundTraces:
    """A hook that writes spans. `run`: the id of a run without sites, whose requests have none."""

    connection: Connection
    run: str

    def after_round(self, strategy: PlannedFedAvg, row: Row) -> tuple[bool, Row]:
        ticket = self.connection.ticket
        run = self.run if ticket is None else ticket["run"]
        numbers = {name: row[name] for name in sorted(NUMBERS & row.keys())}
        record_round(run, row["round"], row["seconds"], numbers)
        return False, {}


def round_traces(connection: Connection, run: str) -> list[RoundTraces]:
    """The hook, or an empty list without tracing."""
    start_tracing("server")
    return [RoundTraces(connection, run)] if is_tracing() else []
