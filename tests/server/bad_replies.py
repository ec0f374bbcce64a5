"""Replies that a server must set aside."""

import math

from flwr.app import Array, ConfigRecord

from fedfrozen_app import client_app


def first_name(reply):
    return next(iter(reply.content["arrays"]))


def put(reply, name, tensor):
    data = tensor.numpy().tobytes()
    reply.content["arrays"][name] = Array(str(tensor.dtype)[6:], tuple(tensor.shape), "raw", data)


def with_nan(message, reply):
    name = first_name(reply)
    tensor = reply.content["arrays"][name].__dict__["tensor"].clone()
    tensor.view(-1)[0] = math.nan
    put(reply, name, tensor)


def with_missing_name(message, reply):
    del reply.content["arrays"][first_name(reply)]


def with_torn_array(message, reply):
    reply.content["arrays"][first_name(reply)] = Array("float32", (5,), "raw", b"123")


def for_another_order(message, reply):
    text = str(reply.content["reply"]["json"])
    request = text.split('"')[3]
    reply.content["reply"] = ConfigRecord({"json": text.replace(request, "0" * 64)})


def spoil_replies(monkeypatch, change, clients=("1",), rounds=(2,)):
    """Change the replies of chosen clients in chosen rounds on their way to the server."""
    real = client_app.app

    def app(message, context):
        reply = real(message, context)
        chosen = str(context.node_config["partition-id"]) in clients
        if message.metadata.message_type == "train" and chosen and int(message.metadata.group_id) in rounds:
            return change(message, reply) or reply
        return reply

    monkeypatch.setattr(client_app, "app", app)
