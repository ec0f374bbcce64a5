"""`fedfrozen plan [OVERRIDES]`: what would be trained, sent and kept, by role, before anything runs."""

import json
from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from fedfrozen_app.commands.forecast import Bytes, Forecast, Stage, forecast, ground_of, outlined
from fedfrozen_app.commands.step_memory import measure, step_memory
from fedfrozen_app.config import compose_run
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.formatting import counted
from fedfrozen_app.core.terminal import Console
from fedfrozen_app.exchange.role import KINDS
from fedfrozen_app.report.console import human_bytes, human_seconds


def plan(arguments: list[str]) -> None:
    """Print the forecast. --json gives every exact count by role; --measure times a few training steps."""
    overrides = [word for word in arguments if word not in ("--json", "--measure")]
    config = compose_run(overrides).config
    ground = ground_of(config)
    found = forecast(config, ground)
    found.memory = [
        step_memory(config, ground.shape, stage.plan.trained, ground.tokens, ground.chunks)
        for stage in found.stages
    ]
    if "--measure" in arguments:
        if config.privacy.name != "none":
            raise UserError(
                "fedfrozen plan --measure takes plain steps: leave privacy=dp_sgd out to measure."
            )
        found.measured = measure(config, outlined(config, ground))
    if "--json" in arguments:
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
    console.print(memory_table(found))
    for line in memory_notes(found):
        console.print(line, highlight=False, soft_wrap=True)
    if found.everything_up:
        console.print(saved(found), highlight=False, soft_wrap=True)
    if found.undecided:
        console.print(found.undecided, highlight=False, soft_wrap=True)
    console.print(
        "Arrays alone: requests, digests and replies add some kB a message. Down: what a client lacks, as if "
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
    if any(stage.client_state.values()):
        columns["client state"] = stage.client_state
    table.add_column("role")
    for heading in ("params", *columns):
        table.add_column(heading, justify="right")
    for role in (role for role in KINDS if role in found.parameters):
        table.add_row(
            role, f"{found.parameters[role]:,}", *(_cell(counts[role]) for counts in columns.values())
        )
    for extra in sorted(set(stage.up) - set(KINDS)):  # extra data of a codec
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


def memory_table(found: Forecast) -> Table:
    """One row per stage: the peak of one client's step."""
    table = Table(title=Text("Memory of one client's training step, about"), title_justify="left")
    table.add_column("stage")
    for heading in ("parameters", "gradients", "optimiser", "activations", "all"):
        table.add_column(heading, justify="right")
    for stage, need in zip(found.stages, found.memory, strict=True):
        kept = "?" if need.activations is None else _cell(need.activations)
        sizes = (need.parameters, need.gradients, need.optimizer)
        table.add_row(Text(stage.name), *(_cell(size) for size in sizes), kept, _cell(need.total))
    return table


def memory_notes(found: Forecast) -> Iterator[str]:
    if any(need.activations is None for need in found.memory):
        yield "?: what this model keeps for its gradients shows in a real step alone: --measure takes one."
    held = human_bytes(3 * sum(found.model.values()))
    yield (
        f"Clients that train together take a step's memory each, but for what is frozen. In one process the "
        f"server holds up to three models beside it ({held})."
    )
    if (real := found.measured) is None:
        yield "Seconds a round: add --measure, which takes a few steps to find out."
        return
    peak = "" if real.peak_bytes is None else f", {human_bytes(real.peak_bytes)} at the peak"
    yield (
        f"Measured on {real.device}: {real.seconds_a_step:.3g} s a step{peak}; a round's "
        f"{real.steps_a_round:,} steps take {human_seconds(real.seconds_a_round)} one client after another, "
        "and less where clients train together. Evaluation comes on top."
    )


def saved(found: Forecast) -> str:
    """Savings against FedAvg; if embeddings are frozen, also against FedAvg without them."""
    up = found.total("up")
    text = f"Sent up: {_against(up, found.everything_up)} sending the whole model every time"
    if found.but_embeddings_up:
        text += f", {_against(up, found.but_embeddings_up)} sending all but the embeddings"
    return f"{text}."


def _against(sent: int, other: int) -> str:
    if sent == other:
        return "as much as"
    return f"{abs(1 - sent / other):.1%} {'less' if sent < other else 'more'} than"


def _share(total: Bytes, stage: Stage) -> Bytes:
    """The mean per client and round."""
    visits = max(stage.client_rounds, 1)
    return Bytes({role: round(count / visits) for role, count in total.items()})


def _cell(count: int) -> str:
    return human_bytes(count) if count else "–"


def _exact(count: int) -> str:
    return f"{human_bytes(count)} ({count:,})"
