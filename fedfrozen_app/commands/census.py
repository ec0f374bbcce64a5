"""`fedfrozen census [OVERRIDES]`: do the sites' data fit together? Nothing is trained."""

import datetime
import secrets
import shlex
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from fedfrozen_app import client_app
from fedfrozen_app.census.ask import Ask, column_words, read_ask
from fedfrozen_app.census.record_source import simulated
from fedfrozen_app.config import Config, check_keys, compose_run
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.terminal import Console
from fedfrozen_app.core.verb_table import parse
from fedfrozen_app.files.kinds import check_is_neither
from fedfrozen_app.launch import check_writable
from fedfrozen_app.run.take_census import take_census
from fedfrozen_app.runtimes.flower.census_runs import asked_deployed, census_with_flower
from fedfrozen_app.runtimes.inprocess.grid import InProcessGrid
from fedfrozen_app.server.asking import Asking, Limits, census_question


def census(arguments: list[str]) -> None:
    given = parse("census", arguments)
    check_keys(given.overrides)
    composed = compose_run(given.overrides).with_absolute_paths()
    config, overrides = composed.config, composed.overrides
    ask = asked(given, config)
    folder = Path(config.output_dir or default_folder()).expanduser().resolve()
    check_is_neither(folder, "a census")
    check_writable(folder)
    if config.runtime.name == "deployed":
        found = asked_deployed(config, composed.resolved, overrides, "census", ask.text, folder)
    elif config.runtime.name == "flower":
        found = census_with_flower(config, composed.resolved, overrides, ask, folder)
    else:
        found = census_in_process(config, overrides, ask, folder)
    show(found, folder)


def asked(given: Any, config: Config) -> Ask:
    ask = Ask(
        config.run_id or f"census-{secrets.token_hex(6)}",
        given.view or config.runtime.view,
        column_words(given.column),
        given.epsilon,
        given.floor,
        given.matches,
    )
    try:
        return read_ask(ask.text)
    except ValueError as error:
        raise UserError(f"This census cannot be asked for: {error}.") from error


def default_folder() -> str:
    return f"outputs/census-{datetime.datetime.now():%Y-%m-%d-%H-%M-%S}"


def census_in_process(config: Config, overrides: list[str], ask: Ask, folder: Path) -> dict[str, Any]:
    # As the clients of any simulation read it: one text, so that rows are partitioned once.
    words = shlex.join(overrides)
    count = len(simulated(words, config.num_clients)[1])
    grid = InProcessGrid(client_app.app, count, {"overrides": words, "output-dir": str(folder)})
    return take_census(Asking(grid, ask, census_question(ask), Limits(count)), folder)


def show(found: dict[str, Any], folder: Path) -> None:
    console = Console()
    table = Table("site", "rows", "people", "classes")
    for name, site in found["sites"].items():
        classes = site["tables"].get("classes")
        held = "" if classes is None else str(sum(bool(count) for count in classes["rows"].values()))
        numbers = ("too few" if site[key] is None else f"{site[key]:,}" for key in ("rows", "people"))
        table.add_row(Text(name), *numbers, held)
    for name in found["refused"]:
        table.add_row(Text(name), "refused", "", "")
    console.print(table)
    for note in found["advice"]:
        console.print(f"- {note['text']}", highlight=False, markup=False, soft_wrap=True)
    print(f"Wrote {folder / 'census.json'} and {folder / 'census.html'}")
