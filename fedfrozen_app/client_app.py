"""The ClientApp: says who it is, and trains when it is told to."""

from dataclasses import replace

from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from torch import Tensor

from fedfrozen_app.exchange.arrays import to_record, to_tensors
from fedfrozen_app.exchange.messages import Hello, Reply, hello_reply, read_train, train_reply
from fedfrozen_app.exchange.prune import prune
from fedfrozen_app.runtime.captured import steps_for
from fedfrozen_app.runtime.choose import choose
from fedfrozen_app.runtime.resident import Resident, disk_cache, resident_for
from fedfrozen_app.runtime.sequential import train_client

app = ClientApp()


@app.query()
def hello(message: Message, context: Context) -> Message:
    """Who this node is. A site also says what its disk holds; a simulated node starts with nothing."""
    context.state["card"] = ConfigRecord({"json": str(message.content["hello"]["card"])})
    node = context.node_config
    if "site" in node:
        held = list(disk_cache(context).held())
        return hello_reply(message, Hello(name=str(node["site"]), held=held))
    return hello_reply(message, Hello(str(node["partition-id"]), int(node["num-partitions"])))


@app.train()
def train(message: Message, context: Context) -> Message:
    """Complete the base, train, return what the plan shares; or say what is missing."""
    order, sent = read_train(message)
    local = in_process(context)
    resident = resident_for(context)
    base, lacks = resident.cache.complete(order.base, sent, verify=not local)
    if lacks:
        return train_reply(message, Reply(order.digest, lacks=lacks), local=local)
    start = base | private_arrays(context, resident, order.plan.private)
    client = client_name(context)
    choice = choose(resident, client, order, start)
    result = train_client(resident, client, replace(order, plan=choice.plan), start, steps_for(resident))
    kept = {name: result.trained.get(name, start[name]) for name in order.plan.private}
    if kept:
        context.state["private"] = to_record(kept, local=local)
    metrics = result.metrics
    if choice.scores is not None:
        # By head for this client alone; the layers' means go with the reply.
        context.state["scores"] = to_record({"heads": choice.scores.cpu()}, local=local)
        means = choice.scores.mean(dim=1).tolist()
        metrics = metrics | {f"layer_score_{layer}": score for layer, score in enumerate(means)}
    arrays = {name: result.trained[name] for name in choice.plan.shared}
    if order.keep < 1:
        arrays = prune(arrays, start, order.keep, resident.roles)
    reply = Reply(order=order.digest, examples=result.examples, arrays=arrays, metrics=metrics)
    return train_reply(message, reply, local=local)


def client_name(context: Context) -> str:
    node = context.node_config
    return str(node["site"] if "site" in node else node["partition-id"])


def in_process(context: Context) -> bool:
    """Whether the server shares this process, so that arrays need not be turned into bytes."""
    return bool(context.node_config.get("in-process", False))


def private_arrays(context: Context, resident: Resident, names: tuple[str, ...]) -> dict[str, Tensor]:
    """What this client has kept for itself; at its first round, the values every model starts with."""
    if not names:
        return {}
    record = context.state.get("private")
    if isinstance(record, ArrayRecord):
        return to_tensors(record)
    initial = resident.initial()
    return {name: initial[name] for name in names}
