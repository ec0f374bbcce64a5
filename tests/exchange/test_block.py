"""Replies of a block: what is on the device comes over once, and each client finds its own."""

import torch
from flwr.app import Message, MessageType, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedfrozen_app.exchange.block import Block, Layout
from fedfrozen_app.exchange.messages import block_replies, message_to, read_reply, train_message
from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.server.aggregate import RunningMean


def block():
    layout = Layout.of({"w": torch.zeros(2)})
    values = torch.arange(3.0)[:, None].expand(3, layout.width).clone()
    losses = {"train_loss": torch.tensor([0.5, 1.5, 2.5])}
    extra = [{}, {"client_val_after": 1}, {}]
    return Block(("a", "b", "c"), layout, torch.zeros(layout.width), values, [10, 20, 30], losses, extra)


def requests(count):
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 0, 0, 0
    found = [Message(RecordDict(), dst_node_id=n + 1, message_type=MessageType.TRAIN) for n in range(count)]
    for number, message in enumerate(found):
        message.metadata.__dict__["_message_id"] = f"m{number}"
    return found


def test_what_is_looked_at_comes_with_the_figures_in_one_wait(monkeypatch):
    found, waits, real = block(), [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: waits.append(1) or real(self))
    found.look_at("is odd", torch.tensor([False, True, False]))
    assert found.metrics_of(1) == {"train_loss": 1.5, "client_val_after": 1.0}
    assert found.seen("is odd") == [0.0, 1.0, 0.0] and found.metrics_of(2) == {"train_loss": 2.5}
    assert len(waits) == 1
    found.look_at("comes later", torch.tensor([1.0, 2.0, 3.0]))
    assert found.seen("comes later") == [1.0, 2.0, 3.0] and len(waits) == 2


def test_every_client_of_a_block_has_a_reply_of_its_own():
    sent = requests(3)
    replies = block_replies(block(), sent, ["one", "other", "one"], shared=True)
    for number, (question, message) in enumerate(zip(sent, replies, strict=True)):
        assert message.metadata.reply_to_message_id == question.metadata.message_id
        assert message.metadata.src_node_id == question.metadata.dst_node_id
        assert message.metadata.message_type == MessageType.TRAIN
        made = Message(message.content, reply_to=question)
        for each in (made, message):
            each.metadata.created_at = each.metadata.ttl = 0.0
        assert message.metadata == made.metadata and vars(message).keys() == vars(made).keys()
        reply = read_reply(message)
        assert reply.metrics == {} and reply.pending is not None  # nobody has waited
        reply.settle()
        assert reply.metrics["train_loss"] == number + 0.5 and reply.pending is None
        assert reply.examples == 10 * (number + 1) and reply.arrays["w"].tolist() == [number, number]
        assert reply.request == ("one", "other", "one")[number] and reply.request in reply.text


def test_a_copied_message_is_the_one_that_flower_makes():
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 0, 0, 0
    request, content = TrainRequest(3, Plan(("w",), ("w",)), {"w": "0" * 64}), RecordDict()
    one = train_message(1, request, content, ttl=60.0)
    copied, made = message_to(2, one), train_message(2, request, content, ttl=60.0)
    assert copied.metadata.created_at >= one.metadata.created_at
    copied.metadata.created_at = made.metadata.created_at
    assert vars(copied).keys() == vars(made).keys() and copied.content is made.content
    assert copied.metadata == made.metadata and one.metadata.dst_node_id == 1
    copied.metadata.__dict__["_message_id"] = "2"  # as a grid does that sends it
    assert one.metadata.message_id == ""


def test_clients_that_share_nothing_send_no_arrays():
    (message,) = block_replies(block(), requests(1), ["one"], shared=False)
    assert read_reply(message).arrays == {}


def test_an_update_is_too_large_by_its_weight_as_one_that_came_alone_is():
    """1e31 · 20 examples is over what sums may hold, and 1e31 · 1 is not: block or not, the same verdict."""
    values = {"w": torch.full((2,), 1e31)}
    for examples, verdict in ((20, "holds values that are too large to average in w"), (1, None)):
        alone = RunningMean({"w": torch.zeros(2)}, lambda name: "all")
        stacked = RunningMean({"w": torch.zeros(2)}, lambda name: "all")
        layout = Layout.of(values)
        rows = torch.stack([layout.flatten(values)] * 2)
        made = Block(("a", "b"), layout, torch.zeros(layout.width), rows, [examples, 1])
        assert alone.add({"w": values["w"].clone()}, float(examples)) == verdict
        assert stacked.add(made.slice(0), float(examples)) == verdict
        assert stacked.add(made.slice(1), 1.0) is None
