"""Arrays as bytes and caches on disk, with the real ClientApp, without starting Flower's processes.

The grid is in process, but its nodes are not told so: everything is serialised, and the base lies on disk.
"""

import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.clientapp import ClientApp
from PIL import Image
from sklearn.datasets import load_digits

from fedfrozen_app import client_app
from fedfrozen_app.commands import training
from fedfrozen_app.commands.training import resume
from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.data.federated import load_corpus, server_only, share_out
from fedfrozen_app.errors import RunFailed, UserError
from fedfrozen_app.exchange.count import Traffic
from fedfrozen_app.exchange.messages import Hello, Reply, hello_reply, train_reply
from fedfrozen_app.exchange.order import Order
from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.files import checkpoint
from fedfrozen_app.inprocess.grid import InProcessGrid
from fedfrozen_app.local import resident as residents
from fedfrozen_app.local.resident import Resident
from fedfrozen_app.models.roles import Role
from fedfrozen_app.models.task import Batch
from fedfrozen_app.run.federate import federate
from fedfrozen_app.run.job import Job
from fedfrozen_app.server.conversation import Conversation
from fedfrozen_app.server_app import gather
from tests.conftest import SMALL, Run, same_bits

ROUNDS = ["num_rounds=4", "strategy.warmup_rounds=2"]


def wired(words, nodes, before_round=None, num_clients=3):
    """A conversation that sends bytes, and the grid under it."""

    class WireGrid(InProcessGrid):
        def push_messages(self, messages):
            messages = list(messages)
            if before_round and messages and messages[0].metadata.group_id:
                before_round(int(messages[0].metadata.group_id))
            return super().push_messages(messages)

    grid = WireGrid(client_app.app, num_clients, {"overrides": shlex.join(words)})
    for context, node in zip(grid.contexts.values(), nodes, strict=True):
        context.node_config.clear()
        context.node_config.update(node)
    return grid


def run_wired(tmp_path, before_round=None, extra=ROUNDS, small=True):
    words = [*(SMALL if small else ()), *extra, f"runtime.cache_dir={tmp_path}/cache"]
    nodes = [{"partition-id": number, "num-partitions": 3} for number in range(3)]
    grid = wired(words, nodes, before_round)
    resolved_config = resolved(compose_config(words))
    config = read(resolved_config)
    corpus = load_corpus(config)
    resident = Resident(config, corpus, shares=share_out(corpus, config, 3))
    conversation = Conversation(grid, resident.roles, card=resident.card)
    start = checkpoint.read(Path(config.start_from)) if config.start_from else None
    federate(Job(config, resolved_config, words, tmp_path / "wired", start), conversation, resident)
    return Run(tmp_path / "wired")


def forget_process():
    """A new process: nothing is loaded, only the disk remembers."""
    residents._installed = None


def test_bytes_on_the_wire_give_the_same_bits_as_no_wire(train, tmp_path):
    one = train(*ROUNDS, folder="one")
    other = run_wired(tmp_path)
    assert same_bits(one.model, other.model)
    for row, twin in zip(one.rows, other.rows, strict=True):
        for key in ("bytes_up", "bytes_down", "bytes_up_by_role", "bytes_down_by_role", "clients"):
            assert row.get(key) == twin.get(key)


def test_a_reply_lies_where_the_server_s_model_does():
    """Here without a GPU: a model on the meta device, which has a place but no values."""
    order = Order(round=1, plan=Plan.full(["w"]), base={})
    app = ClientApp()

    @app.query()
    def hello(message, context):
        return hello_reply(message, Hello(str(context.node_config["partition-id"])))

    @app.train()
    def train(message, context):
        reply = Reply(order.digest, examples=1, arrays={"w": torch.ones(2)})
        return train_reply(message, reply, local=False)

    conversation = Conversation(InProcessGrid(app, 1, {}), {"w": Role("other")})
    model = {"w": torch.zeros(2, device="meta")}
    ((_, reply),) = conversation.round(order, list(conversation.greet().items()), model, Traffic())
    assert reply.arrays["w"].device.type == "meta"


@pytest.mark.slow
def test_what_a_client_trains_starts_where_its_model_lies(tmp_path, monkeypatch):
    """What came as bytes lies on the host: "meta" stands for the device of the model."""
    seen = []
    real = client_app.resident_for

    def elsewhere(context):
        resident = real(context)
        monkeypatch.setattr(resident, "device", torch.device("meta"))
        return resident

    def train_client(resident, client, order, start, steps):
        seen.append({start.model[name].device.type for name in order.plan.trained})
        raise ValueError("seen")

    monkeypatch.setattr(client_app, "resident_for", elsewhere)
    monkeypatch.setattr(client_app, "train_client", train_client)
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

    monkeypatch.setattr("fedfrozen_app.flower.simulated.run_app", handed_in)
    words = [*SMALL, "strategy=fedavg", "runtime=flower", f"output_dir={tmp_path}/fork"]
    with pytest.raises(RunFailed, match="handed in"):
        training.train([*words, f"from={run.folder}/checkpoints/1"])


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
    real = residents._build_for
    monkeypatch.setattr(residents, "_build_for", lambda context: built.append(1) or real(context))
    run_wired(tmp_path)
    assert built == [1]


def test_private_arrays_never_travel(tmp_path, monkeypatch):
    replies = []
    real = client_app.train_reply

    def watch(message, reply, *, local):
        replies.append(reply)
        return real(message, reply, local=local)

    monkeypatch.setattr(client_app, "train_reply", watch)
    run = run_wired(tmp_path, extra=["strategy=local"])
    assert replies and not any(reply.arrays for reply in replies)
    assert run.rows[-1]["bytes_up_by_role"] == {}


def test_the_server_cannot_name_a_node_s_data(tmp_path):
    words = [*SMALL, "dataset=images", f"dataset.path={tmp_path}"]
    grid = wired(words, [{"partition-id": 0, "num-partitions": 1}], num_clients=1)
    context = grid.contexts[1]
    forget_process()
    with pytest.raises(UserError, match="names no data of its own"):
        residents.resident_for(context)


@pytest.mark.parametrize(("given", "fits"), [(None, True), (3, True), (10, False)])
def test_num_clients_and_the_nodes_there_are(given, fits, caplog):
    caplog.set_level("INFO")
    nodes = [{"partition-id": number, "num-partitions": 3} for number in range(3)]
    words = [word for word in SMALL if not word.startswith("num_clients")]
    words += [] if given is None else [f"num_clients={given}"]
    conversation = Conversation(wired(words, nodes), {})
    config = read(resolved(compose_config(words)))
    if fits:
        assert gather(conversation, config) == 3
        assert ("num-supernodes=10" in caplog.text) == (given is None)
    else:
        with pytest.raises(UserError, match="num_clients=10 was asked for, but the federation has 3 nodes"):
            gather(conversation, config)


def test_too_few_nodes_end_the_wait_with_a_sentence():
    nodes = [{"site": "north", "data-path": "x"}]
    words = [*SMALL, "runtime.node_timeout=0.2"]
    conversation = Conversation(wired(words, nodes, num_clients=1), {})
    with pytest.raises(UserError, match="Only 1 of 3 nodes appeared"):
        gather(conversation, read(resolved(compose_config(words))))


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
    resolved_config = resolved(compose_config(words))
    config = read(resolved_config)
    corpus = load_corpus(config)
    resident = Resident(config, corpus, shares=server_only(corpus, config))
    start = {name: value.detach().clone() for name, value in resident.parameters.items()}
    sites = {name: f"{tmp_path}/data/{name}" for name in ("north", "south")}
    nodes = [{"site": n, "data-path": p, "cache-dir": f"{tmp_path}/cache-{n}"} for n, p in sites.items()]
    forget_process()
    conversation = Conversation(wired(words, nodes, num_clients=2), resident.roles, card=resident.card)
    assert gather(conversation, config) is None
    federate(Job(config, resolved_config, words, tmp_path / "run"), conversation, resident)
    run = Run(tmp_path / "run")
    assert run.rows[1]["clients"] == ["north", "south"] and run.rows[1]["clients_failed"] == 0

    tables = [load_corpus(config, path, corpus.classes).train for path in sites.values()]
    pixels = torch.cat([table.inputs["pixel_values"] for table in tables])
    labels = torch.cat([table.labels for table in tables])
    resident.load(start, {})
    resident.model.requires_grad_(True)
    resident.task.loss(resident.parameters, Batch({"pixel_values": pixels}, labels)).backward()
    for name, value in resident.parameters.items():
        torch.testing.assert_close(run.model[name], start[name] - 0.5 * value.grad, rtol=1e-4, atol=1e-6)


def write_sites(folder):
    """Digits as pictures: the north has few of the large digits, the south few of the small ones."""
    pixels, labels = load_digits(return_X_y=True)
    for number in range(240):
        site = "north" if (labels[number] < 5) == (number % 5 > 0) else "south"
        target = folder / site / str(labels[number])
        target.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray((pixels[number].reshape(8, 8) * 15).astype(np.uint8))
        image.save(target / f"{number}.png")
