"""`fedfrozen methods [OVERRIDES]`: what each strategy, or each of `strategy=A,B`, trains and sends."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from rich.table import Table
from rich.text import Text

from fedfrozen_app.commands.forecast import Ground, Stage, forecast, ground_of, outlined
from fedfrozen_app.config import Config, compose_run, read
from fedfrozen_app.core import registry
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.terminal import Console
from fedfrozen_app.exchange.role import KINDS
from fedfrozen_app.report.console import human_bytes
from fedfrozen_app.server.base import PlannedFedAvg

MOST_STAGES = 3  # listed one by one


@dataclass(frozen=True)
class Method:
    """A row of the table. Bytes are of the arrays that one client sends or receives per round, mean over the
    run."""

    name: str
    says: str
    paper: str
    model: str = ""
    trains: str = ""
    up: int = 0
    down: int = 0
    kept: str = ""
    problem: str = ""  # why it is not possible with these settings


def methods(arguments: list[str]) -> None:
    """Print the table, or JSON with --json. Overrides select model, data and rounds."""
    words = [word for word in arguments if word != "--json"]
    chosen = [word.partition("=")[2].split(",") for word in words if word.startswith("strategy=")]
    names = chosen[-1] if chosen else registry.names("strategies")
    overrides = [word for word in words if not word.startswith("strategy=")]
    if own := [word for word in overrides if word.startswith("strategy.")]:
        raise UserError(f"`fedfrozen methods` shows each strategy by its defaults: leave {own[0]} out.")
    for name in names:
        registry.find("strategies", name)  # report an unknown name, and a bad setting, once
    read(compose_run(overrides).resolved)
    known: dict[str, Ground] = {}
    found = [describe(name, overrides, known) for name in names]
    if len(words) < len(arguments):
        print(json.dumps([asdict(method) for method in found]))
        return
    table = methods_table(found)
    wide = Console(width=1000).measure(table).maximum  # do not wrap lines, regardless of the terminal's width
    Console(width=wide).print(table, soft_wrap=True)
    print("Up and down: the arrays of one client in one round, mean over the run. --help explains each.")


def describe(name: str, overrides: list[str], known: dict[str, Ground]) -> Method:
    """Describe a strategy. `known` caches properties of the data, by the settings that determine them."""
    says, paper = registry.described("strategies", name)
    try:
        config = compose_run([f"strategy={name}", *overrides]).config
        key = repr((config.dataset, config.partition, config.num_clients, config.seed))
        if key not in known:
            known[key] = ground_of(config)
        return _method(name, says, paper, config, known[key])
    except UserError as error:
        return Method(name, says, paper, problem=str(error))


def _method(name: str, says: str, paper: str, config: Config, ground: Ground) -> Method:
    found, strategy = forecast(config, ground), outlined(config, ground)
    visits = max(sum(stage.client_rounds for stage in found.stages), 1)
    trains = stages_in_words(found.stages, found.model)
    if strategy.request(1, {}).choice is not None:
        trains += "; of it each client its own layers"
    return Method(
        name,
        says,
        paper,
        config.model.name,
        trains,
        round(found.total("up") / visits),
        round(found.total("down") / visits),
        kept(strategy, found.stages, found.model),
    )


def stages_in_words(stages: list[Stage], model: Mapping[str, int]) -> str:
    """The trained parts of each stage; for many stages, as in a cycle, their names."""
    different = {stage.name: stage for stage in reversed(stages)}
    first, *others = dict.fromkeys(stage.name for stage in stages) or [""]
    if not others:
        return in_words(stages[0].trained, model) if stages else "nothing"
    if len(different) <= MOST_STAGES:
        return "; ".join(f"{name}: {in_words(different[name].trained, model)}" for name in (first, *others))
    return f"{first}: {in_words(different[first].trained, model)}; then {', '.join(others)} in turn"


def in_words(part: Mapping[str, int], model: Mapping[str, int]) -> str:
    """Roles by their bytes: "all", "all but head", "head, part of mlp"."""
    whole = [role for role in KINDS if role in model and part.get(role, 0) == model[role]]
    some = [role for role in KINDS if 0 < part.get(role, 0) < model.get(role, 0)]
    none = [role for role in KINDS if role in model and not part.get(role, 0)]
    if not none and not some:
        return "all"
    if whole and not some and len(none) < len(whole):
        return f"all but {', '.join(none)}"
    parts = [", ".join(whole), f"part of {', '.join(some)}" if some else ""]
    return "; ".join(filter(None, parts)) or "nothing"


def kept(strategy: PlannedFedAvg, stages: list[Stage], model: Mapping[str, int]) -> str:
    """State that is kept between rounds, besides the shared model, and where."""
    method = strategy.request(max(strategy.num_rounds, 1), {}).method
    arrays = [space for space in method.client_state if space not in method.scalar_state]
    homes = (
        [in_words(Counter(stages[-1].private), model)] if stages and any(stages[-1].private.values()) else []
    )
    homes += [f"{space} ({human_bytes(sum(model.values()))})" for space in arrays]
    homes += [f"{space} (a number)" for space in method.scalar_state]
    words = [f"client: {', '.join(homes)}"] if homes else []
    words += [f"server: {', '.join(method.from_server)}"] if method.from_server else []
    return "; ".join(words)


def methods_table(found: list[Method]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("strategy", "trains", "up", "down", "kept", "paper"):
        table.add_column(heading, justify="right" if heading in ("up", "down") else "left", no_wrap=True)
    for method in found:
        cells = [method.problem, "", "", ""]
        if not method.problem:
            cells = [
                method.trains,
                human_bytes(method.up),
                human_bytes(method.down),
                method.kept or "–",
            ]
        table.add_row(*map(Text, (method.name, *cells, method.paper or "–")))
    return table
