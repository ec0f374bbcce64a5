"""A grid whose clients train together under the cohort runner."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from flwr.app import Message
from flwr.clientapp import ClientApp
from torch import Tensor

from fedfrozen_app.config.codec_checks import down_codec_of
from fedfrozen_app.exchange.block import Block
from fedfrozen_app.exchange.broadcast import with_decoded
from fedfrozen_app.exchange.messages import Reply, block_replies, read_train, train_reply
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.local.client_state import held_at_home, keep_private, kept_arrays, per_client_arrays
from fedfrozen_app.local.coding import encode_update
from fedfrozen_app.local.cohort import CohortRunner, cannot_serve
from fedfrozen_app.runtimes.inprocess.grid import InProcessGrid, is_train

log = logging.getLogger(__name__)


class CohortGrid(InProcessGrid):
    """Trains a round's clients together, in blocks; requests that the cohort runner cannot serve, one by one.

    `expected` predicts the cohort of a round, whose batches are prepared in advance; empty if unknown.
    """

    def __init__(
        self,
        app: ClientApp,
        num_partitions: int,
        run_config: dict[str, str],
        runner: CohortRunner,
        expected: Callable[[int], Sequence[str]],
    ) -> None:
        super().__init__(app, num_partitions, run_config)
        self._runner, self._expected = runner, expected
        self._round: Iterator[Message] = iter(())
        self._ready: dict[str, Message] = {}
        self._explained: set[str] = set()

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        messages = list(messages)
        self._round = self._train(list(filter(is_train, messages)))
        return super().push_messages(messages)

    def schedule(self, message_ids: Sequence[str]) -> list[list[str]]:
        """The order in which clients finish: replies of a block arrive together."""
        if not message_ids:  # secure aggregation: the clients have replied before
            return []
        request, _ = read_train(self.waiting[message_ids[0]])
        if request.evaluate or cannot_serve(request):
            return [[message_id] for message_id in message_ids]
        found = {self._client(self.waiting[i]): i for i in message_ids}
        return [
            [found[client] for client in block]
            for block in self._runner.completion_order(list(found), request)
        ]

    @property
    def can_prefetch(self) -> bool:
        """Whether `prefetch` is of use."""
        return self._runner.can_prefetch

    def prefetch(self, request: TrainRequest, arrays: Mapping[str, Tensor]) -> None:
        """Start the work of the probable next request, with these arrays. All replies to the last one have
        been pulled."""
        self._round = iter(())  # frees what it held
        if not cannot_serve(request):
            self._runner.prefetch(self._expected(request.round), request, arrays)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies = []
        for message_id in message_ids:
            while message_id not in self._ready and (reply := next(self._round, None)) is not None:
                self._ready[reply.metadata.reply_to_message_id] = reply
            if message_id in self._ready:
                replies.append(self._ready.pop(message_id))
            else:
                replies += super().pull_messages([message_id])
        return replies

    def _train(self, messages: list[Message]) -> Iterator[Message]:
        """The replies of the cohort runner. A message that it cannot serve waits and is answered alone."""
        members = self._members(messages)
        if members is None:
            return
        worker, request, asked = self._runner.worker, members.request, members.messages
        kept = self._kept_arrays(members)
        untrained = set(request.plan.private) - set(request.plan.trained)
        common = {name: digest for name, digest in request.base.items() if name not in untrained}
        request, base = replace(request, base=common), {name: members.base[name] for name in common}
        for place, block in enumerate(self._runner.train(list(asked), request, base, kept)):
            # Created while the device is still busy: replies do not wait for its metrics.
            coded: list[dict[str, Tensor]] = []
            for number, client in enumerate(block.clients):
                question = asked[client].metadata
                context = self.contexts[question.dst_node_id]
                home = {name: kept[client][name] for name in untrained}
                own = block.kept[number] if block.kept else {}
                if request.coder is not None:
                    arrays = block.layout.views(block.values[number])
                    sent, unsent = encode_update(context, worker, client, request, arrays, base)
                    coded.append(sent)
                    own = own | unsent
                if home or own:
                    keep_private(context, {**home, **own}, local=True)
                self.waiting.pop(question.message_id)
            replies = self._replies(members, block, coded)
            following = request.round + 1
            if not place and following <= worker.config.num_rounds and (ahead := self._expected(following)):
                self._runner.lay_out_ahead(ahead, replace(request, round=following))
            yield from replies

    def _replies(self, members: "Members", block: Block, coded: list[dict[str, Tensor]]) -> list[Message]:
        """The replies of a block's clients; encoded replies have separate arrays."""
        questions = [members.messages[client] for client in block.clients]
        digests = [members.digests[client] for client in block.clients]
        if not coded:
            return block_replies(block, questions, digests, shared=bool(members.request.plan.shared))
        replies = [
            Reply(digest, block.examples[number], sent, block.metrics_of(number))
            for number, (digest, sent) in enumerate(zip(digests, coded, strict=True))
        ]
        return [
            train_reply(question, reply, local=True)
            for question, reply in zip(questions, replies, strict=True)
        ]

    def _members(self, messages: list[Message]) -> "Members | None":
        """The clients that train together; None where there are none."""
        worker = self._runner.worker
        found: Members | None = None
        # Clients that lacked the same arrays of the same request share the content of their messages. By its
        # id: the request and its base; None where something is missing.
        known: dict[int, tuple[TrainRequest, dict[str, Tensor]] | None] = {}
        for message in messages:
            client, content = self._client(message), id(message.content)
            if content in known:
                if (its := known[content]) is not None:
                    assert found is not None
                    found.messages[client], found.digests[client] = message, its[0].digest
                    if its[0].plan.private:
                        found.given[client] = per_client_arrays(worker, *its)
                continue
            request, sent = read_train(message)
            if request.evaluate:
                continue
            if reason := cannot_serve(request):
                if reason not in self._explained:
                    self._explained.add(reason)
                    log.info("Clients train one by one, because %s.", reason)
                continue
            at_home = held_at_home(self.contexts[message.metadata.dst_node_id], request, sent)
            decoded = with_decoded(down_codec_of(worker.config.codec), request.base, sent, worker.cache)
            base, lacks = worker.cache.complete(request.base, {**at_home, **decoded}, verify=False)
            known[content] = None if lacks else (request, base)
            if lacks:
                continue
            found = found or Members(request, base)
            found.request, found.base = request, base
            found.messages[client], found.digests[client] = message, request.digest
            found.given[client] = per_client_arrays(worker, request, base)
        return found

    def _kept_arrays(self, members: "Members") -> dict[str, dict[str, Tensor]]:
        """Each client's kept arrays, including those that the request sets."""
        request, worker = members.request, self._runner.worker
        if not request.plan.private and not request.method.client_state:
            return {}
        homes = {c: self.contexts[m.metadata.dst_node_id] for c, m in members.messages.items()}
        return {
            client: {**kept_arrays(context, worker, request), **members.given.get(client, {})}
            for client, context in homes.items()
        }


@dataclass
class Members:
    """The clients of a round that train together, by name, with the newest request and its base."""

    request: TrainRequest
    base: dict[str, Tensor]
    messages: dict[str, Message] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)  # of the request of each
    given: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # private values sent to one client
