"""Conducts a study: first the counts, then the steps of a Cox regression."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fedfrozen_app.core.errors import RunFailed, UserError
from fedfrozen_app.study.masked_study import SUM, MaskedSites
from fedfrozen_app.study.released_counts import STATUS
from fedfrozen_app.study.site_sums import SiteCounts
from fedfrozen_app.study.study_ask import COX, Step, StudyAsk
from fedfrozen_app.study.study_results import masked_site, results, site_results
from fedfrozen_app.survival.counts import Counts, add, without_noise_below_zero
from fedfrozen_app.survival.cox import Cox, fit_cox, scale_of
from fedfrozen_app.survival.risk_sums import Likelihood, RiskSums, add_sums, likelihood

Asked = tuple[Mapping[str, Any], Mapping[str, str]]  # answers, and reasons for none, by site
AskSites = Callable[[Step], Asked]


def conduct(ask: StudyAsk, ask_sites: AskSites) -> dict[str, Any]:
    """Returns the content of survival.json. If a regression is impossible, it has the reason and the
    curves."""
    answers, refused = ask_sites(Step())
    if not answers:
        reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
        raise RunFailed(f"No site answered the study: {reasons}.")
    known = {name: found for name, found in sorted(answers.items()) if found.tables is not None}
    counts = merged(ask, known)
    _check(ask, counts)
    cox: Cox | None = None
    problem = ""
    if ask.columns.covariates:
        try:
            cox = regression(ask, counts, known, ask_sites)
        except UserError as error:
            problem = str(error)
    return results(ask, site_results(ask, answers), refused, counts, cox, problem)


def conduct_masked(ask: StudyAsk, sites: MaskedSites) -> dict[str, Any]:
    """`conduct` from masked sums: no site's own counts are known."""
    shown = sites.edges()
    total = sites.counts(shown)
    summed = list(sites.sites)
    counts = merged(ask, {SUM: total})
    _check(ask, counts)
    cox: Cox | None = None
    problem = ""
    if ask.columns.covariates:
        try:
            cox = regression(ask, counts, {SUM: total}, lambda step: ({SUM: sites.regression(step)}, {}))
        except UserError as error:
            problem = str(error)
    by_site = {name: masked_site(one.floor, withheld=name not in summed) for name, one in shown.items()}
    found = results(ask, by_site, sites.refused, counts, cox, problem)
    return found | {"masks": {"sites": summed, "sums": sites.number}}


def merged(ask: StudyAsk, known: Mapping[str, SiteCounts]) -> Counts:
    """Pool the sites' counts; with edges, at those that every site shows."""
    if not known:
        raise RunFailed(
            "Every site has too few people for its counts to leave it: take wider edges or fewer groups."
        )
    parts = [one.tables for one in known.values() if one.tables is not None]
    tables = [pair[status] for pairs in parts for pair in pairs for status in STATUS]
    every = [set(table["times"]) for table in tables]
    times = np.array(sorted(set.union(*every) if ask.edges is None else set.intersection(*every)))
    groups = []
    for pairs in parts:
        lines = {status: np.stack([_at(pair[status], times) for pair in pairs]) for status in STATUS}
        groups.append(Counts(times, lines["events"], lines["censored"]))
    found = add(groups)
    return found if ask.epsilon is None else without_noise_below_zero(found)


def _at(table: Mapping[str, Any], times: np.ndarray) -> np.ndarray:
    place = np.searchsorted(times, table["times"])
    return np.bincount(place, weights=table["people"], minlength=len(times))


def _check(ask: StudyAsk, counts: Counts) -> None:
    """`UserError` if there is nothing to estimate."""
    if not counts.people.sum():
        raise UserError(
            f"No site has a row with all of {', '.join(ask.columns.names)}: nothing can be counted."
        )
    if not counts.events.sum():
        raise UserError(
            f"No one has the event: the column {ask.columns.event} is 0 in all rows that count, so "
            "that no curve ever falls. Is it the right column?"
        )
    if ask.columns.group is not None and (counts.people > 0).sum() < 2:
        raise UserError(
            f"All people are in one group of the column {ask.columns.group}: leave out --group, as there "
            "is nothing to compare."
        )


def regression(ask: StudyAsk, counts: Counts, known: Mapping[str, SiteCounts], ask_sites: AskSites) -> Cox:
    moments = [found.moments for found in known.values()]
    if any(one is None for one in moments):
        raise UserError(
            "A site whose rows have changed by few people gives no sums for a regression: ask it later."
        )
    sound = [one for one in moments if one is not None]
    people = sum(one[0] for one in sound)
    sums = np.sum([one[1] for one in sound], axis=0)
    squares = np.sum([one[2] for one in sound], axis=0)
    scale = scale_of(ask.columns.covariates, people, sums, squares)
    total = counts.all_groups()
    times = total.times if ask.edges is not None else total.times[total.events[0] > 0]

    def at(coefficients: np.ndarray) -> Likelihood:
        lists = (times, scale.centre, scale.width, coefficients)
        step = Step(COX, *(tuple(float(one) for one in part) for part in lists))
        answers, refused = ask_sites(step)
        if lost := sorted(set(known) - set(answers)):
            raise UserError(
                f"{lost[0]} answered the counts and not the regression: {refused.get(lost[0], 'it is gone')}."
            )
        parts = [answers[name] for name in known]  # a fixed order, so that the same study gives the same bits
        if ask.strata == "site":
            return sum(parts[1:], parts[0])
        found: RiskSums = add_sums(parts)
        return likelihood(found, coefficients)

    return fit_cox(ask.columns.covariates, scale, at, ask.ties, ask.strata == "site")
