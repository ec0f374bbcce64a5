"""A round that is begun while the one before is closed: the same bits, whatever comes of it.

It is done on a GPU alone; here the host stands in for one.
"""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fedfrozen_app.config import compose_run
from fedfrozen_app.core import registry
from fedfrozen_app.core.digests import digests
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.exchange.block import Block
from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.local import cohort
from fedfrozen_app.local.cohort import CohortRunner
from fedfrozen_app.local.prefetch import PrefetchedRound, ahead_of, versions_of
from fedfrozen_app.local.step import Step
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.local.worker_for import installed
from fedfrozen_app.run import federate
from fedfrozen_app.run.job import Job
from fedfrozen_app.runtimes.inprocess.concurrent_runs import WorkerPool, run_concurrently
from fedfrozen_app.server import base
from fedfrozen_app.server.base import PlannedFedAvg
from fedfrozen_app.server.hooks import SomebodyTakesPart
from fedfrozen_app.server.train_round import TrainRound
from tests.conftest import SMALL, Run, named, same_bits, slowly, worker_of
from tests.resuming import killed_before_checkpoint

WORDS = ["runtime.runner=cohort", "dataset.client_validation=0", "num_rounds=5", "checkpoint.keep=9"]
FEDAVG = [*WORDS, "strategy=fedavg"]


class Seen:
    """Which rounds were begun ahead, of which the order then was served so, and all steps by their round."""

    def __init__(self, monkeypatch):
        self.begun, self.served, self.steps, self.usual_steps = [], [], Counter(), Counter()
        begin, serves, run = CohortRunner.prefetch, PrefetchedRound.serves, Step.run
        began = Step.begin

        def begin_and_tell(runner, clients, request, base):
            begin(runner, clients, request, base)
            if ahead_of(runner.worker).prefetched is not None:
                self.begun.append(request.round)

        def serve_and_tell(begun, clients, request, base):
            found = serves(begun, clients, request, base)
            self.served.append((request.round, found))
            return found

        def begin_step(step, request, *given, **named):
            self.now = request.round
            return began(step, request, *given, **named)

        def count(step, *given):
            self.steps[self.now] += 1
            return run(step, *given)

        monkeypatch.setattr(cohort, "AHEAD_ON", ("cpu",))
        monkeypatch.setattr(CohortRunner, "prefetch", begin_and_tell)
        monkeypatch.setattr(PrefetchedRound, "serves", serve_and_tell)
        monkeypatch.setattr(Step, "begin", begin_step)
        monkeypatch.setattr(Step, "run", count)

    def all_right(self, *rounds):
        return self.begun == list(rounds) and self.served == [(number, True) for number in rounds]


def told(run):
    return [{key: value for key, value in row.items() if key != "seconds"} for row in run.rows]


def is_same(run, twin):
    numbers = range(1, len(run.rows))
    models = all(same_bits(run.model_after(number), twin.model_after(number)) for number in numbers)
    return models and same_bits(run.model, twin.model) and told(run) == told(twin)


@pytest.fixture
def both(train, monkeypatch):
    """A run as ever, and one whose rounds are begun ahead."""

    def train_both(*words):
        seen = Seen(monkeypatch)
        with monkeypatch.context() as patch:
            patch.setattr(cohort, "AHEAD_ON", ())
            usual = train(*words, folder="usual")
        assert seen.begun == []
        seen.usual_steps, seen.steps = seen.steps, Counter()
        return usual, train(*words, folder="ahead"), seen

    return train_both


CASES = {
    "dropout": ["strategy=fedavg", "model.config.hidden_dropout_prob=0.1"],
    "seldom judged": ["strategy=fedavg", "eval_every=2", "dataset.validation=0.2"],
    "server optimiser": ["strategy=fedavg", "server_optimizer=adam"],
    "some take part": ["strategy=fedavg", "num_clients=6", "participation=0.5"],
    "several blocks": ["strategy=fedavg", "num_clients=5", "runtime.max_block=2"],
    "adapters": ["strategy=fedavg", "adapter=lora"],
    "robust": ["strategy=fedavg", "aggregation=median"],
    "norms are watched": ["strategy=fedavg", "aggregation.far_out=5"],
    "clipped": ["strategy=fedavg", "client=sgd", "client.clip=0.5"],
}


@pytest.mark.parametrize("words", named(CASES, "dropout", "several blocks", "some take part"))
def test_rounds_begun_ahead_give_the_same_bits_and_take_no_step_twice(both, words):
    usual, ahead, seen = both(*WORDS, *words)
    assert is_same(usual, ahead)
    assert seen.all_right(2, 3, 4, 5)
    assert seen.steps == seen.usual_steps


def test_a_freeze_is_not_begun_ahead(both):
    """Its plan is known, and there is no step for it yet."""
    usual, ahead, seen = both(*WORDS, "strategy=fedfrozen", "strategy.warmup_rounds=2")
    assert is_same(usual, ahead) and seen.all_right(2, 4, 5)


@pytest.mark.slow
def test_what_changes_in_every_round_is_not_begun_ahead(both):
    words = ["strategy=fedpart", "strategy.full_rounds=1", "strategy.group_rounds=1"]
    usual, ahead, seen = both(*WORDS, *words)
    assert is_same(usual, ahead) and seen.begun == []


def test_who_observes_a_round_may_change_it(both, monkeypatch):
    """What follows is then foretold afterwards."""

    def halve(strategy, row, merged):
        for name, value in merged.items():
            value.data.lerp_(strategy.model[name], 0.5)
        return {}

    monkeypatch.setattr(registry.find("strategies", "fedavg"), "observe", halve)
    usual, ahead, seen = both(*FEDAVG)
    assert is_same(usual, ahead) and seen.all_right(2, 3, 4, 5)


def test_a_client_that_diverges_is_set_aside_as_ever(both, monkeypatch):
    finish = Step.finish

    def diverge(self, *given):
        values, losses = finish(self, *given)
        values[1, 5] = torch.nan
        return values, losses

    monkeypatch.setattr(Step, "finish", diverge)
    usual, ahead, seen = both(*FEDAVG, "partition=iid")
    assert is_same(usual, ahead)
    # Once with the mean of all, before it is known that one of them is unsound; then nobody is so sure.
    assert seen.begun == [2, 2, 3, 4, 5] and seen.served == [(number, True) for number in (2, 3, 4, 5)]
    assert all(row["clients_ok"] == 2 and "not finite" in row["failures"][0] for row in ahead.rows[1:])


def test_a_round_that_changes_nothing_is_followed_by_one_begun_ahead(both, monkeypatch):
    finish = Step.finish
    monkeypatch.setattr(Step, "finish", lambda *given: [value * torch.nan for value in finish(*given)])
    monkeypatch.setattr(SomebodyTakesPart, "after_round", lambda *given: (False, {}))
    monkeypatch.setattr(federate, "why_nothing_changed", lambda rows: None)
    usual, ahead, seen = both(*FEDAVG)
    assert is_same(usual, ahead) and seen.all_right(2, 3, 4, 5)
    assert not any(row["clients_ok"] for row in ahead.rows[1:])


def test_a_round_is_begun_before_the_figures_of_the_last_are_waited_for(train, monkeypatch):
    """Where one block holds all its clients; of several, the sum is known when the last one is."""
    events = []
    begin, seen = CohortRunner.prefetch, Block.seen
    monkeypatch.setattr(cohort, "AHEAD_ON", ("cpu",))
    monkeypatch.setattr(CohortRunner, "prefetch", lambda *given: events.append("begins") or begin(*given))
    monkeypatch.setattr(Block, "seen", lambda *given: events.append("is seen") or seen(*given))
    for words, request in (
        (("partition=iid",), ["begins", "is seen"]),
        (("runtime.max_block=2",), ["is seen"]),
    ):
        events.clear()
        train(*FEDAVG, "num_rounds=2", *words, folder=request[0])
        assert events[: len(request)] == request and events.count("begins") == 1


# What may turn out otherwise than was foretold --------------------------------------------------------


def foretell_otherwise(change):
    """Of the third round: `change` makes another (clients, order, arrays) of what is expected."""

    def apply(monkeypatch):
        begin = CohortRunner.prefetch

        def wrongly(runner, clients, request, base):
            begin(
                runner, *(change(clients, request, base) if request.round == 3 else (clients, request, base))
            )

        monkeypatch.setattr(CohortRunner, "prefetch", wrongly)

    return apply


def change_afterwards(monkeypatch):
    """In place, where the round is closed."""
    close = base.close_round

    def touch(strategy, row, *rest):
        if row["round"] == 2:
            next(iter(strategy.model.values())).add_(0)
        return close(strategy, row, *rest)

    monkeypatch.setattr(base, "close_round", touch)


WRONG = {
    "others": foretell_otherwise(lambda clients, request, base: (["0", "1"], request, base)),
    "as many": foretell_otherwise(lambda clients, request, base: (clients[::-1], request, base)),
    "another round": foretell_otherwise(
        lambda clients, request, base: (clients, replace(request, round=4), base)
    ),
    "another model": foretell_otherwise(
        lambda clients, request, base: (clients, request, {name: value + 1 for name, value in base.items()})
    ),
    "changed in place": change_afterwards,
}


@pytest.mark.parametrize("wrong", named(WRONG, "another model"))
def test_what_was_begun_in_vain_changes_nothing(both, monkeypatch, wrong):
    wrong(monkeypatch)
    usual, ahead, seen = both(*FEDAVG, "model.config.hidden_dropout_prob=0.1", "eval_every=2")
    assert is_same(usual, ahead)
    assert seen.served == [(2, True), (3, False), (4, True), (5, True)]


@pytest.mark.parametrize("when", ["step", *slowly("plan", "load")])
def test_a_failure_ahead_loses_no_row_and_is_met_again(train, monkeypatch, when):
    """Where it does not come again the round is trained as ever; where it does, those before are written."""
    words = [*FEDAVG, "model.config.hidden_dropout_prob=0.1"]
    usual = train(*words, folder="usual")
    seen = Seen(monkeypatch)
    owner, name = {"plan": (PlannedFedAvg, "plan"), "load": (Worker, "load"), "step": (Step, "run")}[when]
    work, ahead, in_turn = getattr(owner, name), TrainRound.prefetch_next, PlannedFedAvg._train_round
    fails = lasting = False

    def fail(*given, **named):
        if fails:
            raise MemoryError("no room")
        return work(*given, **named)

    def prefetch_next(train_round, merged):
        nonlocal fails
        fails = train_round.number == 2
        seconds = ahead(train_round, merged)
        fails = False
        return seconds

    def train_round(strategy, server_round):
        nonlocal fails
        fails = lasting and server_round == 3
        return in_turn(strategy, server_round)

    monkeypatch.setattr(owner, name, fail)
    monkeypatch.setattr(TrainRound, "prefetch_next", prefetch_next)
    monkeypatch.setattr(PlannedFedAvg, "_train_round", train_round)
    assert is_same(usual, train(*words, folder="once"))
    assert seen.all_right(2, 4, 5)
    lasting = True
    with pytest.raises(MemoryError):
        train(*words, folder="again")
    assert told(Run(usual.folder.parent / "again")) == told(usual)[:3]


def test_a_run_that_was_killed_goes_on_to_the_same_bits(train, monkeypatch):
    words = [*FEDAVG, "model.config.hidden_dropout_prob=0.1", "participation=0.7", "eval_every=2"]
    usual = train(*words, folder="usual")
    seen = Seen(monkeypatch)
    with killed_before_checkpoint(monkeypatch, 3):
        train(*words, folder="killed")
    assert is_same(usual, train(*words, folder="killed", resume=True))
    assert seen.begun == [2, 3, 4, 4, 5]
    assert seen.served == [(2, True), (3, True), (4, True), (5, True)]


NOT_BEGUN = {
    "arrays with the order": ["strategy=scaffold", "client=sgd", "client.momentum=0"],
    "arrays that clients keep": ["strategy=feddyn"],
    "private parameters": ["strategy=fedper"],
    "looks back": ["strategy=fedprox"],
    "judged by its clients": ["strategy=fedavg", "dataset.client_validation=0.2"],
    "weighed classes": ["strategy=fedavg", "client.class_weights=true"],
    "masked": ["strategy=fedavg", "secure_aggregation=on", "secure_aggregation.min_cohort=2"],
    "adapters that move the base": ["strategy=fedavg", "adapter=lora", "adapter.rule=fedex"],
    "one after another": ["strategy=fedavg", "runtime.runner=sequential"],
    "the last": ["strategy=fedavg", "num_rounds=1"],
}


@pytest.mark.parametrize(
    "words", named(NOT_BEGUN, "arrays that clients keep", "judged by its clients", "the last")
)
def test_what_might_wait_or_be_something_else_is_not_begun_ahead(train, monkeypatch, words):
    seen = Seen(monkeypatch)
    train(*WORDS, "num_rounds=3", "num_clients=4", "personal=false", *words)
    assert seen.begun == seen.served == []


@pytest.mark.slow
def test_long_blocks_are_not_begun_ahead(train, monkeypatch):
    seen = Seen(monkeypatch)
    monkeypatch.setattr(cohort, "MOST_AHEAD", 1)
    train(*FEDAVG)
    assert seen.begun == []


def test_a_step_that_has_yet_to_be_recorded_is_not_begun_ahead(train, monkeypatch):
    seen = Seen(monkeypatch)
    monkeypatch.setattr(Step, "ready", False)
    train(*FEDAVG)
    assert seen.begun == []


@pytest.mark.slow
def test_runs_side_by_side_begin_nothing_ahead(tmp_path, monkeypatch):
    seen = Seen(monkeypatch)
    jobs = []
    for seed in (1, 2):
        words = [*SMALL, *FEDAVG, "num_rounds=3", f"seed={seed}"]
        jobs.append(Job(compose_run(words), tmp_path / str(seed)))
    ended = run_concurrently(jobs, WorkerPool(load_corpus(jobs[0].config), 2))
    assert [summary["status"] for summary in ended] == ["completed"] * 2
    assert seen.begun == []


def test_an_early_stop_leaves_nothing_behind(both):
    """What was begun for a round that never came is no part of the model that is judged at the end."""
    words = ["early_stop.patience=1", "dataset.validation=0.3", "client.lr=1e-9", "num_rounds=9"]
    usual, ahead, seen = both(*FEDAVG, *words)
    assert is_same(usual, ahead) and len(ahead.rows) < 10
    assert len(seen.begun) == len(seen.served) + 1
    assert ahead_of(installed()[1]).prefetched is None
    usual, ahead = ((run.folder / "fairness.json").read_text() for run in (usual, ahead))
    assert usual == ahead


def test_what_was_begun_for_another_run_is_not_taken(monkeypatch):
    """Not even where the same model is to train the same round: of other rows, or at another rate."""
    seen = Seen(monkeypatch)
    worker = worker_of(*SMALL, *FEDAVG)
    runner, clients = CohortRunner(worker), ["0", "1", "2"]
    base = worker.initial()
    request = TrainRequest(1, Plan.full(list(base)), digests(base))
    list(runner.train(clients, request, base, {}))
    runner.prefetch(clients, replace(request, round=2), base)
    other = replace(worker.config, seed=worker.config.seed + 1)
    worker.switch_to(other, share_out(worker.corpus, other, 3))
    list(runner.train(clients, replace(request, round=2), base, {}))
    assert seen.begun == [2] and seen.served == []


def test_begun_work_knows_a_twin_from_another_zero():
    """A client that holds an array of the same digest is not sent it again, under whichever name it came."""
    request = TrainRequest(2, Plan.full(["a", "b"]), {"a": "known"})
    base = {"a": torch.zeros(3), "b": torch.zeros(2, 1)}
    work = SimpleNamespace(clients=["0"], request=request, base=base)
    begun = PrefetchedRound(work, iter(()), versions_of(base))
    real = replace(request, base={"a": "known", "b": "new"})
    assert begun.serves(("0",), real, base)
    assert begun.serves(("0",), real, {"a": torch.ones(3), "b": torch.zeros(2, 1)})
    assert not begun.serves(("0",), replace(real, base={"a": "x", "b": "new"}), {**base, "a": torch.ones(3)})
    for other in (-torch.zeros(2, 1), torch.zeros(1, 2), torch.zeros(2, 1).double(), torch.ones(2, 1)):
        assert not begun.serves(("0",), real, {**base, "b": other})
    assert not begun.serves(("0",), real, {"a": base["a"]})
    assert not begun.serves(("0",), replace(real, settings={"mu": 1}), base)
    base["b"].zero_()
    assert not begun.serves(("0",), real, base)
