"""A study in one process: a table's rows are split by site, and each site answers as a real one does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.sources.delimited import delimited_frame
from fedfrozen_app.exchange.strict import canonical
from fedfrozen_app.secure import secagg_messages
from fedfrozen_app.secure.client import Session
from fedfrozen_app.secure.round_keys import OnSight, Simulated, new_seed
from fedfrozen_app.study.answer_study import answer
from fedfrozen_app.study.conduct import Asked, AskSites
from fedfrozen_app.study.masked_site import check_terms, masked_answer, shown_answer
from fedfrozen_app.study.masked_steps import EDGES, read_masked_step
from fedfrozen_app.study.masked_study import ALL_SITES, Answers, Exchange
from fedfrozen_app.study.site_rules import SiteRows, rules_of_simulation
from fedfrozen_app.study.site_sums import read_answer
from fedfrozen_app.study.study_ask import Step, StudyAsk, read_step

ONE = "all rows"


def read_table(path: Path) -> dict[str, list[Any]]:
    """The columns of a CSV or TSV file, as text."""
    if not path.is_file():
        raise UserError(f"There is no file {path}: give a CSV file with a row a person.")
    return delimited_frame(path).cells


def deal(cells: Mapping[str, list[Any]], site: str | None) -> dict[str, SiteRows]:
    """The rows of each site, by the values of the column `site`; without it, one site has all rows."""
    count = len(next(iter(cells.values()), ()))
    names = [str(row) for row in range(count)]
    if site is None:
        return {ONE: SiteRows(cells, names)}
    if site not in cells:
        raise UserError(f"--site {site}: there is no such column: the rows have {', '.join(cells)}.")
    held = np.array([str(value).strip() for value in cells[site]])
    if empty := int((held == "").sum()):
        raise UserError(
            f"--site {site}: {empty} of {count} rows do not say their site: fill them in, or leave them out."
        )
    found = {}
    for name in np.unique(held).tolist():
        index = np.flatnonzero(held == name).tolist()
        part = {column: [values[row] for row in index] for column, values in cells.items()}
        found[name] = SiteRows(part, [names[row] for row in index])
    return found


def levels_of(cells: Mapping[str, list[Any]], group: str) -> tuple[str, ...]:
    """All values of the column; a real study names its groups."""
    if group not in cells:
        raise UserError(f"--group {group}: there is no such column: the rows have {', '.join(cells)}.")
    return tuple(sorted({text for value in cells[group] if (text := str(value).strip())}))


def in_process(ask: StudyAsk, sites: Mapping[str, SiteRows]) -> AskSites:
    """Every step is sent as text, in both directions. An invalid value ends the study: the rows are local and
    can be corrected."""
    rules = rules_of_simulation(ask)
    memories: dict[str, dict[str, Any]] = {name: {} for name in sites}

    def ask_sites(step: Step) -> Asked:
        read = read_step(step.text, ask)
        found = {
            name: read_answer(canonical(answer(ask, read, rows, rules, memories[name])), ask, read)
            for name, rows in sites.items()
        }
        return found, {}

    return ask_sites


def in_process_masked(ask: StudyAsk, sites: Mapping[str, SiteRows]) -> Exchange:
    """`in_process` with masks: every site has its own keys and sessions, and all messages are sent as
    text."""
    rules = rules_of_simulation(ask)
    memories: dict[str, dict[str, Any]] = {name: {} for name in sites}
    identities = {name: Simulated(new_seed()) for name in sites}
    sessions: dict[str, Session] = {}

    def answer_of(name: str, text: str) -> str:
        step = read_masked_step(text, ask)

        def plain(own: StudyAsk, asked: Step) -> str:
            return canonical(answer(own, asked, sites[name], rules, memories[name]))

        if step.name == EDGES:
            return shown_answer(ask, plain)
        if step.question is None:
            sessions[name], found = masked_answer(ask, step, sessions.get(name), plain)
            return found
        check_terms(step.question, ask)
        assert ask.masks is not None
        question = (
            step.question,
            name,
            sessions.get(name),
            identities[name],
            OnSight(),
            ask.masks.min_cohort,
        )
        sessions[name], found = secagg_messages.answer_step(*question)
        return found

    def exchange(texts: Mapping[str, str]) -> Answers:
        asked = dict.fromkeys(sites, texts[ALL_SITES]) if ALL_SITES in texts else texts
        return {name: answer_of(name, text) for name, text in asked.items()}, {}

    return exchange
