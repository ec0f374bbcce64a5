"""Clients on real Ray actors: the run of one process, also where workers and machines die."""

import os
import signal
import socket

import pytest
import ray
from ray.cluster_utils import Cluster

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.config import compose_run
from fedfrozen_app.core.errors import RunFailed
from fedfrozen_app.files import checkpoint
from fedfrozen_app.run.job import Job
from fedfrozen_app.runtimes.ray import cluster as our_cluster
from fedfrozen_app.runtimes.ray.ray_runtime import run_on_ray
from tests.conftest import SMALL, Run, same_bits
from tests.runtimes.ray.killed import kill_process, killing, shut_down
from tests.runtimes.ray.test_ray_parts import SGD, TOGETHER, UNEQUAL, same_run

EXACT = ("model.dtype=float64", "num_rounds=3", "checkpoint.keep=9")
TWO = ("runtime=ray", "runtime.workers=2")


@pytest.fixture
def on_ray(tmp_path, train):
    """Train on Ray with overrides on top of the small settings."""

    def run(*overrides, folder="ray", resume=False):
        target = tmp_path / folder
        composed = compose_run([*SMALL, *TWO, *overrides])
        run_on_ray(Job(composed, target, checkpoint.newest(target) if resume else None))
        return Run(target)

    yield run
    shut_down()


@pytest.fixture
def two_nodes(on_ray, monkeypatch):
    """A cluster of two nodes on this machine, each with room for one worker, by RAY_ADDRESS."""
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    found.add_node(num_cpus=1)
    monkeypatch.setenv("RAY_ADDRESS", found.address)
    yield found
    ray.shutdown()
    found.shutdown()


@pytest.mark.slow
def test_a_worker_killed_in_the_middle_of_a_round_changes_nothing(train, on_ray, monkeypatch, caplog):
    words = (*EXACT, *UNEQUAL, "strategy=scaffold", *SGD, "num_rounds=2")
    given = killing(monkeypatch, 3, kill_process)
    handler = signal.getsignal(signal.SIGTERM)
    ray_run = on_ray(*words)
    assert len(given) == 5 and "was lost" in caplog.text
    assert signal.getsignal(signal.SIGTERM) is handler  # by it a scheduler ends a run
    same_run(train(*words, folder="one"), ray_run, rounds=(1, 2))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_nodes_train_what_one_process_does(train, two_nodes, on_ray):
    cases = [
        ("strategy=fedavg", TOGETHER),
        ("strategy=fedfrozen",),
        ("strategy=scaffold", *SGD),
        ("strategy=safl", "strategy.select=gradient", "strategy.top_k=1"),
        ("strategy=fedavg", "adapter=lora"),
        (
            *("strategy=fedavg", "privacy=dp_sgd", "privacy.epsilon=8", "privacy.accountant=rdp"),
            *("privacy.seeded_noise=true", "client.local_steps=2", "client.batch_size=4"),
        ),
    ]
    for number, case in enumerate(cases):
        words = (*EXACT, *UNEQUAL, *case)
        one, several = train(*words, folder=f"one{number}"), on_ray(*words, folder=f"ray{number}")
        same_run(one, several)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_node_that_is_lost_in_a_round_changes_no_bit(two_nodes, on_ray, monkeypatch):
    words = (*UNEQUAL, "strategy=fedper", "num_rounds=3", "runtime.node_timeout=60")
    whole = on_ray(*words, folder="whole")
    (lost,) = two_nodes.worker_nodes

    def remove(actor):
        two_nodes.remove_node(lost, allow_graceful=False)

    given = killing(monkeypatch, 3, remove)
    again = on_ray(*words, folder="again")
    assert len(given) >= 6
    assert same_bits(whole.model, again.model)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_workers_without_room_start_when_a_node_joins(two_nodes, on_ray, monkeypatch, caplog):
    given, joined = [], []
    from fedfrozen_app.runtimes.ray.pool import ActorPool

    real = ActorPool._give

    def give(pool, part, actor):
        real(pool, part, actor)
        given.append(actor.number)
        if len(given) == 3:
            joined.append(two_nodes.add_node(num_cpus=1))

    monkeypatch.setattr(ActorPool, "_give", give)
    rounds = "num_rounds=40"
    on_ray("strategy=fedavg", rounds, "num_clients=6", "runtime.workers=3", "client.local_epochs=20")
    assert "room for 2 of 3 workers now" in caplog.text
    assert joined and set(given) == {0, 1, 2}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_on_ray_repeats_and_resumes_to_the_bit(on_ray):
    words = (*UNEQUAL, "strategy.warmup_rounds=1", "client.lr_schedule=constant")
    first, again = (on_ray(*words, folder=name) for name in ("first", "again"))
    assert same_bits(first.model, again.model)
    on_ray(*words, "num_rounds=2", folder="half")
    assert same_bits(first.model, on_ray(*words, folder="half", resume=True).model)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_worker_that_dies_of_the_same_clients_again_and_again_ends_the_run(on_ray, monkeypatch):
    from fedfrozen_app.runtimes.ray.pool import ActorPool

    real = ActorPool._give

    def give(pool, part, actor):
        real(pool, part, actor)
        if part.number == 1:
            kill_process(actor)

    monkeypatch.setattr(ActorPool, "_give", give)
    with pytest.raises(RunFailed, match="3 Ray workers died one after another with the same clients"):
        on_ray("strategy=fedavg")


def refused(words, capsys, *parts):
    assert command(list(words)) == 2
    error = capsys.readouterr().err
    assert all(part in error for part in parts), error
    assert "Traceback" not in error


def test_no_ray_head_at_the_address_is_one_sentence(tmp_path, capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ("runtime=ray", f"runtime.address=127.0.0.1:{port}", f"output_dir={tmp_path / 'run'}")
    refused(words, capsys, "No Ray cluster answers", f"127.0.0.1:{port}", "ray start --head")
    refused(
        (*words[:1], "runtime.address=nonsense", words[2]), capsys, "No Ray cluster answers at", "nonsense"
    )
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    ("words", "nodes", "sentence"),
    [
        ((), [{"CPU": 1.0}], None),
        (("runtime.cpus_per_worker=4",), [{"CPU": 2.0}], "No machine of Ray has room for a worker with"),
        (("runtime.gpus_per_worker=1",), [{"CPU": 2.0}], "with 2 CPUs and 0 GPUs. Lower them."),
        (("runtime.gpus_per_worker=0.5",), [{"CPU": 2.0, "GPU": 1.0}], None),
    ],
)
def test_what_has_no_room_is_one_sentence(monkeypatch, words, nodes, sentence):
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": node} for node in nodes])
    config = compose_run(["runtime=ray", *words]).config
    if sentence is None:
        assert our_cluster.room_for(config).fitting == (2 if "GPU" in nodes[0] else 1)
    else:
        with pytest.raises(our_cluster.UserError, match=sentence):
            our_cluster.room_for(config)


def test_workers_without_a_gpu_are_refused_where_one_is_asked_for(monkeypatch):
    from dataclasses import replace

    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 2.0}}])
    config = replace(compose_run(["runtime=ray"]).config, device="cuda")
    with pytest.raises(our_cluster.UserError, match="device=cuda needs workers with a GPU, and no machine"):
        our_cluster.room_for(config)


def test_the_key_that_this_replaces_is_one_sentence(capsys):
    refused(["runtime.gpus=2"], capsys, "'runtime.gpus' was removed: use runtime=ray")
    refused(["runtime.workers=2"], capsys, "runtime=inprocess ignores runtime.workers: add runtime=ray")


@pytest.mark.slow
def test_a_bad_setting_of_a_worker_leaves_the_command_as_a_sentence(tmp_path, capsys):
    words = ("runtime=ray", "dataset.limit=20", "num_clients=40", f"output_dir={tmp_path / 'run'}")
    assert command(list(words)) == 2
    assert "Traceback" not in capsys.readouterr().err
    if ray.is_initialized():
        shut_down()
    assert os.environ.get("RAY_ADDRESS") is None
