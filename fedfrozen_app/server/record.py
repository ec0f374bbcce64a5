"""A round's record of its replies, and its row in `metrics.jsonl`."""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

from fedfrozen_app.core.formatting import quoted
from fedfrozen_app.exchange.count import Traffic
from fedfrozen_app.exchange.messages import Reply
from fedfrozen_app.exchange.names import PARAMETERS
from fedfrozen_app.files.rows import HEADLINES, Row
from fedfrozen_app.server.aggregate import RunningMean, Update
from fedfrozen_app.server.masked_result import MaskedResult
from fedfrozen_app.tasks.language import perplexity

log = logging.getLogger(__name__)
# Also kept per client: an average hides clients for which the model is bad.
PER_CLIENT = (
    *("client_val_before", "client_val_after"),
    *(f"{which}_{name}" for which in ("personal", "test") for name in HEADLINES),
)


@dataclass
class RoundClock:
    """Measures the duration of a round, and of the server's aggregation in it."""

    began: float = field(default_factory=time.perf_counter)
    aggregating: float = 0.0  # seconds

    @contextmanager
    def aggregation(self) -> Iterator[None]:
        """Count the block as aggregation."""
        started = time.perf_counter()
        yield
        self.aggregating += time.perf_counter() - started

    def seconds(self) -> dict[str, float]:
        training = time.perf_counter() - self.began - self.aggregating
        return {"train": training, "aggregate": self.aggregating}


@dataclass
class RoundRecord:
    number: int
    aggregator: RunningMean
    quorum: float = 0.0  # share of the cohort
    traffic: Traffic = field(default_factory=Traffic)
    failures: list[str] = field(default_factory=list)
    metrics: dict[str, dict[str, tuple[float, int]]] = field(default_factory=dict)  # by name, then by client
    weights: list[float] = field(default_factory=list)  # of the accepted replies, in the model's mean
    spent: dict[str, tuple[float, float]] = field(default_factory=dict)  # client: (ε, δ), with privacy on
    clock: RoundClock = field(default_factory=RoundClock)
    discarded: str | None = None  # why the round changed nothing, although replies were valid
    secure: Row | None = None  # of a masked round: its entry in the row
    effective: float | None = None  # 1 / Σ wᵢ², if the weights themselves are not known

    def expect(self, reply: Reply) -> None:
        """Announce a reply that will be taken unchanged, with its block, once the metrics are known."""
        with self.clock.aggregation():
            self.aggregator.expect(reply.arrays)

    def predict(self, cohort: int) -> Update | None:
        """The result of `finish` if all replies are valid, after all of the cohort's were announced."""
        with self.clock.aggregation():
            update = self.aggregator.predict(cohort)
        return update

    def note_spent(self, client: str, reply: Reply | str) -> None:
        """Record the client's privacy spent so far, whether its reply is accepted or not."""
        if isinstance(reply, Reply) and "epsilon" in reply.metrics:
            self.spent[client] = reply.metrics.pop("epsilon"), reply.metrics.pop("delta")

    def take(
        self, client: str, reply: Reply | str, weight: float | None = None, *, is_update: bool = False
    ) -> bool:
        """Add a reply, or record why it was set aside; returns whether it was added. `weight`: its weight in
        the means of arrays; None: its examples. `is_update`: its arrays are already an update."""
        with self.clock.aggregation():
            self.note_spent(client, reply)
            counts = 0.0 if isinstance(reply, str) else float(reply.examples) if weight is None else weight
            if isinstance(reply, str):
                refused: str | None = reply
            elif is_update:
                refused = self.aggregator.add_update(dict(reply.arrays), counts)
            else:
                refused = self.aggregator.add(reply.arrays, counts)
            if refused is not None:
                self._set_aside(client, refused)
            elif isinstance(reply, Reply):
                self.weights.append(self.aggregator.counts(PARAMETERS, counts, 1))
                for key, value in reply.metrics.items():
                    # A mean over tokens is weighted by the tokens that the client evaluated.
                    tokens = reply.metrics.get(f"{key.rpartition('_')[0]}_tokens")
                    weight = reply.examples if tokens is None else round(tokens)
                    known = self.metrics.setdefault(key, {})
                    # A client may have replied to this round and, late, to an earlier one.
                    known[client if client not in known else f"{client} (late)"] = (value, weight)
            if isinstance(reply, Reply):
                reply.arrays = {}  # the next reply arrives before this one is freed
        return refused is None

    def _set_aside(self, client: str, why: str) -> None:
        """Record the reason, escaped: it may quote the client, and appears in logs, rows and pages."""
        self.failures.append(f"Client {client} was set aside: it {quoted(why)}.")
        log.warning("Round %d: %s", self.number, self.failures[-1])

    def take_masked(self, masked: MaskedResult) -> None:
        """Take the result of a masked round: its sums, or why there are none."""
        with self.clock.aggregation():
            self.spent |= masked.spent
            for client, why in masked.failures.items():
                self._set_aside(client, why)
            self.secure = {"cohort": masked.roster, "seconds": dict(masked.seconds)}
            if masked.noise:
                self.secure["noise"] = dict(masked.noise)
            if masked.groups:
                self.secure["groups"] = list(masked.groups)
            self.discarded = masked.problem
            if (sums := masked.sums) is not None:
                self.aggregator.add_sums(sums)
                self.metrics = {name: {"": metric} for name, metric in sums.figures.items()}
                self.secure |= {"summed": sums.replies, "clipped": sums.clipped, "rounding": masked.error}
                if not sums.examples_squared:  # unknown: assume equal weights
                    self.effective = float(sums.replies)
                else:
                    unweighted = self.aggregator.counts(PARAMETERS, 0.0, 1)
                    self.effective = sums.replies if unweighted else sums.examples**2 / sums.examples_squared
                if sums.clipped:
                    log.warning(
                        "Round %d: %d values of updates were clipped: raise secure_aggregation.clip (or "
                        "state_clip), or lower client.lr.",
                        *(self.number, sums.clipped),
                    )

    def finish(self, cohort: int, population: int) -> Update:
        """The update from all replies; empty without a quorum of valid replies."""
        with self.clock.aggregation():
            update = Update()
            valid = cohort - len(self.failures)
            if self.discarded is not None:
                pass
            elif valid / max(cohort, 1) < self.quorum:  # 0.56 · 25 is more than 14 in floating point
                self.discarded = f"{valid} of {cohort} replies were sound, fewer than its quorum"
            elif (problem := self.aggregator.problem()) is not None:
                self.discarded = problem
            else:
                update = self.aggregator.finish()
                update.metrics = dict(self._means)
            if self.discarded:
                log.warning("Round %d: %s; the model stays as it was.", self.number, self.discarded)
            update.population = population
        return update

    @cached_property
    def _means(self) -> dict[str, float]:
        """Means over clients, weighted by examples or tokens; token counts are summed."""
        found = {key: _mean(clients.values()) for key, clients in self.metrics.items()}
        for key, clients in self.metrics.items():
            model, _, metric = key.rpartition("_")
            if metric == "tokens":
                found[key] = sum(value for value, _ in clients.values())
            elif metric == "perplexity" and f"{model}_loss" in found:  # of the mean loss
                found[key] = perplexity(found[f"{model}_loss"])
        return found

    def row(self, stage: str, cohort: Sequence[str], trained_params: int, drift: Row) -> Row:
        if cohort and len(self.failures) == len(cohort):
            log.warning("Round %d: no client gave a sound reply; the model stays as it was.", self.number)
        row: Row = {
            "round": self.number,
            "stage": stage,
            **self._means,
            "bytes_up": self.traffic.up,
            "bytes_down": self.traffic.down,
            "bytes_up_by_role": dict(self.traffic.up_by_role),
            "bytes_down_by_role": dict(self.traffic.down_by_role),
            "trained_params": trained_params,
            "clients": list(cohort),
            "clients_ok": len(cohort) - len(self.failures),
            "clients_failed": len(self.failures),
            "drift": drift,
        }
        if self.traffic.by_client is not None:  # removed again by the hook that needs it
            row["bytes_by_client"] = self.traffic.by_client
        if self.secure is not None:
            row["secure"] = self.secure
        by_client = {
            key: self.metrics[key] for key in PER_CLIENT if key in self.metrics and self.secure is None
        }
        if by_client:
            row["by_client"] = {
                key: {client: clients[client][0] for client in cohort if client in clients}
                for key, clients in by_client.items()
            }
        if self.effective is not None:
            row["effective_clients"] = self.effective
        if self.weights:  # the effective number of clients: 1 / Σ wᵢ²
            row["effective_clients"] = sum(self.weights) ** 2 / sum(n**2 for n in self.weights)
        if self.spent:
            row["epsilon"] = {client: epsilon for client, (epsilon, _) in self.spent.items()}
            row["delta"] = max(delta for _, delta in self.spent.values())
        if self.aggregator.gate and (median := self.aggregator.gate.median()) is not None:
            row["usual_norm"] = median
        if self.failures:
            row["failures"] = self.failures
        if self.discarded:
            row["discarded"] = self.discarded
        row["seconds"] = self.clock.seconds()
        return row


def _mean(weighted: Iterable[tuple[float, int]]) -> float:
    pairs = list(weighted)
    return sum(value * weight for value, weight in pairs) / max(sum(weight for _, weight in pairs), 1)
