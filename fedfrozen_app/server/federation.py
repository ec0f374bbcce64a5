"""The environment of a strategy: the run it is part of, its settings, and hooks after its rounds."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol, Self

from flwr.app import ArrayRecord
from torch import Tensor

from fedfrozen_app.adapters.rule import AdapterRule
from fedfrozen_app.config import (
    AggregationConfig,
    ClientConfig,
    SecureAggregationConfig,
    check_settings,
)
from fedfrozen_app.exchange.messages import Reply
from fedfrozen_app.exchange.role import KERNEL, Role
from fedfrozen_app.files.rows import Row
from fedfrozen_app.server.aggregate import RunningMean
from fedfrozen_app.server.connection import Connection
from fedfrozen_app.server.earlier_sums import EarlierSums
from fedfrozen_app.server.local_nodes import LocalNodes
from fedfrozen_app.server.optimizer import NoOptimizer, ServerOptimizer
from fedfrozen_app.server.robust import make_aggregator
from fedfrozen_app.server.sampling import (
    batches_of,
    draw_batches,
    draw_cohort,
    in_order,
    participations,
)

log = logging.getLogger(__name__)
Evaluate = Callable[[int, ArrayRecord], Mapping[str, Any] | None]  # how the server evaluates a model


class Hook(Protocol):
    """A callback after every round: writes, saves, shows or stops."""

    def after_round(self, strategy: Any, row: Row) -> tuple[bool, Row]:
        """Return whether to stop, and what to add to the round's row; `strategy` is the round's strategy."""


@dataclass(frozen=True)
class Settings:
    """A strategy's own settings; empty for those that have none."""

    def checked(self, num_rounds: int) -> Self:
        """These settings with defaults filled in, or a `UserError`."""
        check_settings(self, "strategy.")
        return self

    @classmethod
    def kept_by(cls, had: Mapping[str, Any], last: Row) -> dict[str, Any]:
        """Defaults that must keep their values when a run is resumed with more rounds after row `last`."""
        return {}


@dataclass
class Federation:
    """What a strategy needs to know about its run."""

    connection: Connection
    participation: float = 1.0
    seed: int = 0
    aggregation: AggregationConfig = field(default_factory=AggregationConfig)
    # Called with round, client, reply and model before the reply enters the sum.
    on_upload: Callable[[int, str, Reply, Mapping[str, Tensor]], None] | None = None
    private: bool = False  # clients add noise, and must know in how many rounds they take part
    optimizer: ServerOptimizer = field(default_factory=NoOptimizer)
    client: ClientConfig = field(default_factory=ClientConfig)  # how clients train
    secure: SecureAggregationConfig = field(default_factory=SecureAggregationConfig)
    rule: AdapterRule = field(default_factory=AdapterRule)  # how clients' adapters are merged
    exchanged: Collection[str] | None = None  # the names that a strategy may use; None: all
    sums: EarlierSums = field(default_factory=EarlierSums)  # masked sums proposed to sites

    @cached_property
    def roles(self) -> Mapping[str, Role]:
        """The roles of the exchanged parameters, without those that each side loads for itself."""
        roles, known = self.connection.roles, self.exchanged
        return roles if known is None else {name: role for name, role in roles.items() if name in known}

    def cohort(self, names: Iterable[str], server_round: int) -> list[str]:
        if not self.in_batches:
            return draw_cohort(names, self.participation, self.seed, server_round)
        present = list(names)
        whole = [batch for batch in self.batches(present) if set(batch) <= set(present)]
        return draw_batches(whole, self.participation, self.seed, server_round)

    def population(self, present: Iterable[str]) -> Iterable[str]:
        """All registered sites, connected or not, so that a resumed run asks the same of each; or all present
        simulated nodes."""
        membership = self.connection.membership
        registered = {*membership.sites.values()} - membership.excluded
        return in_order(tuple(registered)) if registered else present

    def without_spoilers(self, cohort: list[str]) -> list[str]:
        """The cohort of a masked round. Sites that agreed to a sum over a client agree to no sum that
        isolates it, so the same sites are asked again. With noise, clients that made a round fail
        are left out."""
        if not self.private and self.sums.path is not None:
            return cohort
        if gone := [client for client in cohort if client in self.sums.spoilers]:
            log.warning("The round continues without %s, which spoilt an earlier one.", ", ".join(gone))
        return [client for client in cohort if client not in self.sums.spoilers]

    @property
    def in_batches(self) -> bool:
        """Whether a round's cohort consists of whole batches."""
        if self.aggregation.cohorts != "auto":
            return self.aggregation.cohorts == "batches"
        masked = self.secure.name == "on" and self.secure.choices == "union"
        return masked and not self.private and self.sums.path is not None

    def batches(self, present: Iterable[str]) -> list[list[str]]:
        """Batches of all registered sites: connections must not change them."""
        return batches_of(self.population(present), self.secure.min_cohort)

    def participations(self, names: Iterable[str], num_rounds: int) -> dict[str, int]:
        """The (maximum) number of rounds in which each client takes part, if clients must know it."""
        if not self.private:
            return {}
        pacing = self.connection.pacing
        if pacing is not None and pacing.live:
            names = self.population(names)
        if pacing is not None and (most := pacing.pacer.most_requests(num_rounds)) is not None:
            return dict.fromkeys(in_order(tuple(names)), most)
        clients = names.names if isinstance(names, LocalNodes) else tuple(names)
        return participations(clients, self.participation, self.seed, num_rounds)

    def aggregator(
        self, model: Mapping[str, Tensor], median_norm: float | None, zero_fill: bool, equal: Collection[str]
    ) -> RunningMean:
        """The aggregator of a round's replies."""
        group = partial(self.drift_group, model)
        return make_aggregator(self.aggregation, model, group, median_norm, zero_fill=zero_fill, equal=equal)

    def show_upload(
        self, server_round: int, client: str, reply: Reply | str, model: Mapping[str, Tensor]
    ) -> None:
        """Call `on_upload` with a reply before it enters the sum."""
        if self.on_upload is not None and isinstance(reply, Reply):
            reply.arrays = {n: v.clone() for n, v in reply.arrays.items()}  # a block's rows change together
            self.on_upload(server_round, client, reply, model)

    def drift_group(self, model: Mapping[str, Tensor], name: str) -> str | None:
        """The part of the model to which this array's drift belongs; None leaves it out."""
        role = self.roles[name]
        if role.kind == "key" and model[name].ndim == 1:
            return None  # softmax ignores key biases: their movement is rounding noise
        return "kernel" if role.kind in KERNEL else "rest"
