"""Runs that do not wait for all clients: FedAvg's bits where they must be, resumed, and all bytes counted."""

import pytest

from tests.conftest import same_bits, slowly

CLOCK = ("clock=profiles", "clock.uplink=1", "clock.spread=1", "num_clients=4")
ONE_TWO = ("pacing=buffered", "pacing.concurrency=3", "pacing.buffer=2")


def without(row, *names):
    dropped = {"seconds", "client_seconds", *names}
    return {key: value for key, value in row.items() if key not in dropped}


def rows_of(run):
    return [without(row) for row in run.rows]


def test_a_run_resumed_in_the_middle_of_the_queue_has_the_same_bits(train):
    words = (
        "strategy=fedfrozen",
        "strategy.warmup_rounds=2",
        *CLOCK,
        *ONE_TWO,
        "checkpoint.every=1",
        "client.lr_schedule=constant",
    )
    whole = train(*words, "num_rounds=5", folder="whole")
    train(*words, "num_rounds=2", folder="parted")
    resumed = train(*words, "num_rounds=5", folder="parted", resume=True)
    assert same_bits(whole.model, resumed.model)
    assert rows_of(resumed) == rows_of(whole)
    assert whole.rows[2]["clients_at_work"] and any(row["staleness_max"] for row in whole.rows[1:])


@pytest.mark.parametrize(
    "words",
    [
        ("pacing=buffered", "pacing.concurrency=4", "pacing.buffer=4"),
        *slowly(
            ("pacing=buffered", "pacing.buffer=4", "runtime.runner=cohort"),
            ("pacing=deadline", "pacing.seconds=1e6", "runtime.runner=cohort"),
        ),
        ("pacing=deadline", "pacing.seconds=1e6", "pacing.share=1"),
    ],
)
def test_where_nobody_is_late_it_is_fedavg_to_the_bit(train, words):
    runner = [word for word in words if word.startswith("runtime")]
    plain = train("strategy=fedavg", *CLOCK, *runner, folder="plain")
    paced = train("strategy=fedavg", *CLOCK, *words, folder="paced")
    assert same_bits(plain.model, paced.model)
    known = [without(row) for row in plain.rows]
    assert [{key: row[key] for key in old} for row, old in zip(paced.rows, known, strict=True)] == known
