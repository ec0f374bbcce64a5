"""`fedfrozen plan [OVERRIDES]`: what would be trained, sent and kept, by role, before anything runs."""

import json

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedfrozen_app.commands.forecast import Bytes, Forecast, Stage, forecast
from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.models.roles import KINDS
from fedfrozen_app.report.console import human_bytes
from fedfrozen_app.words import counted


def plan(arguments: list[str]) -> None:
    """With --json, every count exactly and by role, for scripts."""
    overrides = [word for word in arguments if word != "--json"]
    config = read(resolved(compose_config(overrides)))
    found = forecast(config)
    if len(overrides) < len(arguments):
        print(json.dumps(found, default=vars))  # `vars` of the dataclasses within
        return
    console = Console()
    total = sum(found.parameters.values())
    size = f"{counted(found.clients, 'client')}, {counted(config.num_rounds, 'round')}"
    console.print(
        f"{config.strategy['name']}, {config.model.name}, {config.dataset.name}: {total:,} parameters "
        f"({human_bytes(sum(found.model.values()))}), {size}.",
        highlight=False,
        markup=False,
    )
    for stage in found.stages:
        console.print(stage_table(stage, found))
    console.print(totals_table(found))
    if found.everything_up:
        console.print(saved(found), highlight=False, soft_wrap=True)
    if found.undecided:
        console.print(found.undecided, highlight=False, soft_wrap=True)
    console.print(
        "Arrays alone: orders, digests and replies add some kB a message. Down: what a client lacks, as if "
        "every array that may be trained changed in every round.",
        highlight=False,
        soft_wrap=True,
    )


def stage_table(stage: Stage, found: Forecast) -> Table:
    """One row per role, for one client in one round."""
    trained = f"{stage.trained_params:,} parameters trained"
    title = f"{stage.name}: {counted(stage.rounds, 'round')}, {trained}; one client, one round"
    table = Table(title=Text(title), title_justify="left")
    columns = {
        "trained": stage.trained,
        "sent up": _share(stage.up, stage),
        "sent down (mean)": _share(stage.down, stage),
        "frozen": stage.frozen,
    }
    if any(stage.private.values()):
        columns["private"] = stage.private
    table.add_column("role")
    for heading in ("params", *columns):
        table.add_column(heading, justify="right")
    for role in (role for role in KINDS if role in found.parameters):
        table.add_row(
            role, f"{found.parameters[role]:,}", *(_cell(counts[role]) for counts in columns.values())
        )
    for extra in sorted(set(stage.up) - set(KINDS)):  # what a codec adds to an upload
        rest = ["–"] * (len(columns) - 2)
        table.add_row(extra, "–", "–", _cell(columns["sent up"][extra]), *rest)
    sums = (_cell(sum(counts.values())) for counts in columns.values())
    table.add_section()
    table.add_row("all", f"{sum(found.parameters.values()):,}", *sums)
    return table


def totals_table(found: Forecast) -> Table:
    """One row per stage, for the whole run."""
    table = Table(title=Text("The whole run, all clients"), title_justify="left")
    table.add_column("stage")
    for heading in ("rounds", "client rounds", "sent up", "sent down"):
        table.add_column(heading, justify="right")
    for stage in found.stages:
        sent = (_exact(sum(part.values())) for part in (stage.up, stage.down))
        table.add_row(Text(stage.name), str(stage.rounds), f"{stage.client_rounds:,}", *sent)
    table.add_section()
    up, down = found.total("up"), found.total("down")
    rounds = sum(stage.rounds for stage in found.stages)
    visits = sum(stage.client_rounds for stage in found.stages)
    table.add_row("all", str(rounds), f"{visits:,}", _exact(up), _exact(down))
    return table


def saved(found: Forecast) -> str:
    """Against FedAvg, and where embeddings are frozen against FedAvg without them too."""
    up = found.total("up")
    text = f"Sent up: {1 - up / found.everything_up:.1%} less than sending the whole model every time"
    if found.but_embeddings_up:
        text += f", {1 - up / found.but_embeddings_up:.1%} less than sending all but the embeddings"
    return f"{text}."


def _share(total: Bytes, stage: Stage) -> Bytes:
    """Of one client in one round."""
    visits = max(stage.client_rounds, 1)
    return Bytes({role: round(count / visits) for role, count in total.items()})


def _cell(count: int) -> str:
    return human_bytes(count) if count else "–"


def _exact(count: int) -> str:
    return f"{human_bytes(count)} ({count:,})"
