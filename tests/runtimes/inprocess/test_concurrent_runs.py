"""Runs beside one another in one process against the same runs alone: the same rows, models and files."""

from dataclasses import dataclass

import pytest
import torch

from clients.fedprox import FedProx
from fedfrozen_app.core import registry
from fedfrozen_app.core.errors import RunFailed
from fedfrozen_app.data.federated import load_corpus
from fedfrozen_app.exchange.plan import Phase
from fedfrozen_app.files import checkpoint
from fedfrozen_app.local.algorithm import Algorithm, Finished
from fedfrozen_app.local.stack import draws_at_random
from fedfrozen_app.runtimes.inprocess.concurrent_runs import WorkerPool, run_concurrently, why_not_concurrent
from fedfrozen_app.runtimes.inprocess.coroutine import ThreadCoroutine
from fedfrozen_app.server.base import PlannedFedAvg
from tests.conftest import Run
from tests.runtimes.inprocess.concurrent import WORDS, job, same


@pytest.mark.parametrize("client", ["client=adamw", pytest.param("client=sgd", marks=pytest.mark.slow)])
def test_seeds_skews_and_rates_together_are_the_same_runs(pairs, client):
    """Nothing is frozen, so that every run's step is the same operations in the same order."""
    each = [["seed=0"], ["seed=1", "client.lr=0.01"], ["seed=2", "partition.alpha=5", "num_clients=4"]]
    for alone, stacked in pairs(*(["strategy=fedavg", client, *words] for words in each)):
        same(alone, stacked)


@pytest.mark.slow
def test_each_run_freezes_its_own_kernel_at_its_own_time(pairs):
    """A frozen product is laid out for a run at a time, so that its last bit may differ."""
    for alone, stacked in pairs(*([f"seed={n}", f"strategy.warmup_rounds={n}"] for n in range(3))):
        same(alone, stacked, 1e-9)
        assert stacked.rows[-1]["stage"] == "frozen"


@pytest.mark.slow
def test_forks_go_on_together(pairs, tmp_path, train):
    each = []
    for seed in range(2):
        train(*WORDS, f"seed={seed}", "strategy=fedavg", folder=f"seed{seed}", small=False)
        each.append([f"seed={seed}", "strategy.warmup_rounds=2", f"from={tmp_path}/seed{seed}/checkpoints/2"])
    for alone, stacked in pairs(*each):
        assert len(stacked.rows) == 4 and stacked.rows[-1]["stage"] == "frozen"
        (one, other) = (run.model_after(3) for run in (alone, stacked))
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_some_clients_a_round(pairs):
    words = ["strategy=fedavg", "num_clients=5", "participation=0.4", "partition.alpha=0.1"]
    for alone, stacked in pairs(*([*words, f"seed={seed}"] for seed in range(3))):
        same(alone, stacked)


@pytest.mark.slow
@pytest.mark.parametrize("pacing", [("pacing=buffered", "pacing.buffer=2"), ("pacing=deadline",)])
def test_runs_that_do_not_wait_for_all_clients(pairs, pacing):
    """Each has its own event queue: their clients start from versions of their own at different times."""
    words = ["strategy=fedavg", "num_clients=4", "clock=profiles", "clock.spread=1", *pacing]
    for alone, stacked in pairs(*([*words, f"seed={seed}"] for seed in range(3))):
        same(alone, stacked)
        assert [row.get("pacing") for row in alone.rows] == [row.get("pacing") for row in stacked.rows]


@dataclass(frozen=True)
class Corrected(Algorithm):
    """SCAFFOLD's arrays: one that comes with the order, one that stays, one that goes back."""

    from_server, client_state, to_server = ("c",), ("c",), ("dc",)

    def loss(self, parameters, batch, task, start):
        pull = [
            ((start.from_server["c"][name] - start.client_state["c"][name]) * parameters[name]).sum()
            for name in start.trained
        ]
        return task.loss(parameters, batch) + torch.stack(pull).sum()

    def finish(self, start, trained, steps, rate):
        own, common = start.client_state["c"], start.from_server["c"]
        new = {
            name: own[name] - common[name] + (start.model[name] - value) / (steps * rate)
            for name, value in trained.items()
        }
        return Finished({"c": new}, {"dc": {name: new[name] - own[name] for name in new}})


class Near(FedProx):
    def __init__(self):
        super().__init__(mu=0.5)


def head_first(plan, roles):
    """The head stays with the client, and trains before the rest."""
    head = tuple(name for name in plan.trained if roles[name].kind == "head")
    body = tuple(name for name in plan.trained if name not in head)
    return plan.keep_private(head).in_phases(Phase(head, epochs=2), Phase(body))


def as_it_is(plan, roles):
    return plan


@pytest.mark.parametrize(
    ("algorithm", "change"), [(Near, as_it_is), (Corrected, as_it_is), (Algorithm, head_first)]
)
@pytest.mark.slow
def test_what_clients_read_and_keep_is_their_run_s_own(pairs, monkeypatch, algorithm, change):
    """The round's start, arrays that come with the order and that stay, private parameters, phases."""
    name = f"stacked {algorithm.__name__}"

    class Own(PlannedFedAvg):
        algorithm = name

        def plan(self, server_round):
            return change(super().plan(server_round), self.federation.roles)

        def step(self, update):
            if "dc" in update.extra:
                news = update.extra["dc"].items()
                self.server_state = {"c": {n: self.server_state["c"][n] + value for n, value in news}}
            return super().step(update)

    monkeypatch.setitem(registry.REGISTERED, ("strategies", "fedavg"), Own)
    monkeypatch.setitem(registry.REGISTERED, ("algorithms", name), algorithm)
    words = ["strategy=fedavg", "client=sgd", "client.lr=0.05", "personal=false", "num_clients=4"]
    for alone, stacked in pairs(*([*words, "partition.alpha=0.1", f"seed={n}"] for n in range(2))):
        same(alone, stacked, 1e-9)
        kept, twin = (checkpoint.read(run.folder / "checkpoints" / "3").clients for run in (alone, stacked))
        assert kept.keys() == twin.keys() and bool(kept) == (algorithm is not Near)
        for client, arrays in kept.items():
            for key, value in arrays.items():
                torch.testing.assert_close(twin[client][key], value, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_more_runs_than_fit_follow_one_another(pairs):
    for alone, stacked in pairs(*(["strategy=fedavg", f"seed={seed}"] for seed in range(3)), runs=2):
        same(alone, stacked)


@pytest.mark.slow
def test_one_that_fails_stops_or_diverges_leaves_the_others_as_they_are(train, tmp_path, monkeypatch):
    from fedfrozen_app.server.hooks import MetricsFile

    each = [["seed=0"], ["seed=1", "num_rounds=1"], ["seed=2", "client.lr=1e30"], ["seed=3"]]
    each = [["strategy=fedavg", "client=sgd", *words] for words in each]
    one = train(*WORDS, *each[0], folder="alone", small=False)
    write = MetricsFile.after_round

    def no_disk(self, strategy, row):
        if "stacked3" in str(self.path) and row["round"] == 2:
            raise OSError("no room left")
        return write(self, strategy, row)

    monkeypatch.setattr(MetricsFile, "after_round", no_disk)
    jobs = [job(tmp_path / f"stacked{n}", *words) for n, words in enumerate(each)]
    found = run_concurrently(jobs, WorkerPool(load_corpus(jobs[0].config), 4))
    assert isinstance(found[2], RunFailed) and "not finite" in str(found[2])
    assert isinstance(found[3], RunFailed) and "no room left" in str(found[3])
    assert found[1]["status"] == found[0]["status"] == "completed"
    assert len(Run(jobs[1].folder).rows) == 2 and Run(jobs[3].folder).summary["status"] == "failed"
    same(one, Run(jobs[0].folder))


def test_ctrl_c_ends_every_run_as_one_alone(tmp_path, train, monkeypatch):
    from fedfrozen_app.local.stack import Stack

    real, calls = Stack.train, []

    def stop(self, works):
        calls.append(works)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(self, works)

    monkeypatch.setattr(Stack, "train", stop)
    jobs = [job(tmp_path / f"stacked{seed}", "strategy=fedavg", f"seed={seed}") for seed in range(2)]
    with pytest.raises(KeyboardInterrupt):
        run_concurrently(jobs, WorkerPool(load_corpus(jobs[0].config), 2))
    for each in jobs:
        assert Run(each.folder).summary["status"] == "interrupted"
        assert checkpoint.newest(each.folder).round == 2


@pytest.mark.slow
def test_a_bench_serves_one_group_after_another(tmp_path, train):
    """Models and steps of the first are used again: nothing of it is seen."""
    alone = train(*WORDS, "strategy=fedavg", "seed=3", folder="alone", small=False)
    jobs = [job(tmp_path / f"stacked{seed}", "strategy=fedavg", f"seed={seed}") for seed in range(4)]
    pool = WorkerPool(load_corpus(jobs[0].config), 2)
    run_concurrently(jobs[:2], pool)
    run_concurrently(jobs[2:], pool)
    assert len(pool.workers) == 2 and len({id(r.train_table) for r in pool.workers}) == 1
    same(alone, Run(jobs[3].folder))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["client.batch_size=8"], "differ in model"),
        (["model.config.hidden_size=24"], "differ in model"),
        (["client.lr=0.5", "seed=9", "partition.alpha=5"], None),
        (["client.head_lr=0.5"], "differ in model"),
    ],
)
def test_what_may_stand_beside(tmp_path, words, reason):
    jobs = [job(tmp_path / "a"), job(tmp_path / "b", *words)]
    worker = WorkerPool(load_corpus(jobs[0].config), 2).worker(0, jobs[0])
    found = why_not_concurrent(jobs, worker)
    assert found is None if reason is None else reason in found


def test_dropout_needs_a_run_of_its_own(tmp_path):
    made = job(tmp_path / "a", "model.config.hidden_dropout_prob=0.1")
    worker = WorkerPool(load_corpus(made.config), 2).worker(0, made)
    assert draws_at_random(worker) and "random" in why_not_concurrent([made], worker)
    assert not worker.model.training


def test_a_coroutine_suspends_at_each_request():
    said = []

    def story(coroutine):
        said.append(coroutine.request("one"))
        try:
            coroutine.request("two")
        except ValueError as error:
            said.append(str(error))
        return "over"

    coroutine = ThreadCoroutine(story)
    coroutine.start()
    assert coroutine.requested == "one" and not said
    coroutine.resume(1)
    assert coroutine.requested == "two" and said == [1]
    coroutine.resume(ValueError("no"))
    assert coroutine.requested is None and said == [1, "no"] and coroutine.result == "over"


def test_threads_and_kernels_are_everybody_s_until_the_last_is_through(pairs):
    """Small models on a CPU get their own: the first to end must not take them from the others."""
    before = torch.get_num_threads(), torch.backends.mkldnn.enabled
    torch.set_num_threads(2)
    try:
        free = ["runtime.runner=auto", "runtime.threads=null", "model.dtype=float32"]
        for alone, beside in pairs([*free, "num_rounds=1"], [*free, "seed=1"]):
            same(alone, beside, 1e-6)
        assert (torch.get_num_threads(), torch.backends.mkldnn.enabled) == (2, before[1])
    finally:
        torch.set_num_threads(before[0])
