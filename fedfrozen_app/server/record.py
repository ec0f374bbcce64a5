"""What a round gathers while its replies come in, and the row it becomes in `metrics.jsonl`."""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fedfrozen_app.exchange.count import Traffic
from fedfrozen_app.exchange.messages import Reply
from fedfrozen_app.exchange.names import PARAMETERS
from fedfrozen_app.files.rows import Row
from fedfrozen_app.models.task import perplexity
from fedfrozen_app.server.aggregate import RunningMean, Update
from fedfrozen_app.server.masked import MaskedRound

log = logging.getLogger(__name__)
# Kept client by client as well: an average hides the client that a model serves badly.
PER_CLIENT = (
    *("client_val_before", "client_val_after", "personal_accuracy", "personal_f1"),
    *("test_accuracy", "test_f1"),
)


@dataclass
class RoundRecord:
    number: int
    aggregator: RunningMean
    quorum: float = 0.0  # share of the cohort
    traffic: Traffic = field(default_factory=Traffic)
    failures: list[str] = field(default_factory=list)
    metrics: dict[str, dict[str, tuple[float, int]]] = field(default_factory=dict)  # by name, then by client
    weights: list[float] = field(default_factory=list)  # of the replies taken, in the model's mean
    spent: dict[str, tuple[float, float]] = field(default_factory=dict)  # client: (ε, δ), with privacy on
    began: float = field(default_factory=time.perf_counter)
    aggregating: float = 0.0  # seconds
    discarded: str | None = None  # why the round changed nothing, although replies were sound
    secure: Row | None = None  # of a masked round: what there is to say of its masks
    effective: float | None = None  # 1 / Σ wᵢ², where the weights themselves are not known

    def expect(self, reply: Reply) -> None:
        """It will be taken as it is, and those of its block with it, once their figures are known."""
        folding = time.perf_counter()
        self.aggregator.expect(reply.arrays)
        self.aggregating += time.perf_counter() - folding

    def foresee(self, cohort: int) -> Update | None:
        """What `finish` will give if all replies are sound, once those of the whole cohort are expected."""
        folding = time.perf_counter()
        update = self.aggregator.foresee(cohort)
        self.aggregating += time.perf_counter() - folding
        return update

    def take(self, client: str, reply: Reply | str) -> bool:
        """Fold a reply in, or note why it was set aside; whether it was taken."""
        folding = time.perf_counter()
        if isinstance(reply, Reply) and "epsilon" in reply.metrics:  # it has left the client, taken or not
            self.spent[client] = reply.metrics.pop("epsilon"), reply.metrics.pop("delta")
        refused = (
            reply if isinstance(reply, str) else self.aggregator.add(reply.arrays, float(reply.examples))
        )
        if refused is not None:
            self.failures.append(f"Client {client} was set aside: it {refused}.")
            log.warning("Round %d: %s", self.number, self.failures[-1])
        elif isinstance(reply, Reply):
            self.weights.append(self.aggregator.counts(PARAMETERS, reply.examples, 1))
            for key, value in reply.metrics.items():
                # A mean over tokens counts by the tokens that the client judged.
                tokens = reply.metrics.get(f"{key.rpartition('_')[0]}_tokens")
                weight = reply.examples if tokens is None else round(tokens)
                self.metrics.setdefault(key, {})[client] = (value, weight)
        if isinstance(reply, Reply):
            reply.arrays = {}  # the next reply comes before this one is forgotten
        self.aggregating += time.perf_counter() - folding
        return refused is None

    def take_masked(self, masked: MaskedRound) -> None:
        """What a masked round has left: its sums, or why there are none."""
        folding = time.perf_counter()
        self.spent |= masked.spent
        for client, why in masked.failures.items():
            self.failures.append(f"Client {client} was set aside: it {why}.")
            log.warning("Round %d: %s", self.number, self.failures[-1])
        self.secure = {"cohort": masked.roster, "seconds": masked.seconds}
        if masked.apart:
            self.secure["groups"] = masked.groups
        self.discarded = masked.problem
        if (sums := masked.sums) is not None:
            self.aggregator.add_sums(sums)
            self.metrics = {name: {"": figure} for name, figure in sums.figures.items()}
            self.secure |= {"summed": sums.replies, "clipped": sums.clipped, "rounding": masked.error}
            if not sums.examples_squared:  # not told: as if all had the same
                self.effective = float(sums.replies)
            else:
                alike = self.aggregator.counts(PARAMETERS, 0.0, 1)
                self.effective = sums.replies if alike else sums.examples**2 / sums.examples_squared
            if sums.clipped:
                log.warning(
                    "Round %d: %d values of updates were clipped: raise secure_aggregation.clip (or "
                    "state_clip), or lower client.lr.",
                    *(self.number, sums.clipped),
                )
        self.aggregating += time.perf_counter() - folding

    def finish(self, cohort: int, population: int) -> Update:
        """What the replies amount to; nothing where fewer were sound than the round must have."""
        folding = time.perf_counter()
        update = Update()
        sound = cohort - len(self.failures)
        if self.discarded is not None:
            pass
        elif sound / max(cohort, 1) < self.quorum:  # 0.56 · 25 is more than 14 in floating point
            self.discarded = f"{sound} of {cohort} replies were sound, fewer than its quorum"
        elif (problem := self.aggregator.problem()) is not None:
            self.discarded = problem
        else:
            update = self.aggregator.finish()
            update.figures = dict(self._means)
        if self.discarded:
            log.warning("Round %d: %s; the model stays as it was.", self.number, self.discarded)
        update.population = population
        self.aggregating += time.perf_counter() - folding
        return update

    @cached_property
    def _means(self) -> dict[str, float]:
        """Over the clients, once all are in: by examples, or by tokens; of counts of tokens the sum."""
        found = {key: _mean(clients.values()) for key, clients in self.metrics.items()}
        for key, clients in self.metrics.items():
            whose, _, figure = key.rpartition("_")
            if figure == "tokens":
                found[key] = sum(value for value, _ in clients.values())
            elif figure == "perplexity" and f"{whose}_loss" in found:  # of the mean, not the mean of them
                found[key] = perplexity(found[f"{whose}_loss"])
        return found

    def row(self, stage: str, cohort: Sequence[str], trained_params: int, drift: Row) -> Row:
        if len(self.failures) == len(cohort):
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
        if self.weights:  # how many equal clients these weights amount to: 1 / Σ wᵢ²
            row["effective_clients"] = sum(self.weights) ** 2 / sum(n**2 for n in self.weights)
        if self.spent:
            row["epsilon"] = {client: epsilon for client, (epsilon, _) in self.spent.items()}
            row["delta"] = max(delta for _, delta in self.spent.values())
        if self.aggregator.gate and (usual := self.aggregator.gate.usual()) is not None:
            row["usual_norm"] = usual
        if self.failures:
            row["failures"] = self.failures
        if self.discarded:
            row["discarded"] = self.discarded
        training = time.perf_counter() - self.began - self.aggregating
        row["seconds"] = {"train": training, "aggregate": self.aggregating}
        return row


def _mean(weighted: Iterable[tuple[float, int]]) -> float:
    pairs = list(weighted)
    return sum(value * weight for value, weight in pairs) / max(sum(weight for _, weight in pairs), 1)
