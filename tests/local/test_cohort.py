"""The cohort runner against the sequential one: the same updates, whatever the block."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.files.checkpoint import read as checkpoint_of
from fedfrozen_app.local import cohort, cohort_evaluation
from fedfrozen_app.local.cohort import CohortRunner
from fedfrozen_app.local.slot_memory import try_step
from fedfrozen_app.local.slots import OVERHEAD, assign_slots, cheapest_size
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.models.task import Task
from tests.comparing import is_key_bias
from tests.conftest import same_bits, slowly
from tests.local.runners import THREE_ROUNDS, compare, no_dropout
from tests.models.tiny_checkpoints import BERT, GPT2, LLAMA, checkpoint


def test_clients_evaluated_together_are_those_evaluated_one_by_one(train, monkeypatch):
    """Whatever their sizes, and however many rows at once."""
    words = ["strategy=fedavg", "runtime.runner=cohort", "model.dtype=float64", "num_rounds=2"]
    words += ["num_clients=5", "partition.alpha=0.1", "partition.min_size=1", "runtime.max_block=3"]
    rows = []
    for name, change in (
        ("together", lambda: None),
        ("in pieces", lambda: monkeypatch.setattr(Task, "rows_at_once", lambda self, table: 7)),
        (
            "apart",
            lambda: monkeypatch.setattr(cohort_evaluation, "evaluates_one_by_one", lambda *given: True),
        ),
    ):
        change()
        rows.append([row["by_client"] for row in train(*words, folder=name).rows[1:]])
    assert rows[0] == rows[1] == rows[2]
    assert len(rows[0][0]["client_val_after"]) == 5


@pytest.mark.parametrize("client", ["client=adamw", *slowly("client=sgd")])
@pytest.mark.parametrize("strategy", ["fedprox", "fedfrozen", *slowly("fedavg")])
def test_cohort_equals_sequential_in_float64(train, strategy, client):
    words = [f"strategy={strategy}", client, "model.dtype=float64", *THREE_ROUNDS]
    if strategy == "fedprox":
        # With Adam the pull blows a key bias's rounding noise up by lr·mu/1e-8 a step: keep that small.
        words += ["strategy.mu=0.01", "client.lr=1e-4", "client.local_steps=3"]
    one = train(*words, folder="one")
    other = train(*words, "runtime.runner=cohort", folder="other")
    compare(one, other, 1e-9, per_tensor=True)
    for row, twin in zip(one.rows[1:], other.rows[1:], strict=True):
        assert row["train_loss"] == pytest.approx(twin["train_loss"], rel=1e-9)
        for key in ("client_val_before", "client_val_after", "test_accuracy", "by_client"):
            assert row[key] == twin[key]
        for group, drift in row["drift"].items():
            assert drift == pytest.approx(twin["drift"][group], rel=1e-6)


@pytest.mark.parametrize("client", ["client=adamw", "client=sgd"])
@pytest.mark.slow
def test_cohort_equals_sequential_in_float32(train, client):
    words = [client, "client.local_steps=5", "client.lr_schedule=constant", *THREE_ROUNDS]
    compare(
        train(*words, folder="one"),
        train(*words, "runtime.runner=cohort", folder="other"),
        1e-3,
        per_tensor=False,
    )


@pytest.mark.parametrize("extra", ["client.clip=0.05", *slowly("client.class_weights=true")])
def test_clipping_and_class_weights_are_each_client_s_own(train, extra):
    words = ["model.dtype=float64", extra, *THREE_ROUNDS]
    one = train(*words, folder="one")
    compare(one, train(*words, "runtime.runner=cohort", folder="other"), 1e-9, per_tensor=True)


@pytest.mark.slow
def test_slots_do_not_change_the_result(train):
    words = ["model.dtype=float64", "num_clients=5", "runtime.runner=cohort", *THREE_ROUNDS]
    whole = train(*words, folder="whole")
    for size in (1, 2):
        parts = train(*words, f"runtime.max_block={size}", folder=str(size))
        compare(whole, parts, 1e-9, per_tensor=True)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["apfl", "scaffold", "moon"])
def test_a_step_that_only_measures_memory_suits_every_kind_of_method(train, monkeypatch, strategy):
    """On a GPU it comes before the first round: with arrays from the request, kept ones, and trained ones."""

    def measured(self, clients, request):
        assert try_step(self.worker, self._layouts(request), clients[0], request, 2) > 0
        return len(clients)

    words = (f"strategy={strategy}", "runtime.runner=cohort", "client=sgd", "client.momentum=0")
    usual = train(*words, folder="usual")
    monkeypatch.setattr(CohortRunner, "_largest", measured)
    assert same_bits(train(*words, folder="measured").model, usual.model)


def test_a_cohort_run_repeats_to_the_bit(train):
    one, other = (train("runtime.runner=cohort", folder=name) for name in "ab")
    assert same_bits(one.model, other.model)


@pytest.mark.parametrize("kind", ["bert", "llama", "gpt2"])
@pytest.mark.slow
def test_text_models_with_masks_train_as_a_cohort(train, tmp_path, kind):
    lines = ["text,label", *(f"{'good ' * (n % 7)}note {n},{n % 2}" for n in range(90))]
    path = tmp_path / "notes.csv"
    path.write_text("\n".join(lines))
    words = ["dataset=text", f"dataset.path={path}", "dataset.max_tokens=24", "num_clients=3"]
    model = checkpoint(no_dropout({"bert": BERT, "llama": LLAMA, "gpt2": GPT2}[kind]), tmp_path / "model")
    words += ["model=checkpoint", f"model.path={model}"]
    words += ["partition=iid", "model.dtype=float64", "client.local_steps=3", *THREE_ROUNDS]
    one = train(*words, folder="one", small=False)
    other = train(*words, "runtime.runner=cohort", folder="other", small=False)
    compare(one, other, 1e-9, per_tensor=True)


def test_one_diverging_client_is_set_aside_alone(train, monkeypatch):
    from fedfrozen_app.local.step import Step

    real = Step.finish

    def diverge(self, *given):
        values, losses = real(self, *given)
        values[1, 5] = torch.nan
        return values, losses

    monkeypatch.setattr(Step, "finish", diverge)
    run = train("runtime.runner=cohort", "partition=iid")  # equal sizes: one block
    for row in run.rows[1:]:
        assert row["clients_ok"] == 2 and "not finite" in row["failures"][0]
    assert all(torch.isfinite(value).all() for value in run.model.values())


@pytest.mark.parametrize("value, what", [(torch.nan, "not finite"), (1e33, "too large")])
def test_one_client_s_metric_that_is_no_loss_sets_it_aside_alone(train, monkeypatch, value, what):
    from fedfrozen_app.local.step import Step

    real = Step.finish

    def diverge(self, *given):
        values, losses = real(self, *given)
        losses[1] = value
        return values, losses

    monkeypatch.setattr(Step, "finish", diverge)
    run = train("runtime.runner=cohort", "partition=iid")  # equal sizes: one block
    for row in run.rows[1:]:
        whose = row["clients"][1]
        sentence = f"Client {whose} was set aside: it sent the figure train_loss, which is {what}."
        assert row["clients_ok"] == 2 and row["failures"] == [sentence]
        assert 0 < row["train_loss"] < 10


def test_a_block_without_a_sound_client_changes_nothing(train, monkeypatch):
    from fedfrozen_app.local.step import Step

    real = Step.finish

    def diverge(self, assignments, *given):
        """The first block of the second round."""
        values, losses = real(self, assignments, *given)
        calls.append(len(assignments))
        return values, losses * torch.nan if len(calls) == 3 else losses

    calls = []
    monkeypatch.setattr(Step, "finish", diverge)
    words = ("runtime.runner=cohort", "partition=iid", "num_clients=4", "runtime.max_block=2")
    row = train(*words, "num_rounds=2").rows[2]
    assert calls == [2, 2, 2, 2]
    assert row["clients_ok"] == 2 and len(row["failures"]) == 2 and "discarded" not in row
    assert row["train_loss"] > 0


def test_private_models_train_together_and_stay_apart(train):
    words = ["strategy=local", "model.dtype=float64", "personal=false"]
    one = train(*words, folder="one")
    other = train(*words, "runtime.runner=cohort", folder="other")
    states = [checkpoint_of(run.folder / "checkpoints" / "3").clients for run in (one, other)]
    assert set(states[0]) == set(states[1]) == {"0", "1", "2"}
    for client, arrays in states[0].items():
        for name, value in arrays.items():
            if not is_key_bias(name):
                torch.testing.assert_close(states[1][client][name], value, rtol=1e-6, atol=1e-8)
    for row, twin in zip(one.rows[1:], other.rows[1:], strict=True):
        assert row["train_loss"] == pytest.approx(twin["train_loss"], rel=1e-9)
        assert row["test_accuracy"] == pytest.approx(twin["test_accuracy"])
        assert twin["bytes_up_by_role"] == {}


@pytest.mark.parametrize("client", ["0", *slowly("1", "2")])
def test_what_a_client_sent_is_kept_as_it_was_sent(train, client):
    words = ["model.dtype=float64", "partition=iid", "num_rounds=1", f"checkpoint.uploads='{client}'"]
    runs = [train(*words, f"runtime.runner={r}", folder=r) for r in ("sequential", "cohort")]
    sent, twin = (load_file(run.folder / "uploads" / "1" / f"{client}.safetensors") for run in runs)
    for name, value in sent.items():
        torch.testing.assert_close(twin[name], value, rtol=1e-6, atol=1e-8)


@pytest.mark.slow
def test_dropout_differs_between_clients_and_still_learns(train):
    words = ["model.config.hidden_dropout_prob=0.1", "dataset.limit=600", "client.local_epochs=4"]
    losses = []
    for runner in ("sequential", "cohort"):
        words[3:] = [f"runtime.runner={runner}"]
        runs = [train(*words, f"seed={number}", folder=f"{runner}{number}") for number in range(2)]
        losses.append([run.rows[-1]["test_loss"] for run in runs])
        assert all(run.rows[-1]["train_loss"] < run.rows[1]["train_loss"] for run in runs)
    one, other = (torch.tensor(values) for values in losses)
    assert abs(one.mean() - other.mean()) < 0.1 * one.mean()


def test_flower_s_simulation_refuses_the_cohort_runner(capsys):
    assert command(["runtime=flower", "runtime.runner=cohort"]) == 2
    assert "one client a message" in capsys.readouterr().err


@pytest.mark.parametrize("strategy", ["fedavg", *slowly("fedrep")])  # FedRep's rounds have phases
def test_batches_laid_out_ahead_are_those_of_the_round(train, monkeypatch, strategy):
    """For those who were expected; others' are laid out when they come, and a run ends with the same bits."""
    words = ["runtime.runner=cohort", "num_clients=6", "participation=0.5", "num_rounds=4"]
    words += [f"strategy={strategy}", "checkpoint.every=4"]
    real, calls = cohort.lay_out, []

    def counted(worker, clients, request, slots):
        calls.append((request.round, len(clients)))
        return real(worker, clients, request, slots)

    monkeypatch.setattr(cohort, "lay_out", counted)
    expected = train(*words, folder="expected")
    assert calls == [(number, 3) for number in (1, 2, 3, 4)]  # each once, ahead or not
    expect = CohortRunner.lay_out_ahead
    for name, clients in (("none", None), ("others", ["0", "1"]), ("as many", ["3", "2", "1"])):
        calls.clear()

        def foresees(self, _, request, its=clients):
            if its is not None:
                expect(self, its, request)

        monkeypatch.setattr(CohortRunner, "lay_out_ahead", foresees)
        unexpected = train(*words, folder=name)
        assert len(calls) == (4 if clients is None else 7)
        assert same_bits(expected.model_after(4), unexpected.model_after(4))


def test_what_was_laid_out_for_another_run_is_not_taken():
    config = read(resolved(compose_config(["num_clients=4"])))
    corpus = load_corpus(config)
    worker = Worker(config, corpus, shares=share_out(corpus, config, 4))
    runner, request = CohortRunner(worker), TrainRequest(2, Plan.full(list(worker.parameters)), {})
    clients = ["0", "1", "2", "3"]
    before = runner._schedule(clients, request)
    assert runner._schedule(clients, request) is before
    assert runner._schedule(clients[:3], request) is not before
    runner.lay_out_ahead(clients, request)
    other = replace(config, seed=config.seed + 1)
    worker.switch_to(other, share_out(corpus, other, 4))
    assert not torch.equal(runner._schedule(clients, request).index, before.index)


def test_slots_follow_the_clients_batches():
    assert cheapest_size([5] * 50, 50) == 50  # equal clients: all at once
    assert cheapest_size([5] * 50, 20) == 17  # as many as fit: three times 17 cost less than of 20
    assert cheapest_size([100, 100, 10, 10, 10, 10], 6) == 2  # the short ones after one another
    assert cheapest_size([7], 1) == 1
    assert cheapest_size([1] * 3000 + [2] * 3000, 6000) == 4500  # found without laying out each number


def test_the_cheapest_number_of_slots_is_that_of_laying_out_each():
    generator = np.random.default_rng(0)
    for _ in range(60):
        counts = generator.integers(0, 9, int(generator.integers(1, 30))).tolist()
        limit = int(generator.integers(1, 35))
        steps = [assign_slots(counts, slots)[-1].end for slots in range(1, min(limit, len(counts)) + 1)]
        costs = [end * (slots + OVERHEAD) for slots, end in enumerate(steps, 1)]
        useful = costs[: steps.index(max(counts)) + 1] if max(counts) in steps else costs
        best = max(slots for slots, cost in enumerate(useful, 1) if cost == min(useful))
        assert cheapest_size(counts, limit) == best


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 12))
def test_every_client_has_one_turn_and_a_slot_one_client_at_a_time(counts, slots):
    assignments = assign_slots(counts, slots)
    assert sorted(one.client for one in assignments) == list(range(len(counts)))
    assert all(one.end - one.begin == counts[one.client] for one in assignments)
    assert [one.end for one in assignments] == sorted(one.end for one in assignments)
    for slot in range(slots):
        own = sorted((one for one in assignments if one.slot == slot), key=lambda one: one.begin)
        assert [one.begin for one in own] == [0, *(one.end for one in own)][: len(own)]  # no gap
    # Longest first is never more than a third above the best there is (Graham, 1969).
    assert assignments[-1].end <= 4 / 3 * max(
        max(counts), -(-sum(counts) // slots), _two_in_a_slot(counts, slots)
    )


def _two_in_a_slot(counts, slots):
    """With more clients than slots two of the longest share one."""
    longest = sorted(counts, reverse=True)[: slots + 1]
    return sum(longest[-2:]) if len(longest) > slots else 0
