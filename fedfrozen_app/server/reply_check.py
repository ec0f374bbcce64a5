"""Read a client's reply, count its bytes, and check it. Reasons are the rest of a sentence ("it ...")."""

from collections.abc import Collection

from flwr.app import Message

from fedfrozen_app.core.formatting import counted
from fedfrozen_app.exchange.check import problem_of
from fedfrozen_app.exchange.count import Traffic
from fedfrozen_app.exchange.messages import Reply, read_reply
from fedfrozen_app.exchange.names import parameter_of
from fedfrozen_app.secure.work import MASKED, problem_of_masked
from fedfrozen_app.secure.work import bytes_by_role as masked_bytes
from fedfrozen_app.server.connection import Connection
from fedfrozen_app.server.request_messages import ClientRequest


def read(
    connection: Connection, asked: ClientRequest, message: Message | None, traffic: Traffic
) -> Reply | str:
    """The reply, not checked yet, or why there is none."""
    if message is None:
        return f"did not answer within {connection.transport.timeout:g} s"
    try:
        reply = read_reply(message)
    except ValueError as error:
        return str(error)
    connection.membership.keep_anchor(asked.client, reply.anchor)
    request, layout = asked.request, asked.layout
    if layout is not None and MASKED in reply.arrays and request.masking is not None:
        bits = request.masking.settings["bits"]
        traffic.masked(asked.client, masked_bytes(layout, bits, connection.roles), reply.text)
        return reply
    extra_names = () if request.coder is None else request.coder.extra_names
    traffic.received(asked.client, reply.arrays, reply.text, connection.roles, extra_names)
    return reply


def check(
    connection: Connection, asked: ClientRequest, reply: Reply | str, declared: Collection[str]
) -> Reply | str:
    """The valid, decoded reply, or why it is set aside. Also updates the ledger.

    `declared`: the metrics that a client may send.
    """
    if isinstance(reply, str):
        return reply
    if reply.declined:
        return reply.declined
    if reply.lacks:
        return f"still lacks {counted(len(reply.lacks), 'array')} after all were sent"
    request, model, roles = asked.request, asked.model, connection.roles
    ledger = connection.membership.ledger
    if asked.layout is not None:
        if problem := problem_of_masked(reply, request, asked.layout):
            return problem
        ledger.confirm(asked.client, request.base_digests)
        return reply
    if request.coder is not None:
        try:
            reply.arrays = request.coder.decode(reply.arrays, model, roles)
        except ValueError as error:
            return str(error)
    reply.settle()
    if problem := problem_of(reply, request, model, roles, declared):
        return problem
    ledger.confirm(asked.client, request.base_digests)
    if not connection.transport.local:  # received arrays are on the host, the server's model may be on a GPU
        reply.arrays = {n: tensor.to(model[parameter_of(n)].device) for n, tensor in reply.arrays.items()}
    return reply
