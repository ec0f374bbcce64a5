"""Clients that would be late take fewer steps (`pacing.partial`), and FedNova divides updates by them."""

import pytest
import torch

from fedfrozen_app.run.virtual_time import rows_taken
from tests.conftest import same_bits, slowly

WORDS = ("strategy=fednova", "client=sgd", "client.batch_size=4", "num_clients=4", "client.lr=0.05")
CLOCK = ("clock=profiles", "clock.spread=1", "clock.speed=0.2")
COHORT = "runtime.runner=cohort"


@pytest.mark.parametrize(("steps", "expected"), [(None, 40), (1, 16), (2, 20), (3, 36), (4, 40), (9, 40)])
def test_rows_of_so_many_steps(steps, expected):
    """20 rows in batches of 16, twice: 16, 4, 16, 4."""
    assert rows_taken(20, 16, 2, steps) == expected


def limited(seconds):
    return "pacing=deadline", f"pacing.seconds={seconds}", "pacing.share=1", "pacing.partial=true"


@pytest.mark.parametrize("more", [(), *slowly((COHORT,))])
def test_who_would_be_late_takes_the_steps_it_has_time_for(train, more):
    free = train(*WORDS, *CLOCK, *more, "num_rounds=1", folder="free")
    times = {client: sum(parts) for client, parts in free.rows[1]["virtual_by_client"].items()}
    seconds = 0.6 * max(times.values())
    run = train(*WORDS, *CLOCK, *more, *limited(seconds), "num_rounds=3", folder="partial")
    late = {client for client, time in times.items() if time > seconds}
    assert late and late < set(times)
    for row in run.rows[1:]:
        assert set(row["local_steps"]) == late and row["clients_ok"] == 4 and not row["clients_at_work"]
        for client, parts in row["virtual_by_client"].items():
            assert sum(parts) <= seconds
            if client in late:  # one step more would have been too many
                assert sum(parts) + parts[2] / row["local_steps"][client] > seconds - 1e-5
    # aᵢ without momentum is the number of steps, in the metric that clients send.
    assert run.rows[1]["accumulated_steps"] < free.rows[1]["accumulated_steps"]


@pytest.mark.slow
def test_in_turn_and_stacked_take_the_same_steps(train):
    free = train(*WORDS, *CLOCK, "num_rounds=1", folder="free")
    seconds = 0.6 * max(sum(parts) for parts in free.rows[1]["virtual_by_client"].values())
    words = (*WORDS, *CLOCK, *limited(seconds), "num_rounds=2", "model.dtype=float64")
    turn, stack = train(*words, folder="turn"), train(*words, COHORT, folder="stack")
    assert turn.rows[1]["local_steps"] == stack.rows[1]["local_steps"] != {}
    assert turn.rows[1]["accumulated_steps"] == pytest.approx(stack.rows[1]["accumulated_steps"])
    for name, value in turn.model.items():
        assert torch.allclose(stack.model[name], value, rtol=0, atol=1e-9), name


@pytest.mark.slow
def test_with_time_for_all_steps_nothing_changes(train):
    plain, paced = (train(*WORDS, *CLOCK, *words, folder=f"run{len(words)}") for words in ((), limited(1e6)))
    assert same_bits(plain.model, paced.model)
    assert [row["bytes_down"] for row in plain.rows[1:]] == [row["bytes_down"] for row in paced.rows[1:]]
