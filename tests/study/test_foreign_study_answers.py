"""A site's answer that is none, or lies, ends a study in a sentence or in numbers: never in a traceback."""

import copy
import json
import warnings

import numpy as np
import pytest

from fedfrozen_app.core.errors import RunFailed, UserError
from fedfrozen_app.exchange.strict import canonical
from fedfrozen_app.report.survival_page import page
from fedfrozen_app.study.answer_study import answer
from fedfrozen_app.study.conduct import conduct
from fedfrozen_app.study.site_rules import SiteRows, rules_of_simulation
from fedfrozen_app.study.site_sums import read_answer
from fedfrozen_app.study.study_ask import COUNTS, StudyAsk, read_step
from fedfrozen_app.survival.people import Columns
from tests.survival.drawn import study

COLUMNS = Columns("time", "event", "arm", ("0", "1"), ("age", "marker"))
EDGES = (0.0, 40.0, 90.0, 200.0)
ASKS = (
    StudyAsk("exact", COLUMNS, floor=3),
    StudyAsk("binned", COLUMNS, edges=EDGES, floor=3),
    StudyAsk("strata", COLUMNS, edges=EDGES, strata="site", ties="breslow", floor=3),
)
WILD = (
    *(None, True, -1, 0, 1, 0.5, 10**30, 2**52, 10**9, 10**400, -0.5, 1e300, 1e-300, "", "a\x1b[2J", [], {}),
    *([1, 2], {"a": 1}, [0.0, 1.0], [None], [[]], {"edges": [0, 1]}, [-1.0, -1.0], [1e300, 1e300]),
)


@pytest.fixture(scope="module")
def sites():
    def rows(seed: int) -> SiteRows:
        cells = {name: [str(value) for value in column] for name, column in study(seed).items()}
        return SiteRows(cells, [str(row) for row in range(len(cells["time"]))])

    return {"north": rows(1), "west": rows(5)}


def places(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield from places(part, (*path, key))


def changed(found, rng):
    """With one or two parts replaced or removed, or its numbers scaled."""
    found = copy.deepcopy(found)
    for _ in range(rng.integers(1, 3)):
        known = [path for path in places(found) if path]
        *way, last = known[rng.integers(len(known))]
        parent = found
        for key in way:
            parent = parent[key]
        if rng.integers(8) == 0:
            del parent[last]
        elif isinstance(parent[last], (int, float)) and rng.integers(2):
            parent[last] = parent[last] * float(rng.choice([-1.0, 0.0, 0.5, 1e6, 1e12, 1e150]))
        else:
            parent[last] = copy.deepcopy(WILD[rng.integers(len(WILD))])
    return found


def conducted(sites, ask, lie):
    """The results, with a site that lies about the answers of its rows."""
    rules, memories = rules_of_simulation(ask), {name: {} for name in sites}

    def ask_sites(step):
        refused, found = {}, {}
        for name, rows in sites.items():
            try:
                read = read_step(step.text, ask)
                own = answer(ask, read, rows, rules, memories[name])
                text = json.dumps(lie(own, step)) if name == "west" else canonical(own)
                found[name] = read_answer(text, ask, read)
            except (ValueError, UserError) as error:
                refused[name] = str(error)
        return found, refused

    found = conduct(ask, ask_sites)
    json.dumps(found, allow_nan=False)
    assert page(found)
    return found


def attempts(sites, count, seed):
    rng, ended = np.random.default_rng(seed), {"results": 0, "a sentence": 0}
    for _ in range(count):
        ask, at = ASKS[rng.integers(len(ASKS))], rng.integers(3)

        def lie(own, step, at=at):
            return changed(own, rng) if (step.name == COUNTS) == (at == 0) else own

        try:
            conducted(sites, ask, lie)
            ended["results"] += 1
        except (RunFailed, UserError) as error:
            assert str(error).isprintable() and len(str(error)) < 400, str(error)[:400]
            ended["a sentence"] += 1
    return ended


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # overflow where a site's numbers are absurd
        yield


def test_wild_answers_end_in_a_sentence_or_in_numbers(sites):
    assert attempts(sites, 15, seed=0)["results"] > 5


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thousands_of_wild_answers(sites):
    attempts(sites, 3000, seed=1)


@pytest.mark.parametrize("events", [1e12, 0.5, 2.0**52])
def test_a_site_does_not_make_the_server_count_for_ever(sites, events):
    """Efron's rule takes a step for each event at a time."""

    def lie(own, step):
        if step.name != COUNTS:
            own["events"][0] = events
        return own

    found = conducted(sites, ASKS[1], lie)
    assert "west answered the counts and not the regression" in found["problem"]
