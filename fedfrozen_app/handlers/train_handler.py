"""A client's reply to a train request: check it, complete the base, train, return what the plan shares."""

from collections.abc import Mapping
from dataclasses import replace

from flwr.app import ConfigRecord, Context, Message
from torch import Tensor

from fedfrozen_app.config.codec_checks import down_codec_of
from fedfrozen_app.exchange.arrays import to_record
from fedfrozen_app.exchange.broadcast import with_decoded
from fedfrozen_app.exchange.masking_messages import envelopes_of
from fedfrozen_app.exchange.messages import Reply, read_train, train_reply
from fedfrozen_app.exchange.plan import layers_of
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.handlers.masking_handler import mask_reply, session_of
from fedfrozen_app.handlers.node import client_name, in_process, privacy_folder
from fedfrozen_app.handlers.request_check import incomplete, refusal
from fedfrozen_app.local.algorithm import Start
from fedfrozen_app.local.captured import steps_for
from fedfrozen_app.local.choose import choose
from fedfrozen_app.local.client_coroutine import ClientCoroutine
from fedfrozen_app.local.client_evaluation import evaluate_client
from fedfrozen_app.local.client_state import held_at_home, keep_private, start_of
from fedfrozen_app.local.coding import encode_update
from fedfrozen_app.local.sequential import LocalResult, train_client
from fedfrozen_app.local.worker import Worker
from fedfrozen_app.local.worker_for import worker_for
from fedfrozen_app.privacy.budget import Declined
from fedfrozen_app.secure import secagg_messages
from fedfrozen_app.secure.client import Session
from fedfrozen_app.secure.roster import ProtocolError
from fedfrozen_app.secure.work import carriers_of


def handle_train(message: Message, context: Context) -> ClientCoroutine[Message]:
    """Train and reply, or reply what is missing. Yields before private steps, which must be charged first."""
    request, sent = read_train(message)
    worker = worker_for(context)
    try:
        session = None
        reply = not_possible(context, worker, request)
        if reply is None and request.masking is not None:
            session = secagg_messages.opened(envelopes_of(message), session_of(context), request)
        if reply is None:
            reply = yield from serve(context, worker, request, sent, session, cohort_of(session, request))
    except ProtocolError as no:
        reply = Reply(request.digest, declined=f"declines: {no}")
    return train_reply(message, reply, local=in_process(context))


def not_possible(context: Context, worker: Worker, request: TrainRequest) -> Reply | None:
    reason = refusal(context, worker.config, request) or incomplete(worker, request)
    return Reply(request.digest, declined=reason) if reason else None


def serve(
    context: Context,
    worker: Worker,
    request: TrainRequest,
    sent: Mapping[str, Tensor],
    session: Session | None,
    cohort: tuple[int, int] | None,
) -> ClientCoroutine[Reply]:
    """The reply to a request that the client accepts; with masks if there is a `session`.

    A site calls this with the request that it has checked and without a session: it masks the reply itself,
    once it is stored. `cohort`: see `cohort_of`.
    """
    if unnamed := [name for name in worker.lacking if name not in request.base]:
        return Reply(request.digest, lacks=unnamed)
    client, local = client_name(context), in_process(context)
    cache = worker.cache_of(client)
    decoded = with_decoded(down_codec_of(worker.config.codec), request.base, sent, cache)
    known = {**held_at_home(context, request, sent), **decoded}
    base, lacks = cache.complete(request.base, known, verify=not local)
    if lacks:
        return Reply(request.digest, lacks=lacks)
    fitted = worker.fitted(base)
    worker.load({name: fitted[name] for name in worker.lacking}, request.base)
    worker.load_merged_deltas(fitted)
    start = start_of(context, worker, request, fitted)
    if request.evaluate:
        metrics = evaluate_client(worker, client, request, start, steps_for(worker))
        return Reply(request.digest, len(worker.rows(client).train), metrics=metrics)
    if request.choosing:
        layers = layers_of(choose(worker, client, request, start).plan.trained, worker.roles)
        return Reply(request.digest, chosen=layers)
    scores: Tensor | None = None
    if worker.config.privacy.name == "none":
        result, scores = train_openly(worker, client, request, start)
    else:
        private = yield from train_privately(context, worker, request, start, cohort)
        if isinstance(private, Declined):
            return Reply(request.digest, declined=private.reason)
        result = private
    kept = {name: result.trained.get(name, start.model[name]) for name in request.plan.private} | result.own
    arrays = worker.cut_to(result.sent(request.plan.shared), base)
    arrays, unsent = encode_update(context, worker, client, request, arrays, start.model)
    if kept | unsent:
        keep_private(context, kept | unsent, local=local)
    metrics = result.metrics
    if scores is not None and request.chooser is not None:
        context.state["scores"] = to_record({"heads": scores.cpu()}, local=local)  # for this client alone
        metrics = metrics | request.chooser.metrics(scores)
    reply = Reply(request.digest, result.examples, arrays, metrics)
    return reply if session is None else mask_reply(context, worker, session, request, start, reply)


def train_openly(
    worker: Worker, client: str, request: TrainRequest, start: Start
) -> tuple[LocalResult, Tensor | None]:
    """Train without differential privacy. Returns the scores of the layers too, if the client chooses
    layers."""
    chosen = choose(worker, client, request, start)
    if chosen.plan is not request.plan:  # the client's own part of the plan
        request, start = replace(request, plan=chosen.plan), replace(start, trained=chosen.plan.trained)
    return train_client(worker, client, request, start, steps_for(worker)), chosen.scores


def cohort_of(session: Session | None, request: TrainRequest) -> tuple[int, int] | None:
    """(clients in a masked round, clients that carry its noise): both determine each share of the noise."""
    if session is None:
        return None
    return len(session.roster.entries), carriers_of(request, session.roster)


def train_privately(
    context: Context, worker: Worker, request: TrainRequest, start: Start, cohort: tuple[int, int] | None
) -> ClientCoroutine[LocalResult | Declined]:
    """Train with differential privacy. A site's privacy record and its number of examples come only from its
    own settings."""
    from fedfrozen_app.local.private import PrivateClient  # Opacus takes long to load

    node = context.node_config
    client = PrivateClient(
        worker,
        client_name(context),
        request,
        privacy_folder(context),
        declared=int(node["declared-examples"]) if "declared-examples" in node else None,
        limit=float(node["max-epsilon"]) if "max-epsilon" in node else None,
        proposal=str(node.get("proposal", "")),
        cohort=cohort,
    )
    # Flower's state follows the client from machine to machine of a Ray cluster; its record may not.
    known = context.state.get("privacy", ConfigRecord())
    paid, unsent = int(str(known.get("rounds", 0))), bool(known.get("unsent", False))
    result = yield from client.coroutine(start, paid, unsent=unsent)
    context.state["privacy"] = ConfigRecord({"rounds": client.rounds})
    return result
