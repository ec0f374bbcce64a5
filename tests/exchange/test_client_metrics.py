"""Metrics of a client are declared, bounded and few: all others make a bad reply, in one sentence."""

import math
from dataclasses import replace

import pytest

from fedfrozen_app.exchange.check import problem_of
from fedfrozen_app.exchange.client_metrics import MOST, declared_metrics, problem_of_metrics
from fedfrozen_app.exchange.messages import Reply
from fedfrozen_app.server.aggregate import RunningMean
from fedfrozen_app.server.record import RoundRecord
from tests.server.test_fuzz import MODEL, ORDER, ROLES

PRIVATE = replace(ORDER, participations={"north": 1})
EVALUATION = replace(ORDER, evaluate=True, plan=replace(ORDER.plan, shared=()))
ROWS = {"train_rows": 10.0, "test_rows": 5.0}


def problem(metrics, request=ORDER, names=()):
    return problem_of_metrics(
        Reply(request.digest, 1, {}, metrics), request, declared_metrics(request, names)
    )


@pytest.mark.parametrize(
    "name",
    [
        *(
            "audited",
            "privacy_unit",
            "epsilon",
            "delta",
            "epsilon_max",
            "round",
            "stage",
            "failures",
            "by_client",
        ),
        *(
            "secure",
            "clients_ok",
            "bytes_up",
            "val_accuracy",
            "novel_accuracy",
            "test_accuracy",
            "warmup",
            "drift",
        ),
        *("usual_norm", "__proto__", "", "a\x1b[31m", "layer_score_0", "train_rows", "fair/global/all//rows"),
    ],
)
def test_no_client_sends_a_metric_that_is_not_declared(name):
    """Neither the server's own, nor what means something to a report."""
    reply = Reply(ORDER.digest, 1, {n: value.clone() for n, value in MODEL.items()}, {name: 1.0})
    record = RoundRecord(1, RunningMean(MODEL, lambda parameter: "rest"))
    assert not record.take("north", problem_of(reply, ORDER, MODEL, ROLES) or reply)
    assert "which neither its algorithm nor its strategy declares" in record.failures[0]
    assert record.failures[0].isprintable()
    row = record.row("warmup", ["north"], 9, {})
    assert name not in set(row) - {"round", "stage", "failures", "clients_ok", "bytes_up", "drift"}


def test_a_flood_of_names_is_one_sentence():
    assert problem({f"m{n}": 1.0 for n in range(100_000)}) == f"sent 100000 figures, and {MOST} are the most"
    many = {f"fair/global/all/{n}/rows": 1.0 for n in range(MOST + 1)}
    assert "are the most" in problem(ROWS | many, EVALUATION)


def test_what_is_declared_passes():
    sound = {"train_loss": 2.3, "client_val_before": 0.5, "client_seconds": 0.1, "personal_accuracy": 1.0}
    assert problem(sound) is None
    assert problem(sound | {"layer_score_0": -3.0}, names=("layer_score_0",)) is None
    assert problem(sound | {"epsilon": 2.0, "delta": 1e-5}, PRIVATE) is None
    assert problem({"epsilon": 2.0}, PRIVATE) == "tells only one of epsilon and delta"
    groups = {"fair/personal/sex/F/accuracy": 0.5, "fair/personal/all//rows": 9.0, "global": 0.5}
    assert problem(ROWS | groups, EVALUATION) is None
    assert problem(groups, EVALUATION) == "did not send the figure train_rows"


@pytest.mark.parametrize(
    ("metrics", "request_", "why"),
    [
        ({"train_loss": math.nan}, ORDER, "not finite"),
        ({"train_loss": 1e308}, ORDER, "too large"),
        ({"personal_accuracy": 7.0}, ORDER, "between 0 and 1"),
        ({"client_seconds": -1.0}, ORDER, "a number from 0 on"),
        ({"epsilon": -1.0, "delta": 0.0}, PRIVATE, "a number from 0 on"),
        ({"epsilon": 1.0, "delta": 3.0}, PRIVATE, "between 0 and 1"),
        (ROWS | {"test_rows": 1e20}, EVALUATION, "a number from 0 on"),
        (ROWS | {"fair/evil/all//rows": 1.0}, EVALUATION, "declares"),
        (ROWS | {"fair/global/sex/\u202ex/rows": 1.0}, EVALUATION, "declares"),
        (ROWS | {"fair/global/a/b/c/rows": 1.0}, EVALUATION, "declares"),
        (ROWS | {"train_loss": 1.0}, EVALUATION, "declares"),
    ],
)
def test_values_have_bounds(metrics, request_, why):
    found = problem(metrics, request_)
    assert found is not None and why in found and found.isprintable()
