"""`fedfrozen survival [FILE]`: survival curves, the log-rank test and Cox regression from the sites' sums."""

import datetime
import secrets
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from fedfrozen_app.config import Config, SecureAggregationConfig, check_keys, compose_run
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.core.terminal import Console
from fedfrozen_app.core.verb_table import parse
from fedfrozen_app.files.kinds import check_is_neither
from fedfrozen_app.launch import check_writable
from fedfrozen_app.run.take_study import write_study
from fedfrozen_app.runtimes.flower.census_runs import asked_deployed
from fedfrozen_app.study.conduct import conduct, conduct_masked
from fedfrozen_app.study.masked_study import MaskedSites
from fedfrozen_app.study.simulated_study import deal, in_process, in_process_masked, levels_of, read_table
from fedfrozen_app.study.study_ask import Masks, StudyAsk, read_study
from fedfrozen_app.survival.people import ALL, Columns
from fedfrozen_app.survival.time_edges import edges_every, read_edges


def survival(arguments: list[str]) -> None:
    given = parse("survival", arguments)
    files = [word for word in given.words if "=" not in word]
    check_keys([word for word in given.words if "=" in word])
    composed = compose_run([word for word in given.words if "=" in word]).with_absolute_paths()
    config = composed.config
    deployed = config.runtime.name == "deployed"
    if len(files) != (0 if deployed else 1) or (deployed and given.site):
        raise UserError("Give one FILE, whose sites are simulated (--site), or runtime=deployed.")
    folder = Path(config.output_dir or default_folder()).expanduser().resolve()
    check_is_neither(folder, "a survival study")
    check_writable(folder)
    if deployed:
        ask = asked(given, config, None)
        found = asked_deployed(config, composed.resolved, composed.overrides, "survival", ask.text, folder)
    else:
        cells = read_table(Path(files[0]).expanduser())
        sites = deal(cells, given.site)
        ask = asked(given, config, cells)
        if ask.masks is None:
            found = conduct(ask, in_process(ask, sites))
        else:
            found = conduct_masked(ask, MaskedSites(ask, in_process_masked(ask, sites)))
        write_study(found, folder)
    finish(found, folder)


def asked(given: Any, config: Config, cells: dict[str, list[Any]] | None) -> StudyAsk:
    """The study request of a command line; `cells`: rows of simulated sites, whose groups need no names."""
    group, _, names = (given.group or "").partition("=")
    levels: tuple[str, ...] = (ALL,)
    if group:
        levels = tuple(words_of(names))
        if not levels and cells is None:
            raise UserError(
                f"--group {group}: name the groups, which no site says by itself: --group {group}=A,B."
            )
        levels = levels or levels_of(cells or {}, group)
    ask = StudyAsk(
        config.run_id or f"survival-{secrets.token_hex(6)}",
        Columns(given.time, given.event, group or None, levels, tuple(words_of(given.covariates))),
        given.view,
        edges_of(given),
        given.ties,
        "site" if given.by_site else "none",
        given.epsilon,
        given.floor,
        masks_of(config.secure_aggregation),
    )
    try:
        return read_study(ask.text)
    except ValueError as error:
        raise UserError(f"This study cannot be asked for: {error}.") from error


def masks_of(settings: SecureAggregationConfig) -> Masks | None:
    if settings.name == "off":
        return None
    return Masks(settings.min_cohort, settings.threshold, settings.neighbours)


def words_of(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def edges_of(given: Any) -> tuple[float, ...] | None:
    if given.edges is not None:
        if given.every is not None or given.until is not None:
            raise UserError("--edges says all edges: leave out --every and --until.")
        return read_edges(Path(given.edges).expanduser())
    if (given.every is None) != (given.until is None):
        raise UserError("--every and --until go together: --every 30 --until 1800.")
    return None if given.every is None else edges_every(given.every, given.until)


def default_folder() -> str:
    return f"outputs/survival-{datetime.datetime.now():%Y-%m-%d-%H-%M-%S}"


def finish(found: dict[str, Any], folder: Path) -> None:
    """Write the results. If the regression was not possible, the curves are written and it is an error."""
    show(found)
    print(f"Wrote {folder / 'survival.json'} and {folder / 'survival.html'}")
    if found["problem"]:
        raise UserError(f"No regression: {found['problem']} The curves are written.")


def show(found: dict[str, Any]) -> None:
    console = Console()
    table = Table("", "people", "events", "median")
    for one in [*found["groups"], found["all"]]:
        median = "not reached" if one["median"] is None else f"{one['median']:g}"
        table.add_row(Text(one["name"]), f"{one['people']:,g}", f"{one['events']:,g}", median)
    console.print(table)
    if (test := found["log_rank"]) is not None:
        print(
            f"Log-rank: chi² {test['statistic']:.3f}, degrees of freedom {test['degrees']}, p {test['p']:.3g}"
        )
    if (cox := found["cox"]) is not None:
        table = Table("covariate", "hazard ratio", "95 %", "p")
        for one in cox["covariates"]:
            interval = f"{one['low']:.3g} to {one['high']:.3g}"
            table.add_row(Text(one["name"]), f"{one['hazard_ratio']:.3g}", interval, f"{one['p']:.2g}")
        console.print(table)
    for name, why in found["refused"].items():
        print(f"{name} gave nothing: {why}")
    for name, site in found["sites"].items():
        if site["withheld"]:
            print(f"{name} takes no part: a group of it has too few people for its counts to leave it.")
        elif site["people"] == 0:
            print(f"{name} has no row with all values: it adds nothing.")
