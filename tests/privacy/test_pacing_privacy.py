"""Clients that work at their own pace: epsilon is that of the requests each trained for."""

import pytest

from fedfrozen_app.privacy.accountant import epsilon_of
from fedfrozen_app.privacy.budget import BudgetFile
from fedfrozen_app.privacy.steps import Steps
from tests.conftest import same_bits
from tests.resuming import without_times

PRIVATE = (
    "strategy=fedavg",
    "privacy=dp_sgd",
    "privacy.epsilon=8",
    "privacy.accountant=rdp",
    "client.local_steps=2",
    "client.batch_size=4",
)
STEPS = 2  # a request
CLOCK = ("clock=profiles", "clock.uplink=1", "clock.spread=2", "num_clients=3", "num_rounds=5")
BUFFERED = ("pacing=buffered", "pacing.concurrency=3", "pacing.buffer=1")


def budget_of(run, client):
    found = BudgetFile(run.folder / "privacy", client).read()
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("words", "most"),
    [
        (BUFFERED, 5),
        *[
            pytest.param(words, most, marks=pytest.mark.slow)
            for words, most in [
                ((*BUFFERED, "runtime.runner=cohort"), 5),
                ((*BUFFERED, "pacing.max_staleness=0"), 5),
                (("pacing=deadline", "pacing.share=0.3", "pacing.late=drop"), 5),
                (("pacing=deadline", "pacing.share=0.3"), 5),
            ]
        ],
    ],
)
def test_each_client_pays_for_the_requests_that_it_got(train, words, most):
    """Also for those that are on their way, or dropped. The noise is solved for the most there can be."""
    run = train(*PRIVATE, *CLOCK, *words)
    asked = {client: sum(client in row["virtual_by_client"] for row in run.rows[1:]) for client in "012"}
    assert len(set(asked.values())) > 1 and max(asked.values()) <= most
    last = {}
    for row in run.rows[1:]:
        assert set(row["epsilon"]) == set(row["virtual_by_client"])
        last |= row["epsilon"]
    for client, count in asked.items():
        budget = budget_of(run, client)
        (paid,) = {(step.noise, step.rate) for step in budget.steps}
        assert budget.rounds == count and sum(step.times for step in budget.steps) == STEPS * count
        assert last[client] == epsilon_of([Steps(*paid, STEPS * count)], budget.delta, "rdp", 8.0) <= 8.0
        # With one request more than there can be, it would be over.
        assert epsilon_of([Steps(*paid, STEPS * most)], budget.delta, "rdp", 8.0) == pytest.approx(
            8.0, rel=0.01
        )


@pytest.mark.slow
def test_a_private_run_that_was_killed_pays_once_for_what_it_kept(train, monkeypatch):
    """Rounds after the checkpoint run again: what their clients had paid for is answered from their disk."""
    words = (*PRIVATE, *CLOCK, *BUFFERED, "privacy.seeded_noise=true")
    whole = train(*words, folder="whole")
    from fedfrozen_app.handlers import train_handler

    real, rounds = train_handler.train_privately, []

    def dies(context, worker, request, *rest):
        rounds.append(request.round)
        if request.round == 3:
            raise KeyboardInterrupt
        return real(context, worker, request, *rest)

    monkeypatch.setattr(train_handler, "train_privately", dies)
    with pytest.raises(KeyboardInterrupt):
        train(*words, folder="broken")
    monkeypatch.undo()
    resumed = train(*words, folder="broken", resume=True)
    assert same_bits(whole.model, resumed.model)
    assert [without_times(row) for row in resumed.rows] == [without_times(row) for row in whole.rows]
    for client in "012":
        assert budget_of(resumed, client).steps == budget_of(whole, client).steps
