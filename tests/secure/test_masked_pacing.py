"""Masked cohorts at their own pace: exact sums that arrive late with their weight, given up, and resumed."""

import pytest
import torch

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.handlers import masking_handler, train_handler
from fedfrozen_app.privacy.accountant import epsilon_of
from fedfrozen_app.privacy.budget import BudgetFile
from fedfrozen_app.privacy.steps import Steps
from fedfrozen_app.secure.work import MASKED, updates_of
from fedfrozen_app.server import masked as server
from tests.conftest import same_bits, slowly
from tests.resuming import kill_in_round, without_times
from tests.secure.runs import ON, PLAIN

CLOCK = ("clock=profiles", "clock.uplink=1", "clock.spread=1", "num_clients=6", "dataset.limit=200")
MASKS = (ON, "secure_aggregation.min_cohort=2", "pacing=buffered", "pacing.concurrency=4", "pacing.buffer=2")
COHORTS = ("strategy=fedavg", *CLOCK, *MASKS)


@pytest.fixture
def updates(monkeypatch):
    """(Round, client) -> the examples and the update that it masked; and what the server is handed."""
    own, handed, pending = {}, [], []
    encoded, masked, take_reply = masking_handler.encoded, masking_handler.masked, server.Cohort.take_reply

    def note(roster, request, reply, base, *rest):
        found = updates_of(request, reply.arrays, base)
        pending.append((reply.examples, {name: value.double() for name, value in found.items()}))
        return encoded(roster, request, reply, base, *rest)

    def name(session, request, *rest):
        own[request.round, session.name] = pending.pop()
        return masked(session, request, *rest)

    def take(cohort, client, reply):
        if not isinstance(reply, str):
            handed.append((client, set(reply.arrays), reply.examples))
        return take_reply(cohort, client, reply)

    monkeypatch.setattr(masking_handler, "encoded", note)
    monkeypatch.setattr(masking_handler, "masked", name)
    monkeypatch.setattr(server.Cohort, "take_reply", take)
    return own, handed


def mean_of(updates, row, name):
    """s(τ) Σ nᵢ uᵢ / Σ nᵢ, from the clients' own updates."""
    used = [(updates[row["round"] - age, client], age) for client, age in row["pacing"]["used"]]
    total = sum(examples * (1 + age) ** -0.5 * update.get(name, 0.0) for (examples, update), age in used)
    return total / sum(examples for (examples, _), _ in used)


def test_each_step_is_the_exact_sum_of_one_cohort_with_its_weight(train, updates):
    own, handed = updates
    words = ("num_rounds=6", "checkpoint.every=1", "checkpoint.keep=9", *PLAIN)
    run = train(*COHORTS, *words, "strategy=fedfrozen", "strategy.warmup_rounds=2")
    ages = [row["staleness_max"] for row in run.rows[1:]]
    assert max(ages) > 0, "no sum is late"
    late_after_freeze = False
    for row in run.rows[2:]:
        before, after = run.model_after(row["round"] - 1), run.model_after(row["round"])
        assert row["secure"]["summed"] == 2 and len(row["clients"]) == 2 and not row["clients_failed"]
        assert row["staleness_mean"] == row["staleness_max"], "one cohort starts from one version"
        late_after_freeze |= row["round"] > 2 and row["round"] - row["staleness_max"] <= 2
        for name, value in after.items():
            moved = value.double() - before[name].double()
            expected = mean_of(own, row, name)
            if row["round"] > 2 and (".q_proj." in name or ".k_proj." in name):
                expected = torch.zeros_like(moved)  # frozen since
            last_bit = torch.finfo(torch.float32).eps * float(value.abs().max())
            assert float((moved - expected).abs().max()) <= row["secure"]["rounding"] + last_bit, name
    assert late_after_freeze, "no sum of the warm-up arrives after the freeze"
    # The server is handed masked numbers alone, without examples.
    assert {client for client, *_ in handed} == set("012345")
    assert all(arrays == {MASKED} and examples == 0 for _, arrays, examples in handed)


def test_a_cohort_under_its_threshold_is_given_up_and_its_clients_are_free_again(train, monkeypatch):
    real, failed = train_handler.train_client, []

    def fails(worker, client, request, *rest):
        if request.round == 1 and not failed:
            failed.append(client)
            raise RuntimeError("out of memory")
        return real(worker, client, request, *rest)

    monkeypatch.setattr(train_handler, "train_client", fails)
    run = train(*COHORTS, "num_rounds=6", "checkpoint.every=1", "checkpoint.keep=9")
    (client,) = failed
    given_up = [row for row in run.rows if row.get("discarded")]
    (row,) = given_up
    assert client in row["clients"] and row["clients_failed"] >= 1 and "no sum" in row["discarded"]
    number = row["round"]
    before = run.model_after(number - 1) if number > 1 else run.model_after(1)
    assert same_bits(before, run.model_after(number))
    later = [one for one in run.rows if one["round"] > number]
    assert client in {name for one in later for name in one["virtual_by_client"]}, "it is never asked again"
    assert all(one["secure"]["summed"] == 2 for one in later)


@pytest.mark.slow
def test_a_buffer_that_is_too_small_for_a_sum_is_refused(train):
    """By itself it is half of the clients at work."""
    with pytest.raises(UserError, match=r"a round has 2: raise pacing\.buffer, or lower it"):
        train("strategy=fedavg", *CLOCK, ON, "pacing=buffered", "pacing.concurrency=4")


@pytest.mark.slow
def test_one_cohort_of_all_clients_is_the_synchronous_masked_run(train):
    words = ("strategy=fedavg", *CLOCK, ON, "num_clients=4")
    plain = train(*words, folder="plain")
    paced = train(*words, "pacing=buffered", "pacing.buffer=4", folder="paced")
    assert same_bits(plain.model, paced.model)
    assert [row["virtual_seconds"] for row in plain.rows] == [row["virtual_seconds"] for row in paced.rows]
    assert [row["bytes_up"] for row in plain.rows[1:]] == [row["bytes_up"] for row in paced.rows[1:]]


def without_seconds(row):
    return without_times({**row, "secure": {**row.get("secure", {}), "seconds": {}}})


@pytest.mark.parametrize(
    "words",
    [
        (),
        *slowly(
            ("strategy=safl", "strategy.top_k=1"),
            ("adapter=lora",),
            ("pacing.max_staleness=0",),
            ("strategy=fednova", "client=sgd"),
        ),
    ],
)
def test_killed_while_cohorts_are_at_work_it_goes_on_to_the_bit(train, monkeypatch, words):
    words = (*COHORTS, "num_rounds=5", "checkpoint.every=1", *words)
    whole = train(*words, folder="whole")
    kill_in_round(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        train(*words, folder="broken")
    monkeypatch.undo()
    resumed = train(*words, folder="broken", resume=True)
    assert same_bits(whole.model, resumed.model)
    for one, other in zip(map(without_seconds, resumed.rows), map(without_seconds, whole.rows), strict=True):
        assert one.keys() == other.keys()
        for key in one:
            assert one[key] == other[key], (key, one["round"])
    assert whole.rows[2]["clients_at_work"] == 2


@pytest.mark.slow
def test_each_private_client_pays_for_the_cohorts_it_was_in(train):
    words = ("privacy=dp_sgd", "privacy.epsilon=8", "privacy.accountant=rdp", "client.local_steps=2")
    run = train(*COHORTS, *words, "client.batch_size=4", "num_rounds=6")
    asked = {client: sum(client in row["virtual_by_client"] for row in run.rows[1:]) for client in "012345"}
    assert len(set(asked.values())) > 1
    spent = {}
    for row in run.rows[1:]:
        assert set(row.get("epsilon", {})) == set(row["virtual_by_client"])
        spent |= row.get("epsilon", {})
    for client, count in asked.items():
        budget = BudgetFile(run.folder / "privacy", client).read()
        (paid,) = {(step.noise, step.rate) for step in budget.steps}
        assert budget.rounds == count and sum(step.times for step in budget.steps) == 2 * count
        assert spent[client] == epsilon_of([Steps(*paid, 2 * count)], budget.delta, "rdp", 8.0) <= 8.0
