"""The rules for what a site gives to a survival study, independent of the requester."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedfrozen_app.study.study_ask import StudyAsk

EXACT, BINNED, NONE = "exact", "binned", "none"
MODES = (NONE, BINNED, EXACT)


@dataclass(frozen=True)
class Rules:
    """The limits on what may leave."""

    mode: str
    floor: int
    edges: tuple[float, ...]  # of all counts; a study may use a subset that includes both ends
    groups: Mapping[str, tuple[str, ...]]  # columns that may be compared, with all their levels
    columns: tuple[str, ...]  # all columns that a study may name
    regression: bool = False  # whether sums of covariates leave

    @property
    def complete(self) -> tuple[str, ...]:
        """Rows with a missing value in one of these columns are left out, so that all studies have the same
        people."""
        return tuple(dict.fromkeys((*self.columns, *self.groups)))


def rules_of_simulation(ask: StudyAsk) -> Rules:
    """A simulated site has no policy and gives what is requested."""
    groups = {} if ask.columns.group is None else {ask.columns.group: ask.columns.levels}
    mode = EXACT if ask.edges is None else BINNED
    return Rules(mode, ask.floor, ask.edges or (), groups, ask.columns.names, regression=True)


@dataclass(frozen=True)
class SiteRows:
    """A site's rows, and the person of each; the names stay at the site."""

    cells: Mapping[str, Sequence[Any]]
    names: Sequence[str]  # (rows,)


def problem(ask: StudyAsk, rules: Rules) -> str | None:
    """Why this study is not answered; completes a sentence."""
    if rules.mode == NONE:
        return "it takes part in no survival study"
    if ask.edges is None and rules.mode != EXACT:
        return "the study asks for exact times, and the policy gives edges alone (survival: binned)"
    for name in ask.columns.names:
        if name not in rules.columns:
            return f"the study asks for the column {name}, which the policy does not name (survival_columns)"
    if ask.columns.covariates and not rules.regression:
        return "the study asks for a regression, and the policy does not say survival_regression"
    group = ask.columns.group
    if group is not None and tuple(rules.groups.get(group, ())) != ask.columns.levels:
        return f"the study compares other groups of the column {group} than the policy's (survival_groups)"
    own = rules.edges
    if ask.edges is None or (rules.mode == EXACT and not own):
        return None
    if not own or not set(ask.edges) <= set(own) or (ask.edges[0], ask.edges[-1]) != (own[0], own[-1]):
        return "the study counts between other edges than the policy's (survival_edges)"
    return None
