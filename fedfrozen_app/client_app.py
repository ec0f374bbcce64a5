"""The ClientApp: says who it is, and trains when it is told to."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.supercore.utils import get_flwr_home
from torch import Tensor

from fedfrozen_app.census.ask import read_ask
from fedfrozen_app.config import Config
from fedfrozen_app.exchange.arrays import to_record
from fedfrozen_app.exchange.messages import (
    MASKED_BY,
    CensusReply,
    Hello,
    Reply,
    census_reply,
    census_text,
    envelopes_of,
    hello_reply,
    masking_reply,
    masking_text,
    read_train,
    train_reply,
)
from fedfrozen_app.exchange.order import Order
from fedfrozen_app.exchange.plan import layers_of
from fedfrozen_app.exchange.strict import canonical
from fedfrozen_app.local.algorithm import Start
from fedfrozen_app.local.captured import steps_for
from fedfrozen_app.local.choose import choose
from fedfrozen_app.local.client_state import held_at_home, keep_private, start_of
from fedfrozen_app.local.course import Course, by_itself
from fedfrozen_app.local.resident import Resident, config_of, disk_cache, resident_for
from fedfrozen_app.local.sequential import LocalResult, judge_client, train_client
from fedfrozen_app.privacy.budget import Declined
from fedfrozen_app.secure import talk
from fedfrozen_app.secure.client import Session
from fedfrozen_app.secure.roster import Refused
from fedfrozen_app.secure.round_keys import OnSight, Simulated, new_seed
from fedfrozen_app.secure.work import masked_reply
from fedfrozen_app.seeds import numpy_generator

log = logging.getLogger(__name__)
ON_SIGHT = OnSight()
FAILED = "the site could not carry out the order; its own log says why"


def keep_errors(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Flower sends an exception's text to the server. A site's may quote its data, so it stays in its log."""
    try:
        return call_next(message, context)
    except Exception:  # of whatever kind: any text may quote the data
        if "site" not in context.node_config or "executor" in context.node_config:  # which does the same
            raise
        log.exception("A message could not be answered.")
        raise RuntimeError(FAILED) from None


app = ClientApp(mods=[keep_errors])


@app.query()
def hello(message: Message, context: Context) -> Message:
    """Who this node is. A site also says what its disk holds; a simulated node starts with nothing."""
    context.state["card"] = ConfigRecord({"json": str(message.content["hello"]["card"])})
    node = context.node_config
    if "site" in node:
        held = list(disk_cache(context).held())
        return hello_reply(message, Hello(name=str(node["site"]), held=held))
    return hello_reply(message, Hello(str(node["partition-id"]), int(node["num-partitions"])))


@app.query(MASKED_BY)
def masking(message: Message, context: Context) -> Message:
    """A step of a masked round, for a simulated client; a site's own desk answers it for the site."""
    seed = _identity(context) or new_seed()
    try:
        question = talk.read_question(masking_text(message))
        session, text = talk.answer(
            question,
            client_name(context),
            _session(context) if question["step"] != "keys" else None,
            Simulated(seed),
            ON_SIGHT,
            resident_for(context).config.secure_aggregation.min_cohort,
        )
    except Refused as no:
        return masking_reply(message, json.dumps({"declined": f"declines: {no}"}))
    _keep_session(context, session, seed)
    return masking_reply(message, text)


def _session(context: Context) -> Session | None:
    kept = context.state.get("masking")
    return Session.read(str(kept["session"])) if isinstance(kept, ConfigRecord) else None


def _identity(context: Context) -> bytes | None:
    kept = context.state.get("masking")
    return cast(bytes, kept["identity"]) if isinstance(kept, ConfigRecord) else None


def _keep_session(context: Context, session: Session, seed: bytes) -> None:
    context.state["masking"] = ConfigRecord({"session": session.text(), "identity": seed})


@app.query("census")
def census(message: Message, context: Context) -> Message:
    """What this client counts of its rows. A site's executor does not come by here: it has a policy."""
    from fedfrozen_app.census import whose  # training needs none of it
    from fedfrozen_app.census.site import Rules, answer

    ask = read_ask(census_text(message))
    node = context.node_config
    if "site" in node:
        config, name = config_of(str(context.run_config["overrides"])), str(node["site"])
        path = None if "data-path" not in node else str(node["data-path"])
        records = whose.records_of_folder(config.dataset, path)
        rules = Rules(ask.floor, ask.columns)
    else:
        count = int(node["num-partitions"])
        config, clients = whose.simulated(str(context.run_config["overrides"]), count)
        name = list(clients)[int(node["partition-id"])]
        records, rules = clients[name], Rules(ask.floor, ask.columns, ask.id.encode())
    found = answer(ask, records, rules, {}, whose.tokens_of(config))
    return census_reply(message, CensusReply(name, json=canonical(found)))


@app.train()
def train(message: Message, context: Context) -> Message:
    """Complete the base, train, return what the plan shares; or say what is missing."""
    return by_itself(answer(message, context))


def answer(message: Message, context: Context) -> Course[Message]:
    """The same, but for private steps: it stops there."""
    order, sent = read_train(message)
    local = in_process(context)
    resident = resident_for(context)
    if reason := refusal(context, resident.config, order) or incomplete(resident, order):
        return train_reply(message, Reply(order.digest, declined=reason), local=local)
    session: Session | None = None
    if masks := order.masking is not None and "executor" not in context.node_config:
        try:
            session = talk.opened(envelopes_of(message), _session(context), order.digest)
        except Refused as no:
            return train_reply(message, Reply(order.digest, declined=f"declines: {no}"), local=local)
    if unsaid := [name for name in resident.lacking if name not in order.base]:
        return train_reply(message, Reply(order.digest, lacks=unsaid), local=local)
    at_home = held_at_home(context, order, sent)
    cache = resident.cache_of(client_name(context))
    base, lacks = cache.complete(order.base, {**at_home, **sent}, verify=not local)
    if lacks:
        return train_reply(message, Reply(order.digest, lacks=lacks), local=local)
    came = base
    base = resident.fitted(came)
    resident.load({name: base[name] for name in resident.lacking}, order.base)
    resident.fold(base)
    start = start_of(context, resident, order, base)
    client, steps = client_name(context), steps_for(resident)
    if order.judge:
        figures = judge_client(resident, client, order, start, steps)
        examples = len(resident.rows(client).train)
        return train_reply(message, Reply(order.digest, examples, metrics=figures), local=local)
    if order.choosing:
        layers = layers_of(choose(resident, client, order, start).plan.trained, resident.roles)
        return train_reply(message, Reply(order.digest, chosen=layers), local=local)
    scores: Tensor | None = None
    if resident.config.privacy.name == "none":
        chosen = choose(resident, client, order, start)
        scores = chosen.scores
        if chosen.plan is not order.plan:  # its own part of the plan
            own_order, start = replace(order, plan=chosen.plan), replace(start, trained=chosen.plan.trained)
        else:
            own_order = order
        result = train_client(resident, client, own_order, start, steps)
    else:
        private = yield from train_privately(context, resident, order, start)
        if isinstance(private, Declined):
            return train_reply(message, Reply(order.digest, declined=private.reason), local=local)
        result = private
    kept = {name: result.trained.get(name, start.model[name]) for name in order.plan.private} | result.own
    if kept:
        keep_private(context, kept, local=local)
    metrics = result.metrics
    if scores is not None and order.chooser is not None:
        context.state["scores"] = to_record({"heads": scores.cpu()}, local=local)  # for this client alone
        metrics = metrics | order.chooser.figures(scores)
    arrays = resident.cut_to(result.sent(order.plan.shared), came)
    if order.coder is not None:
        arrays = order.coder.encode(arrays, start.model, resident.roles)
    reply = Reply(order=order.digest, examples=result.examples, arrays=arrays, metrics=metrics)
    if masks and session is not None:
        drawn = numpy_generator(resident.config.seed, "rounding", client, order.round)
        try:
            words = None
            if resident.config.privacy.seeded_noise:
                noise = numpy_generator(resident.config.seed, "noise in the sum", client, order.round)
                words = partial(_words, noise)
            session, reply = masked_reply(session, order, reply, start.model, drawn, words)
        except Refused as no:
            return train_reply(message, Reply(order.digest, declined=f"declines: {no}"), local=local)
        _keep_session(context, session, _identity(context) or b"")
    return train_reply(message, reply, local=local)


def _words(generator: np.random.Generator, count: int) -> np.ndarray:
    return generator.integers(0, 2**64, count, dtype=np.uint64)


def train_privately(
    context: Context, resident: Resident, order: Order, start: Start
) -> Course[LocalResult | Declined]:
    """A site keeps its privacy record, and says how many examples it has, by its own settings alone."""
    from fedfrozen_app.local.private import PrivateClient  # Opacus takes long to load

    node = context.node_config
    if "site" in node:
        folder = Path(str(node.get("privacy-dir") or get_flwr_home() / "fedfrozen" / "privacy"))
    else:
        named = str(context.run_config.get("output-dir", ""))
        folder = Path(named) if named else get_flwr_home() / "fedfrozen" / f"run-{context.run_id}"
        folder /= "privacy"
    client = PrivateClient(
        resident,
        client_name(context),
        order,
        folder,
        declared=int(node["declared-examples"]) if "declared-examples" in node else None,
        limit=float(node["max-epsilon"]) if "max-epsilon" in node else None,
    )
    # Flower's state follows the client from machine to machine of a Ray cluster; its record may not.
    paid = int(str(context.state["privacy"]["rounds"])) if "privacy" in context.state else 0
    result = yield from client.course(start, paid)
    context.state["privacy"] = ConfigRecord({"rounds": client.rounds})
    return result


def refusal(context: Context, config: Config, order: Order) -> str:
    """Why this client will not do what it is asked, as the rest of a sentence; empty when it will."""
    secure = config.secure_aggregation
    if order.masking is None and order.trains and secure.name == "on":
        return "declines: the run is masked, and the order asks for an update without masks"
    if order.choosing and (secure.name, secure.choices, config.privacy.name) != ("on", "groups", "none"):
        return "declines: the order asks which layers it would choose, and the run does not"
    if order.judge and config.privacy.name != "none":
        return "declines: how a model does on its own rows is told without noise, which its epsilon excludes"
    if "max-epsilon" not in context.node_config:
        return ""
    privacy = config.privacy
    if privacy.name == "none" or privacy.seeded_noise or privacy.selection == "unaccounted":
        return (
            "declines: it takes part only with differential privacy, noise of its own, and no unaccounted "
            "choice of layers (max-epsilon)"
        )
    return ""


def incomplete(resident: Resident, order: Order) -> str:
    """Why the order is incomplete, if it is: a name it leaves out would be what an earlier message loaded.
    What a client trains for itself is not the order's to say."""
    if taken := sorted({*order.base} & {*order.plan.private} & {*order.plan.trained}):
        return f"declines: the order says what {taken[0]} is to be, which the client trains for itself"
    said = {*order.base, *order.plan.private}
    unsaid = [name for name in resident.exchanged if name not in said]
    return f"declines: the order does not say what {unsaid[0]} is to be at its start" if unsaid else ""


def client_name(context: Context) -> str:
    node = context.node_config
    return str(node["site"] if "site" in node else node["partition-id"])


def in_process(context: Context) -> bool:
    """Whether the server shares this process, so that arrays need not be turned into bytes."""
    return bool(context.node_config.get("in-process", False))
