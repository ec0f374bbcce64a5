"""The pages' tables and pictures of the SAFL benchmark say what its result file says, and no more."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import plots
import safl
import safl_report

OPTIONS = safl.parse(["--model", "M", "--mtsamples", "D", "--rounds", "7", "--epsilons", "8"])


def line(method, f1, *, dataset="mtsamples", epsilon=None, learned=True, **more):
    about = {"dataset": dataset, "epsilon": epsilon, "seeds": 3, "method": method, "f1": f1}
    about |= {"interval": [f1 - 0.02, f1 + 0.03]}
    if method in ("majority", "untrained"):
        return about
    spent = {} if epsilon is None else {"epsilon_spent": epsilon - 0.001}
    return (
        about
        | {"learned": learned, "bytes_up": 4e8, "bytes_down": 3e8, "lr": 1e-3, "clip": None}
        | spent
        | more
    )


def pair(other, claim, **more):
    about = {"dataset": "mtsamples", "epsilon": None, "seeds": 3, "pair": f"safl - {other}"}
    return about | {"mean": 0.004, "low": -0.012, "high": 0.021, "more_than_a_point": claim} | more


@pytest.fixture
def found():
    methods = [("central", 0.5), ("fedavg", 0.4), ("safl", 0.35), ("random", 0.34), ("fixed", 0.3)]
    plain = [line(method, f1) for method, f1 in methods] + [line("untrained", 0.02), line("majority", 0.03)]
    plain[2]["bytes_up"] = 1e8
    private = [
        *(
            line("fedavg", 0.1, epsilon=8.0, clip=0.3),
            line("safl", 0.05, epsilon=8.0, learned=False, clip=3.0),
        ),
        *(line("untrained", 0.02, epsilon=8.0), line("majority", 0.03, epsilon=8.0)),
    ]
    return {
        "lines": plain + private,
        "pairs": [
            *(pair("random", "not resolved"), pair("fixed", "yes")),
            pair("random", "did not learn", epsilon=8.0),
        ],
        "cells_missing": 0,
        "machine": {"processor": "a processor"},
        "versions": {"torch": "2.0"},
    }


def rows(text, first):
    return [row for row in text.splitlines() if row.startswith(f"| {first} |")]


def test_every_table_has_its_floor_and_what_was_not_learned(found):
    text = safl_report.report(found, OPTIONS)
    assert "a processor" in text and "7 rounds" in text
    assert len(rows(text, "majority class")) == len(rows(text, "untrained model")) == 2
    (plain, private) = rows(text, "SAFL")
    assert "35.0 (33.0 to 38.0)" in plain and "100" in plain and "did not learn" not in plain
    assert "did not learn" in private and "7.999" in private
    (central,) = rows(text, "central")
    assert "400" not in central  # one client that sends nothing anywhere


def test_a_table_that_still_grows_tells_its_fewest_seeds(found):
    assert "over the whole run, 3 seeds:" in safl_report.report(found, OPTIONS)
    found["lines"] += [{**line("safl", 0.1, epsilon=2.0), "seeds": 1}]
    assert "over the whole run, 1 to 3 seeds:" in safl_report.report(found, OPTIONS)


def test_the_paper_s_question_has_its_answer(found):
    text = safl_report.report(found, OPTIONS)
    assert "better than random layers by more than one point" in text
    assert "- MTSamples, K = 2: **not resolved** (+0.4 points, −1.2 to +2.1)" in text
    assert "- MTSamples, K = 2 at epsilon 8: **did not learn**" in text
    assert "missing" not in text
    assert "5 cells are missing yet" in safl_report.report(found | {"cells_missing": 5}, OPTIONS)


def test_other_studies_stand_beside_the_budgets(found):
    other = {"title": "noise in the sum", "points": [[8.0, 0.7]]}
    (axes,) = plots.safl_epsilon(found, [other]).axes
    assert "noise in the sum" in axes.get_legend_handles_labels()[1]


def test_a_picture_marks_what_was_not_learned(found):
    figure = plots.safl_epsilon(found)
    (axes,) = figure.axes
    hollow = [own for own in axes.collections if own.get_gid() == "did not learn"]
    assert len(hollow) == 1
    assert plots.safl_epsilon(found | {"lines": found["lines"][:7]}) is None
    (axes,) = plots.safl_bytes(found).axes
    assert {text.get_text() for text in axes.texts} == {"central", "majority class", "untrained model"}
    _, named = axes.get_legend_handles_labels()
    assert named == ["FedAvg", "SAFL", "random layers", "fixed layers"]
