"""Compiled steps: one graph for all layers, the plain step's numbers, and when they are chosen.

On a CPU nothing is compiled by itself: here it is as if it were a GPU, without the recording. The quick tests
trace, and leave the graphs as they are; slow ones go through torch's compiler.
"""

import logging

import pytest
import torch

from fedfrozen_app.config import compose_run
from fedfrozen_app.data.federated import load_corpus
from fedfrozen_app.files import checkpoint
from fedfrozen_app.local import cohort, compiling, gradient
from fedfrozen_app.local.cohort import CohortRunner
from fedfrozen_app.local.prefetch import ahead_of
from fedfrozen_app.local.step import Step
from fedfrozen_app.run.job import Job
from fedfrozen_app.runtimes.inprocess.concurrent_runs import WorkerPool, run_concurrently
from fedfrozen_app.vmap import blocks
from fedfrozen_app.vmap.blocks import Blocks, compiled_by_torch
from tests.comparing import is_key_bias
from tests.conftest import SMALL, Run, same_bits, slowly
from tests.local.runners import no_dropout
from tests.models.tiny_checkpoints import BERT, GPT2, LLAMA
from tests.models.tiny_checkpoints import checkpoint as folder_of
from tests.resuming import killed_before_checkpoint

WORDS = ["device=cpu", "runtime.runner=cohort", "model.dtype=float64", "client.local_steps=2"]


@pytest.fixture
def compiles(monkeypatch):
    """As on a GPU; the modes of the steps that were made, and how many graphs each compilation brought."""
    monkeypatch.setattr(compiling, "DEVICES", ("cuda", "cpu"))
    for module in (blocks, gradient):
        monkeypatch.setattr(module, "compiled_by_torch", lambda traced: traced)
    found = {"modes": [], "graphs": []}
    make, compile_for = Step.__init__, Blocks.compile_for

    def made(self, *given, mode, **named):
        found["modes"].append(mode)
        make(self, *given, mode=mode, **named)

    def counted(self, run):
        found["graphs"].append(compile_for(self, run))

    monkeypatch.setattr(Step, "__init__", made)
    monkeypatch.setattr(Blocks, "compile_for", counted)
    return found


@pytest.fixture
def by_blocks(monkeypatch):
    """As `auto` compiles, from the first round on."""
    monkeypatch.setitem(compiling.MODES, "true", "blocks")


def assert_alike(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        if not is_key_bias(name):
            torch.testing.assert_close(other[name], value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("strategy", ["fedfrozen", *slowly("fedprox")])
def test_one_graph_serves_all_layers_and_gives_the_plain_step_s_numbers(train, compiles, by_blocks, strategy):
    """FedFrozen freezes after its first round: another graph then, and only one."""
    words = [*WORDS, f"strategy={strategy}", "model.config.num_hidden_layers=4"]
    plain = train(*words, "runtime.compile=false", folder="plain")
    assert compiles["graphs"] == []
    quick = train(*words, "runtime.compile=true", folder="quick")
    assert compiles["graphs"] == ([1, 1] if strategy == "fedfrozen" else [1])
    assert_alike(plain.model, quick.model)


@pytest.mark.parametrize("kind", ["bert", *slowly("llama", "gpt2")])
def test_blocks_of_text_models_with_masks(train, tmp_path, compiles, by_blocks, kind):
    lines = ["text,label", *(f"{'good ' * (n % 7)}note {n},{n % 2}" for n in range(60))]
    path = tmp_path / "notes.csv"
    path.write_text("\n".join(lines))
    config = no_dropout({"bert": BERT, "llama": LLAMA, "gpt2": GPT2}[kind])
    words = [*WORDS, "dataset=text", f"dataset.path={path}", "dataset.max_tokens=24", "num_clients=3"]
    words += ["model=checkpoint", f"model.path={folder_of(config, tmp_path / 'model')}", "partition=iid"]
    words += ["strategy=fedavg", "num_rounds=1"]
    plain = train(*words, "runtime.compile=false", folder="plain", small=False)
    quick = train(*words, "runtime.compile=true", folder="quick", small=False)
    assert compiles["graphs"] == [1]
    assert_alike(plain.model, quick.model)


@pytest.mark.slow
def test_blocks_of_runs_side_by_side(train, tmp_path, compiles, by_blocks):
    """Each has its own frozen kernel: a vmap over runs around the one over clients."""
    words = [*SMALL, *WORDS, "num_rounds=2", "strategy.warmup_rounds=1", "runtime.compile=true"]
    each = [[*words, f"seed={number}"] for number in range(2)]
    alone = [train(*own, folder=f"alone{number}", small=False) for number, own in enumerate(each)]
    compiles["graphs"].clear()
    jobs = []
    for number, own in enumerate(each):
        composed = compose_run(own)
        jobs.append(Job(composed, tmp_path / f"stacked{number}"))
    found = run_concurrently(jobs, WorkerPool(load_corpus(jobs[0].config), 2))
    assert [outcome["status"] for outcome in found] == ["completed"] * 2
    assert compiles["graphs"] == [1, 1]
    for job, run in zip(jobs, alone, strict=True):
        assert_alike(run.model, Run(job.folder).model)


@pytest.mark.slow
def test_who_asks_for_it_has_the_whole_step_compiled(train, compiles):
    plain = train(*WORDS, "num_rounds=1", "runtime.compile=false", folder="plain")
    quick = train(*WORDS, "num_rounds=1", "runtime.compile=true", folder="quick")
    assert compiles["graphs"] == [] and compiles["modes"] == ["captured", "compiled"]
    assert_alike(plain.model, quick.model)


@pytest.mark.slow
def test_a_model_without_blocks_is_compiled_as_a_whole(train, compiles):
    words = [
        *WORDS,
        "strategy=fedavg",
        "model=simple_cnn",
        "num_clients=2",
        "dataset.limit=80",
        "num_rounds=1",
    ]
    words += ["client.batch_size=8", "partition=iid"]
    plain = train(*words, "runtime.compile=false", folder="plain", small=False)
    quick = train(*words, "runtime.compile=true", folder="quick", small=False)
    assert compiles["graphs"] == [] and compiles["modes"] == ["captured", "compiled"]
    # Dropout draws the same only where it is called alike.
    assert plain.model.keys() == quick.model.keys()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("mode", ["compiled", "blocks"])
def test_what_torch_compiles_gives_the_same_numbers(train, compiles, monkeypatch, backend, mode):
    monkeypatch.setitem(compiling.MODES, "true", mode)
    for module in (blocks, gradient):
        monkeypatch.setattr(module, "compiled_by_torch", compiled_by_torch)
    monkeypatch.setattr(blocks, "BACKEND", backend)
    plain = train(*WORDS, "runtime.compile=false", folder="plain")
    quick = train(*WORDS, "runtime.compile=true", folder="quick")
    assert compiles["graphs"] == ([1, 1] if mode == "blocks" else [])
    assert_alike(plain.model, quick.model)


@pytest.mark.parametrize("mode", [pytest.param("compiled", marks=pytest.mark.slow), "blocks"])
def test_a_compiler_that_fails_is_logged_and_done_without(train, compiles, monkeypatch, caplog, mode):
    monkeypatch.setitem(compiling.MODES, "true", mode)

    def fails(run):
        raise RuntimeError("no such compiler\nand more")

    for module in (blocks, gradient):
        monkeypatch.setattr(module, "compiled_by_torch", fails)
    plain = train(*WORDS, "runtime.compile=false", folder="plain")
    with caplog.at_level(logging.WARNING, "fedfrozen_app"):
        run = train(*WORDS, "runtime.compile=true", folder="run")
    assert "could not be compiled, and continues without: RuntimeError: no such compiler" in caplog.text
    assert "and more" not in caplog.text
    assert same_bits(plain.model, run.model)


# When it is chosen ---------------------------------------------------------------------------------------


def state_after(run, server_round):
    return checkpoint.read(run.folder / "checkpoints" / str(server_round)).hooks.get("compiling")


def test_auto_records_first_and_compiles_where_the_rest_pays(train, compiles, monkeypatch, caplog):
    words = [*WORDS, "num_rounds=5", "strategy.warmup_rounds=2", "checkpoint.keep=9"]
    with caplog.at_level(logging.INFO, "fedfrozen_app"):
        short = train(*words, folder="short")
    assert compiles["modes"] == ["captured", "captured"]  # before and after the freeze
    assert "With 4 rounds to go the step is not compiled" in caplog.text
    assert state_after(short, 1)["compiled"] is None and state_after(short, 2)["compiled"] is False
    compiles["modes"].clear()
    monkeypatch.setattr(compiling, "SAVED", 1.0)
    with caplog.at_level(logging.INFO, "fedfrozen_app"):
        long = train(*words, folder="long")
    assert compiles["modes"] == ["captured", "blocks"] * 2  # rounds 1, 2, 3 and 4
    assert "With 4 rounds to go the step is compiled" in caplog.text
    assert state_after(long, 3) | {"plan": ""} == {"plan": "", "since": 3, "compiled": None}
    assert state_after(long, 5)["compiled"] is True
    assert_alike(short.model, long.model)


@pytest.mark.parametrize("killed", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_resumed_run_takes_the_steps_of_an_unbroken_one(train, compiles, monkeypatch, killed):
    """Killed in the round in which it switches, or after it: then what is worth what has no say any more."""
    monkeypatch.setattr(compiling, "SAVED", 1.0)
    words = [*WORDS, "num_rounds=4", "strategy=fedavg"]
    whole = train(*words, folder="whole")
    with killed_before_checkpoint(monkeypatch, killed):
        train(*words, folder="broken")
    compiles["modes"].clear()
    monkeypatch.setattr(compiling, "SAVED", 1.0 if killed == 2 else 0.0)
    resumed = train(*words, folder="broken", resume=True)
    assert compiles["modes"] == ["blocks"]
    assert same_bits(whole.model, resumed.model)


def test_what_is_prefetched_decides_nothing(train, compiles, monkeypatch):
    """A round is prefetched only when it is settled how its steps are taken."""
    monkeypatch.setattr(compiling, "SAVED", 1.0)
    words = [*WORDS, "num_rounds=6", "strategy.warmup_rounds=3", "checkpoint.keep=9"]
    words += ["dataset.client_validation=0"]
    usual, modes = train(*words, folder="usual"), list(compiles["modes"])
    prefetched, prefetch = [], CohortRunner.prefetch

    def counted(runner, clients, request, base):
        prefetch(runner, clients, request, base)
        prefetched.extend([request.round] if ahead_of(runner.worker).prefetched is not None else [])

    monkeypatch.setattr(CohortRunner, "prefetch", counted)
    monkeypatch.setattr(cohort, "AHEAD_ON", ("cpu",))
    compiles["modes"].clear()
    ahead = train(*words, folder="ahead")
    assert prefetched == [3, 6]  # 2 and 5 decide, 4 is the freeze
    assert compiles["modes"] == modes == ["captured", "blocks"] * 2
    for number in range(1, 7):
        assert state_after(usual, number) == state_after(ahead, number)
        assert same_bits(usual.model_after(number), ahead.model_after(number))


def test_plans_that_change_every_round_are_never_compiled(train, compiles, monkeypatch):
    monkeypatch.setattr(compiling, "SAVED", 1.0)
    train(*WORDS, "strategy=fedpart", "strategy.full_rounds=0", "strategy.group_rounds=1")
    assert set(compiles["modes"]) == {"captured"}


def test_on_a_cpu_nothing_is_chosen(train):
    run = train(*WORDS, "num_rounds=2")
    assert state_after(run, 2) is None
