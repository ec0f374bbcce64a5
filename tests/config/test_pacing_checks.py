"""What goes with a server that does not wait: everything else ends with one sentence and exit code 2."""

import pytest

from fedfrozen_app.config import compose_run
from fedfrozen_app.core import registry
from fedfrozen_app.core.errors import UserError
from tests.conftest import slowly

BUFFERED, DEADLINE = ("clock=profiles", "pacing=buffered"), ("clock=profiles", "pacing=deadline")

MASKED = (*BUFFERED, "secure_aggregation=on")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("pacing=buffered",), "pacing=buffered goes by the virtual time at which clients reply: add clock="),
        (
            ("pacing=buffered", "runtime=deployed", "secure_aggregation=on"),
            "with runtime=deployed pacing=buffered lets each reply at its own time: use pacing=synchronous",
        ),
        (
            ("pacing=deadline", "pacing.seconds=9", "pacing.partial=true", "runtime=deployed"),
            "with runtime=deployed it is not: leave it out",
        ),
        (
            ("pacing=buffered", "runtime=deployed", "checkpoint.every=5"),
            "checkpoint.every=5 leaves rounds without a checkpoint, and with pacing=buffered sites reply in",
        ),
        (
            (*DEADLINE, "runtime=flower"),
            "the real time of nodes with runtime=flower, and clock=profiles by a",
        ),
        (
            ("pacing=buffered", "runtime=flower", "secure_aggregation=on"),
            "with runtime=flower pacing=buffered lets each reply at its own time: use pacing=synchronous",
        ),
        (
            (*DEADLINE, "secure_aggregation=on"),
            "secure_aggregation=on sums over clients that started from one version of the model, and "
            "pacing=deadline sets late clients apart: use pacing=buffered, whose cohorts wait for no other",
        ),
        ((*MASKED, "pacing.concurrency=4", "pacing.buffer=2"), "pacing.buffer=2 clients are a cohort whose"),
        (
            (*MASKED, "pacing.concurrency=7", "pacing.buffer=3"),
            "pacing.concurrency=7 clients are no whole num",
        ),
        ((*MASKED, "aggregation.cohorts=batches"), "aggregation.cohorts=batches builds on the round before"),
        (
            (*BUFFERED, "strategy=scaffold", "client=sgd"),
            "strategy=scaffold does not declare that it is sound under pacing=buffered",
        ),
        ((*BUFFERED, "strategy.warmup_rounds=auto"), "strategy.warmup_rounds=auto compares the movement of"),
        ((*BUFFERED, "aggregation=median"), "aggregation=median compares updates of one version"),
        ((*DEADLINE, "aggregation=median"), "aggregation=median compares updates of one version"),
        ((*BUFFERED, "adapter=lora", "adapter.rule=fedex"), "adapter.rule=fedex changes the frozen weights"),
        ((*BUFFERED, "adapter=lora", "+adapter.ranks.0=2"), "adapter.ranks gives clients adapters"),
        ((*DEADLINE, "pacing.share=1"), "pacing=deadline without pacing.seconds, and with pacing.share=1"),
        ((*BUFFERED, "pacing.concurrency=4", "pacing.buffer=5"), "pacing.buffer=5 replies cannot be in"),
        ((*BUFFERED, "pacing.concurrency=4", "participation=0.5"), "leave participation=0.5 out"),
        ((*BUFFERED, "pacing.seconds=4"), "pacing=buffered ignores pacing.seconds: add pacing=deadline"),
        (("pacing.buffer=4",), "pacing=synchronous ignores pacing.buffer"),
        ((*DEADLINE, "pacing.late=drop", "pacing.max_staleness=2"), "pacing.late=drop ignores pacing.max_st"),
        ((*DEADLINE, "pacing.partial=true"), "pacing.partial=true fits steps into the time of a round: set"),
        (
            (*DEADLINE, "pacing.seconds=5", "pacing.partial=true"),
            "strategy=fedfrozen does not divide updates by them: use strategy=fednova",
        ),
        ((*BUFFERED, "pacing.buffer=0"), "pacing.buffer=0 is out of range"),
        ((*DEADLINE, "pacing.share=1.5"), "pacing.share=1.5 is out of range"),
    ],
)
def test_what_cannot_work_is_refused(words, sentence):
    with pytest.raises(UserError) as error:
        _ = compose_run(list(words)).config
    assert sentence in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "words",
    [
        (*DEADLINE, "aggregation=median", "pacing.late=drop"),
        (*MASKED, "pacing.concurrency=6", "pacing.buffer=3"),
        *slowly((*BUFFERED, "adapter=lora"), (*BUFFERED, "adapter=lora", "adapter.rule=ffa")),
    ],
)
def test_what_can_work_is_not(words):
    assert compose_run(list(words)).config.pacing.name in ("deadline", "buffered")


def test_methods_with_arrays_of_one_version_declare_no_pacing():
    """Control variates, momenta and gradients that a server combines belong to one version of the model."""
    for name in (
        "scaffold",
        "feddyn",
        "mimelite",
        "local_momentum",
        "qfedavg",
        "term",
        "moon",
        "ditto",
        "apfl",
    ):
        assert registry.find("strategies", name).pacings == (), name
    for name in ("fedavg", "fedprox", "fedfrozen", "safl", "fednova", "fedper"):
        assert registry.find("strategies", name).pacings == ("deadline", "buffered"), name
