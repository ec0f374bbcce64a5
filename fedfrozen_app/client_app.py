"""Flower's entry on a client: hello, train, masking and census."""

import logging
from collections.abc import Callable

from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp

from fedfrozen_app.core.own_objects import take_over
from fedfrozen_app.exchange.hello_messages import Hello, hello_reply
from fedfrozen_app.exchange.masking_messages import MASKED_BY
from fedfrozen_app.handlers.census_handler import handle_census
from fedfrozen_app.handlers.masking_handler import handle_masking
from fedfrozen_app.handlers.train_handler import handle_train
from fedfrozen_app.local.client_coroutine import run_alone
from fedfrozen_app.local.worker_for import disk_cache

log = logging.getLogger(__name__)
FAILED = "the site could not carry out the request; its own log says why"


def keep_errors(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Keep exception texts in a site's own log: Flower would send them to the server, and they may quote
    data."""
    try:
        return call_next(message, context)
    except Exception:  # of whatever kind: any text may quote the data
        if "site" not in context.node_config or "executor" in context.node_config:  # which does the same
            raise
        log.exception("A message could not be answered.")
        raise RuntimeError(FAILED) from None


def with_own_objects(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Register the Python objects of a simulated node's run; a site accepts none."""
    if "site" not in context.node_config:
        take_over()
    return call_next(message, context)


app = ClientApp(mods=[keep_errors, with_own_objects])


@app.query()
def hello(message: Message, context: Context) -> Message:
    """This node's identity. A site also lists the arrays on its disk; a simulated node has none."""
    context.state["card"] = ConfigRecord({"json": str(message.content["hello"]["card"])})
    node = context.node_config
    if "site" in node:
        held = list(disk_cache(context).held())
        return hello_reply(message, Hello(name=str(node["site"]), held=held))
    return hello_reply(message, Hello(str(node["partition-id"]), int(node["num-partitions"])))


@app.query(MASKED_BY)
def masking(message: Message, context: Context) -> Message:
    return handle_masking(message, context)


@app.query("census")
def census(message: Message, context: Context) -> Message:
    return handle_census(message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    return run_alone(handle_train(message, context))
