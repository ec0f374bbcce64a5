"""Arrays as bytes and caches on disk, with the real ClientApp, without starting Flower's processes.

The grid is in process, but its nodes are not told so: everything is serialised, and the base lies on disk.
"""

import pytest
import torch
from flwr.clientapp import ClientApp

from fedfrozen_app.commands import start as start_command
from fedfrozen_app.commands.training import resume
from fedfrozen_app.config import compose_config, compose_run, read, resolved
from fedfrozen_app.core.errors import RunFailed, UserError
from fedfrozen_app.data.federated import load_corpus, server_only
from fedfrozen_app.exchange.count import Traffic
from fedfrozen_app.exchange.hello_messages import Hello, hello_reply
from fedfrozen_app.exchange.messages import Reply, train_reply
from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.exchange.role import Role
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.handlers import train_handler as train_handler
from fedfrozen_app.local import worker_for as workers
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.models.task import Batch
from fedfrozen_app.run.federate import federate
from fedfrozen_app.run.job import Job
from fedfrozen_app.runtimes.inprocess.grid import InProcessGrid
from fedfrozen_app.server.connection import connect
from fedfrozen_app.server.round_trip import RoundTrip
from fedfrozen_app.server_app import gather
from tests.conftest import SMALL, Run, same_bits
from tests.server.wire import ROUNDS, forget_process, run_wired, wired, write_sites


def test_bytes_on_the_wire_give_the_same_bits_as_no_wire(train, tmp_path):
    one = train(*ROUNDS, folder="one")
    other = run_wired(tmp_path)
    assert same_bits(one.model, other.model)
    for row, twin in zip(one.rows, other.rows, strict=True):
        for key in ("bytes_up", "bytes_down", "bytes_up_by_role", "bytes_down_by_role", "clients"):
            assert row.get(key) == twin.get(key)


def test_a_reply_lies_where_the_server_s_model_does():
    """Here without a GPU: a model on the meta device, which has a place but no values."""
    request = TrainRequest(round=1, plan=Plan.full(["w"]), base={})
    app = ClientApp()

    @app.query()
    def hello(message, context):
        return hello_reply(message, Hello(str(context.node_config["partition-id"])))

    @app.train()
    def train(message, context):
        reply = Reply(request.digest, examples=1, arrays={"w": torch.ones(2)})
        return train_reply(message, reply, local=False)

    connection = connect(InProcessGrid(app, 1, {}), {"w": Role("other")})
    model = {"w": torch.zeros(2, device="meta")}
    members = list(connection.membership.greet().items())
    ((_, reply),) = RoundTrip(connection, request, model, Traffic()).replies(members)
    assert reply.arrays["w"].device.type == "meta"


@pytest.mark.slow
def test_what_a_client_trains_starts_where_its_model_lies(tmp_path, monkeypatch):
    """What came as bytes lies on the host: "meta" stands for the device of the model."""
    seen = []
    real = train_handler.worker_for

    def elsewhere(context):
        worker = real(context)
        monkeypatch.setattr(worker, "device", torch.device("meta"))
        return worker

    def train_client(worker, client, request, start, steps):
        seen.append({start.model[name].device.type for name in request.plan.trained})
        raise ValueError("seen")

    monkeypatch.setattr(train_handler, "worker_for", elsewhere)
    monkeypatch.setattr(train_handler, "train_client", train_client)
    with pytest.raises(RunFailed, match="seen"):
        run_wired(tmp_path, extra=["num_rounds=1"])
    assert seen == 3 * [{"meta"}]


@pytest.mark.slow
def test_private_arrays_that_no_checkpoint_holds_are_not_begun_anew(train, tmp_path, caplog):
    """As in Flower's simulation, whose nodes' state the server cannot see."""
    words = ["strategy=local", "num_rounds=2"]
    run_wired(tmp_path, extra=words)
    assert caplog.text.count("this run cannot be resumed") == 1
    with pytest.raises(UserError, match="Flower forgets"):
        train(*words, "num_rounds=3", folder="wired", resume=True)
    with pytest.raises(UserError, match="Flower forgets"):
        resume([str(tmp_path / "wired"), "num_rounds=3", "runtime=flower"])
    start = tmp_path / "wired" / "checkpoints" / "2"
    assert (
        train("strategy=fedavg", "num_rounds=3", f"from={start}", folder="fork").rows[-1]["clients_ok"] == 3
    )


@pytest.mark.slow
def test_flower_takes_no_private_arrays_over_but_a_strategy_that_has_none_may_begin_there(
    train, tmp_path, monkeypatch, caplog
):
    run = train("strategy=local", "num_rounds=1")
    assert "cannot be resumed" not in caplog.text
    with pytest.raises(UserError, match="runtime=inprocess"):
        resume([str(run.folder), "num_rounds=2", "runtime=flower"])
    with pytest.raises(UserError, match="runtime=inprocess"):  # as plain `flwr run` would
        run_wired(tmp_path, extra=["strategy=local", f"from={run.folder}/checkpoints/1"])

    def handed_in(*app, **settings):
        raise RunFailed("it was handed in")

    monkeypatch.setattr("fedfrozen_app.runtimes.flower.simulated.run_app", handed_in)
    words = [*SMALL, "strategy=fedavg", "runtime=flower", f"output_dir={tmp_path}/fork"]
    with pytest.raises(RunFailed, match="handed in"):
        start_command.train([*words, f"from={run.folder}/checkpoints/1"])


@pytest.mark.parametrize("harm", ["nothing", "deleted", "damaged", "deleted again and again"])
@pytest.mark.slow
def test_a_cache_that_was_harmed_after_the_freeze_changes_nothing(train, tmp_path, harm):
    one = train(*ROUNDS, folder="one")
    harmed = []

    def before(server_round):
        forget_process()
        if server_round != 4 or (harmed and "again" not in harm):
            return
        harmed.append(server_round)
        for path in (tmp_path / "cache").iterdir():
            if harm.startswith("deleted"):
                path.unlink()
            elif harm == "damaged":
                content = bytearray(path.read_bytes())
                content[-1] ^= 0xFF
                path.write_bytes(content)

    other = run_wired(tmp_path, before)
    assert same_bits(one.model, other.model)
    assert all(row["clients_failed"] == 0 for row in other.rows[1:])
    more = other.rows[4]["bytes_down"] - one.rows[4]["bytes_down"]
    assert more == 0 if harm == "nothing" else more > 0


@pytest.mark.slow
def test_a_client_s_model_is_built_once_for_all_messages(tmp_path, monkeypatch):
    forget_process()
    built = []
    real = workers.install
    monkeypatch.setattr(workers, "install", lambda *given: built.append(1) or real(*given))
    run_wired(tmp_path)
    assert built == [1]


def test_private_arrays_never_travel(tmp_path, monkeypatch):
    replies = []
    real = train_handler.train_reply

    def watch(message, reply, *, local):
        replies.append(reply)
        return real(message, reply, local=local)

    monkeypatch.setattr(train_handler, "train_reply", watch)
    run = run_wired(tmp_path, extra=["strategy=local"])
    assert replies and not any(reply.arrays for reply in replies)
    assert run.rows[-1]["bytes_up_by_role"] == {}


def test_the_server_cannot_name_a_node_s_data(tmp_path):
    words = [*SMALL, "dataset=images", f"dataset.path={tmp_path}"]
    grid = wired(words, [{"partition-id": 0, "num-partitions": 1}], num_clients=1)
    context = grid.contexts[1]
    forget_process()
    with pytest.raises(UserError, match="names no data of its own"):
        workers.worker_for(context)


@pytest.mark.parametrize(("given", "fits"), [(None, True), (3, True), (10, False)])
def test_num_clients_and_the_nodes_there_are(given, fits, caplog):
    caplog.set_level("INFO")
    nodes = [{"partition-id": number, "num-partitions": 3} for number in range(3)]
    words = [word for word in SMALL if not word.startswith("num_clients")]
    words += [] if given is None else [f"num_clients={given}"]
    connection = connect(wired(words, nodes), {})
    config = read(resolved(compose_config(words)))
    if fits:
        assert gather(connection.membership, config) == 3
        assert ("num-supernodes=10" in caplog.text) == (given is None)
    else:
        with pytest.raises(UserError, match="num_clients=10 was asked for, but the federation has 3 nodes"):
            gather(connection.membership, config)


def test_too_few_nodes_end_the_wait_with_a_sentence():
    nodes = [{"site": "north", "data-path": "x"}]
    words = [*SMALL, "++runtime.node_timeout=0.2"]
    connection = connect(wired(words, nodes, num_clients=1), {})
    with pytest.raises(UserError, match="Only 1 of 3 nodes appeared"):
        gather(connection.membership, read(resolved(compose_config(words))))


@pytest.mark.slow
def test_sites_train_on_their_own_folders(tmp_path):
    """Two sites with a folder each: one full-batch step equals the step on both folders' rows together."""
    write_sites(tmp_path / "data")
    words = [word for word in SMALL if not word.startswith(("num_clients", "dataset", "partition"))]
    words += [
        "dataset=images",
        f"dataset.path={tmp_path}/data",
        "dataset.client_validation=0",
        "num_rounds=1",
    ]
    words += ["client=sgd", "client.momentum=0", "client.lr=0.5", "client.batch_size=100000", "seed=3"]
    composed = compose_run(words)
    config = composed.config
    corpus = load_corpus(config)
    worker = Worker(config, corpus, shares=server_only(corpus, config))
    start = {name: value.detach().clone() for name, value in worker.parameters.items()}
    sites = {name: f"{tmp_path}/data/{name}" for name in ("north", "south")}
    nodes = [{"site": n, "data-path": p, "cache-dir": f"{tmp_path}/cache-{n}"} for n, p in sites.items()]
    forget_process()
    connection = connect(wired(words, nodes, num_clients=2), worker.roles, data_spec=worker.data_spec)
    assert gather(connection.membership, config) is None
    federate(Job(composed, tmp_path / "run"), connection, worker)
    run = Run(tmp_path / "run")
    assert run.rows[1]["clients"] == ["north", "south"] and run.rows[1]["clients_failed"] == 0

    tables = [load_corpus(config, path, corpus.classes).train for path in sites.values()]
    pixels = torch.cat([table.inputs["pixel_values"] for table in tables])
    labels = torch.cat([table.labels for table in tables])
    worker.load(start, {})
    worker.model.requires_grad_(True)
    worker.task.loss(worker.parameters, Batch({"pixel_values": pixels}, labels)).backward()
    for name, value in worker.parameters.items():
        torch.testing.assert_close(run.model[name], start[name] - 0.5 * value.grad, rtol=1e-4, atol=1e-6)
