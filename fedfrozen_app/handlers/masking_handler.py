"""A simulated client's part in a masked round; a site's executor has its own."""

import json
from functools import partial
from typing import cast

import numpy as np
from flwr.app import ConfigRecord, Context, Message

from fedfrozen_app.core.seeds import numpy_generator
from fedfrozen_app.exchange.masking_messages import masking_reply, masking_text
from fedfrozen_app.exchange.messages import Reply
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.handlers.node import client_name, privacy_folder
from fedfrozen_app.local.algorithm import Start
from fedfrozen_app.local.share_audit import record_share
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.local.worker_for import worker_for
from fedfrozen_app.secure import secagg_messages
from fedfrozen_app.secure.client import Session
from fedfrozen_app.secure.roster import ProtocolError
from fedfrozen_app.secure.round_keys import OnSight, Simulated, new_seed
from fedfrozen_app.secure.work import encoded, masked

ON_SIGHT = OnSight()


def handle_masking(message: Message, context: Context) -> Message:
    """A step of a masked round that carries no arrays."""
    seed = identity_of(context) or new_seed()
    try:
        question = secagg_messages.read_question(masking_text(message))
        session, text = secagg_messages.answer_step(
            question,
            client_name(context),
            session_of(context) if question["step"] != "keys" else None,
            Simulated(seed),
            ON_SIGHT,
            worker_for(context).config.secure_aggregation.min_cohort,
        )
    except ProtocolError as no:
        return masking_reply(message, json.dumps({"declined": f"declines: {no}"}))
    keep_session(context, session, seed)
    return masking_reply(message, text)


def mask_reply(
    context: Context, worker: Worker, session: Session, request: TrainRequest, start: Start, reply: Reply
) -> Reply:
    """The masked reply; `ProtocolError` if it cannot be masked."""
    config, client = worker.config, client_name(context)
    rounding = numpy_generator(config.seed, "rounding", client, request.round)
    words = None
    if config.privacy.seeded_noise:
        noise = numpy_generator(config.seed, "noise in the sum", client, request.round)
        words = partial(_words, noise)
    vector = encoded(session.roster, request, reply, start.model, rounding, words)
    again = numpy_generator(config.seed, "rounding", client, request.round)
    record_share(
        worker,
        client,
        privacy_folder(context),
        request,
        session.roster,
        start.model,
        reply.examples,
        vector,
        again,
    )
    session, reply = masked(session, request, vector, reply.metrics)
    keep_session(context, session, identity_of(context) or b"")
    return reply


def _words(generator: np.random.Generator, count: int) -> np.ndarray:
    return generator.integers(0, 2**64, count, dtype=np.uint64)


def session_of(context: Context) -> Session | None:
    kept = context.state.get("masking")
    return Session.read(str(kept["session"])) if isinstance(kept, ConfigRecord) else None


def identity_of(context: Context) -> bytes | None:
    kept = context.state.get("masking")
    return cast(bytes, kept["identity"]) if isinstance(kept, ConfigRecord) else None


def keep_session(context: Context, session: Session, seed: bytes) -> None:
    context.state["masking"] = ConfigRecord({"session": session.text(), "identity": seed})
