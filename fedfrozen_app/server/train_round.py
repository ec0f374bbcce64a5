"""One round of training: request, replies, the server's step, and the row of its results."""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from fedfrozen_app.adapters.rule import AdapterRule
from fedfrozen_app.core.digests import bytes_on_their_way, start_digests
from fedfrozen_app.core.formatting import format_error
from fedfrozen_app.exchange.count import Traffic, count_parameters
from fedfrozen_app.exchange.messages import Reply
from fedfrozen_app.exchange.names import PARAMETERS, is_parameter
from fedfrozen_app.exchange.summed import SumInstructions
from fedfrozen_app.files.rows import Row
from fedfrozen_app.server.aggregate import RunningMean, Update
from fedfrozen_app.server.local_nodes import LocalNodes
from fedfrozen_app.server.masked_training import bound_of_next_round, masked_round, share_within
from fedfrozen_app.server.record import RoundClock, RoundRecord
from fedfrozen_app.server.round_trip import RoundTrip
from fedfrozen_app.server.seams import StrategySeams
from fedfrozen_app.server.server_state import add_to, follow
from fedfrozen_app.server.step_errors import checked_step

log = logging.getLogger(__name__)


class TrainRound:
    def __init__(self, strategy: StrategySeams, server_round: int) -> None:
        """Draw the cohort and make the request."""
        federation = strategy.federation
        nodes = federation.connection.nodes_of_round()
        self.strategy, self.number, self.population = strategy, server_round, len(nodes)
        drawn = federation.participations(nodes, strategy.num_rounds)
        if drawn and isinstance(nodes, LocalNodes) and federation.connection.pacing is None:
            # A request with the names of all clients would be too long.
            drawn = {client: drawn[client] for client in federation.cohort(nodes, server_round)}
        request = strategy.request(server_round, drawn)
        self.trained_params = count_parameters(strategy.model, strategy.client_plan(server_round).trained)
        strategy.optimizer.follow(set(request.plan.shared))
        strategy.server_state = follow(strategy.server_state, request, strategy.model)
        # The clients' initial values: the model, or its version by coded broadcasts.
        request, self.base = federation.connection.broadcast.begin(request, strategy.model)
        self.request, self.arrays = add_to(request, self.base, strategy.server_state)
        aggregator = federation.aggregator(
            self.base, strategy.median_norm, strategy.zero_fill, strategy.equal
        )
        clock = RoundClock(time.perf_counter())  # after planning
        traffic = Traffic(by_client={} if federation.connection.counts_clients else None)
        self.record = RoundRecord(
            server_round, aggregator, federation.aggregation.quorum, traffic, clock=clock
        )
        self.cohort = self._draw(nodes)
        self.members = [(client, nodes[client]) for client in self.cohort]

    def _draw(self, nodes: Mapping[str, int]) -> list[str]:
        federation = self.strategy.federation
        cohort = federation.cohort(nodes, self.number)
        if federation.secure.name == "on" and not federation.in_batches:
            known = federation.sums.cohort(cohort, self.request, nodes, private=federation.private)
            cohort = federation.without_spoilers(known)
        return cohort

    def run(self) -> Row:
        """Train, step, and update the strategy's model; returns the round's row."""
        rule = self.strategy.federation.rule
        if self.strategy.federation.secure.name == "on":
            self._collect_masked()
            rule.begin()
        else:
            rule.begin()
            self._collect()
        update = self.record.finish(len(self.counted), self.population)
        if self.base is not self.strategy.model:
            update.values = None  # clients started from other values: use their updates
        return self._close(update)

    @property
    def counted(self) -> list[str]:
        """The clients whose replies this round counts."""
        return self.cohort

    # Replies -----------------------------------------------------------------------------------------

    def _collect_masked(self) -> None:
        masked = masked_round(self.strategy, self.request, self.members, self.arrays, self.record.traffic)
        masked.run()
        self.record.take_masked(masked.result)
        secure, sums = self.strategy.federation.secure, self.strategy.federation.sums
        if secure.renews and self.record.secure is not None:
            before = sums.clip or secure.clip
            sums.clip = bound_of_next_round(self.strategy, masked, before)
            self.record.secure |= {"clip": before, "next_clip": sums.clip}
            if secure.quantile is not None and masked.sums is not None:
                self.record.secure["within"] = share_within(masked.sums)
        for client, why in masked.spoilt_by.items():
            self.strategy.federation.sums.spoilers.add(client)
            log.warning("Round %d: client %s %s, so that no sum could be unmasked.", self.number, client, why)
        for client, names in masked.known.items():
            self.strategy.on_reply(client, names)

    def _collect(self) -> None:
        early = self._aggregate_early()
        self.strategy.federation.connection.transport.sum_replies(None if early is None else self._sums())
        for client, reply in self._trip(self.cohort, early).replies(self.members):
            self._take(client, reply)

    def _sums(self) -> SumInstructions | None:
        """How this round's replies may be summed where clients train; None if each one must be sent."""
        strategy, aggregator = self.strategy, self.record.aggregator
        weighed = type(strategy).client_weight is not StrategySeams.client_weight
        if type(aggregator) is not RunningMean or weighed or self.request.codec is not None:
            return None
        gate = aggregator.gate
        return SumInstructions(
            tuple(strategy.equal),
            None if gate is None else gate.far_out,
            None if gate is None else gate.last_median,
            tuple(strategy.client_metric_names()),
        )

    def _trip(self, cohort: Sequence[str], before_metrics: Callable[[Reply], None] | None) -> RoundTrip:
        strategy, rule = self.strategy, self.strategy.federation.rule
        per_client_arrays = {
            client: strategy.per_client_arrays(client) | rule.narrowed(client, strategy.model)
            for client in cohort
        }
        return RoundTrip(
            strategy.federation.connection,
            self.request,
            self.arrays,
            self.record.traffic,
            per_client_arrays,
            before_metrics=before_metrics,
            metric_names=strategy.client_metric_names(),
        )

    def _aggregate_early(self) -> Callable[[Reply], None] | None:
        """A function that aggregates a block before its metrics are known, and may even take the server's
        step; None if individual replies are needed."""
        strategy, federation, record = self.strategy, self.strategy.federation, self.record
        rule = federation.rule
        if strategy.keeps_replies or rule.one_by_one or rule.ranks or federation.on_upload:
            return None

        def aggregate(reply: Reply) -> None:
            record.expect(reply)
            # `observe` may change the merged values: do not use them earlier.
            may_step = not strategy.observes and strategy.can_step_early
            may_step = may_step and federation.connection.transport.can_prefetch
            if may_step and (likely := record.predict(len(self.cohort))) is not None:
                likely.merged = self._step(likely)
                self.prefetch_next(likely.merged)

        return aggregate

    def _take(self, client: str, reply: Reply | str) -> None:
        """Add a reply to the sum, or record why not; pass it to hooks that read single replies."""
        strategy, rule = self.strategy, self.strategy.federation.rule
        if not isinstance(reply, str) and client in rule.ranks:
            reply.arrays = rule.widened(client, reply.arrays, strategy.model)
        strategy.federation.show_upload(self.number, client, reply, self.base)
        names = [] if isinstance(reply, str) else list(filter(is_parameter, reply.arrays))
        sent: dict[str, Tensor] = {}
        reply, weight = self._weighed(client, reply)
        counts = 0.0
        if (strategy.keeps_replies or rule.one_by_one) and not isinstance(reply, str):
            counts = self.record.aggregator.counts(PARAMETERS, weight, 1)
            # The aggregator turns replies into updates in place, all rows of a block at once.
            reply.arrays = {name: value.clone() for name, value in reply.arrays.items()}
            sent = {name: reply.arrays[name].clone() for name in names}
        if self.record.take(client, reply, weight):
            strategy.on_reply(client, names)
            if strategy.keeps_replies:
                strategy.keep_reply(client, sent)
            if rule.one_by_one:
                rule.take(client, sent, counts)

    def _weighed(self, client: str, reply: Reply | str) -> tuple[Reply | str, float]:
        """The reply and its weight in the means, or the reason why it is invalid."""
        if isinstance(reply, str):
            return reply, 0.0
        weight = self.strategy.client_weight(client, reply.examples, reply.metrics)
        if not (math.isfinite(weight) and weight > 0):
            return f"would count {weight:g} times in the mean, which must be a positive number", 0.0
        return reply, weight

    # The server's step -------------------------------------------------------------------------------

    def _step(self, update: Update) -> dict[str, Tensor]:
        """The next values of all names that the round changes."""
        model = self.strategy.model
        # No step without replies: an optimiser would continue with its momentum.
        stepped = checked_step(self.strategy, update) if update.replies else {}
        return {name: value.to(model[name]) for name, value in stepped.items()}  # device and dtype

    def _close(self, update: Update) -> Row:
        strategy, record, observes = self.strategy, self.record, self.strategy.observes
        stepping = time.perf_counter()
        merged = self._step(update) if update.merged is None else update.merged
        if not observes and update.merged is None:
            stepping += self.prefetch_next(merged)
        strategy.all_valid = not record.failures
        copying = None if observes else bytes_on_their_way(merged)  # wait once, for these and the drift
        drift = update.drift
        record.clock.aggregating += time.perf_counter() - stepping
        row = record.row(strategy.stage(self.number), self.counted, self.trained_params, drift)
        self._complete(row)
        if strategy.federation.connection.membership.of_sites:
            row["bytes_down_cold"] = record.traffic.down_cold
        strategy.median_norm = row.get("usual_norm")
        closing = time.perf_counter()
        row |= strategy.observe(row, merged)
        if observes:
            closing += self.prefetch_next(merged)
        changed = start_digests(merged, copying)
        strategy.model.update(merged)
        moved = start_digests(self._move_base() if update.replies else {})
        strategy.model_digests.expect(lambda: changed() | moved())
        row["seconds"]["aggregate"] += time.perf_counter() - closing
        return row

    def _complete(self, row: Row) -> None:
        """Add entries that only some kinds of rounds have."""

    def _move_base(self) -> dict[str, Tensor]:
        """Let the adapters' rule change the model after the step; returns the changed values."""
        strategy = self.strategy
        moved: dict[str, Tensor] = {}
        for name, value in strategy.federation.rule.close(self.number, strategy.model).items():
            if value is None:
                del strategy.model[name], strategy.digests[name]
            else:
                strategy.model[name] = moved[name] = value
        return moved

    def prefetch_next(self, merged: Mapping[str, Tensor]) -> float:
        """Predict the next round as soon as its model is known, so that an idle device can start it.

        Returns the seconds that this took, which do not count for this round.
        """
        began = time.perf_counter()
        strategy, federation = self.strategy, self.strategy.federation
        transport = federation.connection.transport
        moves = type(federation.rule).close is not AdapterRule.close  # the model will still change
        coded = federation.connection.broadcast.coder is not None  # clients will start from other values
        if not transport.can_prefetch or moves or coded or federation.secure.name == "on":
            return 0.0
        if self.number < strategy.num_rounds:
            try:
                request = strategy.request(self.number + 1, self.request.participations)
                known = {name: digest for name, digest in request.base.items() if name not in merged}
                transport.prefetch(replace(request, base=known), {**strategy.model, **merged})
            except Exception as error:  # noqa: BLE001  (a persistent error is raised again by the round itself)
                log.info("Round %d could not be prefetched: %s", self.number + 1, format_error(error))
        return time.perf_counter() - began
