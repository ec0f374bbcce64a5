"""Cox regression from the sums of four sites, of which one has no event, against others on the pooled
rows."""

import json
from pathlib import Path

import numpy as np
import pytest
from statsmodels.duration.hazard_regression import PHReg

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.survival.cox import Cox, fit_cox, scale_of
from fedfrozen_app.survival.people import People
from fedfrozen_app.survival.risk_sums import add_sums, likelihood, risk_sums
from tests.survival.drawn import study
from tests.survival.test_curves import COLUMNS, counts_of, sites

REFERENCE = json.loads((Path(__file__).parent / "lifelines.json").read_text("utf-8"))


def fitted(parts: list[People], ties: str = "efron", strata: bool = False, names=COLUMNS.covariates) -> Cox:
    total = counts_of(parts).all_groups()
    times = total.times[total.events[0] > 0]
    sums, squares = (sum((part.covariates**power).sum(axis=0) for part in parts) for power in (1, 2))
    scale = scale_of(names, sum(map(len, parts)), sums, squares)

    def ask(at):
        own = [risk_sums(part, times, scale, at, ties) for part in parts]
        if strata:
            return sum((likelihood(one, at) for one in own[1:]), likelihood(own[0], at))
        return likelihood(add_sums(own), at)

    return fit_cox(names, scale, ask, ties, strata)


@pytest.mark.parametrize("strata", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_sites_together_are_lifelines_on_the_pooled_rows(seed, strata):
    found = fitted(sites(seed), strata=strata)
    known = REFERENCE["cox"][seed]["strata" if strata else "efron"]
    assert not sites(seed)[3].event.any()
    np.testing.assert_allclose(found.coefficients, known["coefficients"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(found.errors, known["errors"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(found.p, known["p"], rtol=0, atol=1e-6)
    assert found.value == pytest.approx(known["value"], abs=1e-8)


@pytest.mark.parametrize("ties", ["breslow", "efron"])
@pytest.mark.parametrize("seed", range(0, 12, 2))  # studies with ties
def test_both_rules_for_ties_are_statsmodels(seed, ties):
    rows = study(seed)
    values = np.stack([rows[name] for name in COLUMNS.covariates], axis=1).astype(float)
    known = PHReg(rows["time"], values, status=rows["event"], ties=ties).fit(tol=1e-12)
    found = fitted(sites(seed), ties)
    np.testing.assert_allclose(found.coefficients, known.params, rtol=0, atol=1e-6)
    np.testing.assert_allclose(found.errors, known.bse, rtol=0, atol=1e-6)


def test_the_rules_for_ties_differ_where_there_are_ties_and_agree_where_there_are_none():
    for seed, apart in ((0, True), (1, False)):
        one, other = (fitted(sites(seed), ties).coefficients for ties in ("efron", "breslow"))
        assert bool(np.abs(one - other).max() > 1e-4) is apart
        assert apart or one == pytest.approx(other, abs=1e-10)


def changed(value) -> list[People]:
    """One study whose marker is this of the rows."""
    found = []
    for part in sites(1):
        covariates = part.covariates.copy()
        covariates[:, 1] = value(part)
        found.append(People(part.time, part.event, part.group, covariates, part.kept))
    return found


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (lambda part: 7.0, "The covariate marker has one value at all sites"),
        (lambda part: 2 * part.covariates[:, 0] - 1, "age and marker determine each other"),
        (lambda part: part.event * 1.0, "The coefficient of marker grows without end"),
    ],
)
def test_what_cannot_be_estimated_is_one_sentence(value, sentence):
    with pytest.raises(UserError, match=sentence):
        fitted(changed(value))


def test_the_units_of_a_covariate_change_its_coefficient_alone():
    one = fitted(sites(1))
    other = fitted(changed(lambda part: part.covariates[:, 1] * 1e6 + 3e7))
    assert other.coefficients * [1, 1e6, 1] == pytest.approx(one.coefficients, rel=1e-7)
    assert other.p == pytest.approx(one.p, rel=1e-6)
