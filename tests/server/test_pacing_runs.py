"""Runs that do not wait for all clients: FedAvg's bits where they must be, killed, resumed, and repeated."""

import pytest

from tests.conftest import same_bits, slowly
from tests.resuming import resumed_and_whole, without_times

CLOCK = ("clock=profiles", "clock.uplink=1", "clock.spread=1", "num_clients=4")
BUFFERED = (*CLOCK, "pacing=buffered", "pacing.concurrency=3", "pacing.buffer=2")
DEADLINE = (*CLOCK, "pacing=deadline", "pacing.share=0.5")
COHORT = "runtime.runner=cohort"


@pytest.mark.parametrize(
    "words",
    [
        ("pacing=buffered", "pacing.concurrency=4", "pacing.buffer=4"),
        ("pacing=deadline", "pacing.seconds=1e6", "pacing.share=1", COHORT),
        *slowly(
            ("pacing=buffered", "pacing.buffer=4", COHORT),
            ("pacing=deadline", "pacing.seconds=1e6"),
            ("pacing=buffered", "pacing.buffer=4", "strategy=safl", "strategy.top_k=1"),
            ("pacing=buffered", "pacing.buffer=4", "adapter=lora"),
            ("pacing=buffered", "pacing.buffer=4", "strategy=fednova", "client=sgd"),
            ("pacing=deadline", "pacing.seconds=1e6", "strategy=fedrep", COHORT),
            ("pacing=deadline", "pacing.seconds=1e6", "pacing.late=drop", "aggregation=median"),
        ),
    ],
)
def test_where_nobody_is_late_it_is_synchronous_to_the_bit(train, words):
    """Whatever the clients' speeds: a buffer of all clients waits for all of them."""
    common = [word for word in words if not word.startswith("pacing")]
    plain = train("strategy=fedavg", *CLOCK, *common, folder="plain")
    paced = train("strategy=fedavg", *CLOCK, *words, folder="paced")
    assert same_bits(plain.model, paced.model)
    for one, other in zip(plain.rows, paced.rows, strict=True):
        assert without_times(one).items() <= without_times(other).items()


@pytest.mark.slow
def test_a_buffer_of_the_cohort_and_equal_speeds_are_fedavg_to_the_bit(train):
    """Half of the clients a round, the same ones: all reply at one instant."""
    common = ("strategy=fedavg", "num_clients=4", "participation=0.5", "partition=iid", "dataset.limit=200")
    equal = (*common, "clock=profiles", "clock.distribution=equal")
    plain = train(*equal, folder="plain")
    paced = train(*equal, "pacing=buffered", "pacing.buffer=2", folder="paced")
    times = [time for row in paced.rows[1:] for time in row["virtual_by_client"].values()]
    assert len({train for _, _, train, _ in times}) == 1, "the clients have unlike numbers of rows"
    assert same_bits(plain.model, paced.model)
    assert [row["clients"] for row in plain.rows[1:]] == [row["clients"] for row in paced.rows[1:]]


@pytest.mark.parametrize(
    "words",
    [
        ("strategy=fedfrozen", "strategy.warmup_rounds=2", *BUFFERED),
        *slowly(
            ("strategy=fedavg", *DEADLINE, "server_optimizer=adam"),
            ("strategy=fedavg", *DEADLINE, "pacing.late=drop"),
            ("strategy=safl", "strategy.top_k=1", *BUFFERED, "pacing.max_staleness=1"),
            ("strategy=fedavg", "adapter=lora", *BUFFERED),
            ("strategy=fedrep", *BUFFERED),
        ),
    ],
)
def test_killed_in_the_middle_of_the_queue_it_goes_on_to_the_bit(train, monkeypatch, words):
    resumed, whole = resumed_and_whole(train, monkeypatch, *words, "num_rounds=5")
    assert whole.rows[2]["clients_at_work"]
    assert any(row["staleness_max"] for row in whole.rows[3:]) or "pacing.late=drop" in words
    assert [row["virtual_seconds"] for row in resumed.rows] == [row["virtual_seconds"] for row in whole.rows]


@pytest.mark.parametrize(
    "words",
    [(*BUFFERED, COHORT), *slowly((*DEADLINE, COHORT), (*BUFFERED, COHORT, "clock.availability=0.5"))],
)
def test_a_stack_of_clients_resumed_in_the_middle_of_the_queue_has_the_same_bits(train, words):
    words = ("strategy=fedavg", "client.lr_schedule=constant", "checkpoint.every=1", *words)
    whole = train(*words, "num_rounds=5", folder="whole")
    train(*words, "num_rounds=2", folder="parted")
    resumed = train(*words, "num_rounds=5", folder="parted", resume=True)
    assert same_bits(whole.model, resumed.model)
    assert list(map(without_times, resumed.rows)) == list(map(without_times, whole.rows))
    assert whole.rows[2]["clients_at_work"] and any(row["staleness_max"] for row in whole.rows[3:])


@pytest.mark.slow
def test_stacked_and_in_turn_agree(train):
    """Clients of one version train as one stack; what is late does not depend on the runner."""
    words = ("strategy=fedavg", "model.dtype=float64", *BUFFERED, "num_rounds=4")
    turn, stack = train(*words, folder="turn"), train(*words, COHORT, folder="stack")
    for name, value in turn.model.items():
        assert (stack.model[name] - value).norm() <= 1e-9 * max(1.0, value.norm()), name
    assert [row["pacing"] for row in turn.rows[1:]] == [row["pacing"] for row in stack.rows[1:]]


@pytest.mark.slow
def test_a_client_that_takes_no_part_any_more_leaves_the_queue(train):
    """Its update, which is on its way in the checkpoint, is not used."""
    words = ("strategy=fedavg", *BUFFERED, "checkpoint.every=1", "client.lr_schedule=constant")
    run = train(*words, "num_rounds=2", folder="with")
    gone = run.rows[2]["pacing"]["at_work"][0]
    start = f"from={run.folder}/checkpoints/2"
    fork = train(*words, "num_rounds=5", start, f"exclude_clients=[{gone}]", folder="without")
    assert [row["round"] for row in fork.rows] == [0, 1, 2, 3, 4, 5]
    assert not any(gone in (*row["clients"], *row["virtual_by_client"]) for row in fork.rows[3:])


def test_a_run_with_more_places_than_clients_ends_with_a_sentence(tmp_path, capsys):
    from fedfrozen_app.__main__ import run as command

    words = [*CLOCK, "pacing=buffered", "pacing.concurrency=5", f"output_dir={tmp_path}/run"]
    assert command(words) == 2
    error = capsys.readouterr().err
    assert "pacing.concurrency=5 clients cannot be at work in a run of 4: lower it" in error
