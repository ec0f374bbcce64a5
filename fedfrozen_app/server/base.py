"""The round that every strategy shares. A strategy says how the plan changes; nothing else."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from fedfrozen_app.digests import digests
from fedfrozen_app.exchange.arrays import to_record, to_tensors
from fedfrozen_app.exchange.codec import plain_sizes
from fedfrozen_app.exchange.count import count_parameters
from fedfrozen_app.exchange.messages import Reply
from fedfrozen_app.exchange.order import Order, Told
from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.files.rows import Row
from fedfrozen_app.server.conversation import Conversation
from fedfrozen_app.server.draw import draw_cohort, participations
from fedfrozen_app.server.federation import Evaluate, Federation, Hook, Settings
from fedfrozen_app.server.record import RoundRecord
from fedfrozen_app.server.robust import make_aggregator

if TYPE_CHECKING:
    from fedfrozen_app.models.wrapper import Wrapper


def _not_used(self: Any, *args: Any, **kwargs: Any) -> Any:
    raise TypeError("a planned strategy runs its rounds in start(), not through Flower's own loop")


class PlannedFedAvg(Strategy):
    """FedAvg with a named plan per round in place of "everything, always".

    Flower's own loop keeps only what the last replies held and collects all of them in a list, so `start`
    is ours: it holds the full model, merges by name, and folds replies in one by one.
    """

    configure_train = aggregate_train = configure_evaluate = aggregate_evaluate = summary = _not_used

    Settings = Settings
    algorithm = "fedavg"  # the file in clients/ that says how a client trains
    undecided = ""  # a sentence for `fedfrozen plan`, where plans depend on what training finds out
    codec: tuple[str, Any] | None = None  # how uploads are encoded: the name of a codec and its setting
    zero_fill = False  # whether a client that did not send a name counts as one that did not change it

    def __init__(
        self,
        federation: Federation,
        settings: Any = None,
        hooks: Sequence[Hook] = (),
        first_round: int = 1,
        history: Sequence[Row] = (),
    ) -> None:
        """`history` holds the rows of the rounds before `first_round`, where a run goes on."""
        self.federation = federation
        self.settings: Any = settings if settings is not None else self.Settings()
        self.hooks = hooks
        self.first_round = first_round
        self.history = history
        self.num_rounds = 0
        self.model: dict[str, Tensor] = {}
        self.digests: dict[str, str] = {}
        self.usual_norm: float | None = None  # the last round's median; a checkpoint's row knows it

    # What a strategy may say differently ------------------------------------------------------------

    def plan(self, server_round: int) -> Plan:
        """What trains, travels and stays private in this round: everything trains and travels."""
        return Plan.full(self.model)

    def stage(self, server_round: int) -> str:
        return "train"

    @classmethod
    def algorithm_for(cls, settings: Any) -> str:
        """The client's algorithm under these settings; a site holds an order against it."""
        return cls.algorithm

    @classmethod
    def wrapper(cls, settings: Any) -> "Wrapper | None":
        """What this strategy reads the model through; None: it trains the model as it is."""
        return None

    def client_settings(self) -> dict[str, Any]:
        """What the client's algorithm needs to know beside the plan."""
        return {}

    def observe(self, row: Row, merged: Mapping[str, Tensor]) -> Row:
        """What a round teaches, before its merged values enter `self.model`; what to add to its row."""
        return {}

    def recall(self, row: Row) -> None:
        """Learn again from the row of a round before this run went on from a checkpoint."""

    def state(self) -> dict[str, Tensor]:
        """Arrays beside the model that a checkpoint must keep."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take them back; empty where the checkpoint is another strategy's."""

    def choice(self, server_round: int) -> Told | None:
        """The rule by which each client takes its own layers of the plan; None: all train the whole plan."""
        return None

    def client_plan(self, server_round: int) -> Plan:
        """What one client trains and sends; where clients choose, a plan of the size that all have."""
        return self.plan(server_round)

    def on_reply(self, client: str, names: Sequence[str]) -> None:
        """A client's reply was taken, and these are the names it sent."""

    def upload_bytes(self, server_round: int) -> dict[str, int]:
        """By role, the bytes of the arrays that one client sends; the model may be on the meta device."""
        order = self.order(server_round, {})
        names, roles = self.client_plan(server_round).shared, self.federation.roles
        sizes = plain_sizes if order.coder is None else order.coder.sizes
        found = Counter(sizes(names, self.model, roles))
        for _ in order.method.goes:  # an array beside each parameter is as large
            found.update(plain_sizes(names, self.model, roles))
        return dict(found)

    @property
    def personal(self) -> bool:
        """Whether clients have models of their own, which must then be judged one by one."""
        return bool(self.plan(max(self.num_rounds, 1)).private)

    # The round ---------------------------------------------------------------------------------------

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:
        """Run the rounds; `Result.arrays` is the full model. The two configurations are not used."""
        self.model = to_tensors(initial_arrays)
        del initial_arrays  # or the first model would stay in memory to the end
        self.digests = digests(self.model)
        conversation = self.federation.conversation
        conversation.grid, conversation.timeout = grid, timeout
        self.num_rounds = num_rounds
        result = Result()
        for earlier in self.history:
            self.recall(earlier)
        if self.first_round == 1:
            self._close_round({"round": 0, "stage": "initial"}, time.perf_counter(), evaluate_fn)
        for server_round in range(self.first_round, num_rounds + 1):
            began = time.perf_counter()
            row = self._train_round(server_round, conversation)
            if self._close_round(row, began, evaluate_fn):
                break
        result.arrays = to_record(self.model, local=True)
        return result

    def order(self, server_round: int, drawn: Mapping[str, int]) -> Order:
        """What clients are told; `drawn`: in how many rounds each takes part, where they must know that."""
        plan = self.plan(server_round)
        private = set(plan.private)
        return Order(
            round=server_round,
            plan=plan,
            base={name: value for name, value in self.digests.items() if name not in private},
            algorithm=self.algorithm_for(self.settings),
            settings=self.client_settings(),
            choice=self.choice(server_round),
            codec=self.codec,
            participations=drawn,
        )

    def _train_round(self, server_round: int, conversation: Conversation) -> Row:
        nodes = conversation.greet()
        drawing = (self.federation.participation, self.federation.seed)
        drawn = participations(tuple(nodes), *drawing, self.num_rounds) if self.federation.private else {}
        order = self.order(server_round, drawn)
        trained = count_parameters(self.model, self.client_plan(server_round).trained)
        cohort = draw_cohort(nodes, *drawing, server_round)
        how = self.federation.aggregation
        group = partial(self.federation.drift_group, self.model)
        mean = make_aggregator(how, self.model, group, self.usual_norm, zero_fill=self.zero_fill)
        record = RoundRecord(server_round, mean, how.quorum, began=time.perf_counter())  # the plan is made
        members = [(client, nodes[client]) for client in cohort]
        for client, reply in conversation.round(order, members, self.model, record.traffic):
            names = tuple(reply.arrays) if isinstance(reply, Reply) else ()
            if self.federation.watch is not None and isinstance(reply, Reply):
                reply.arrays = {n: v.clone() for n, v in reply.arrays.items()}  # a block's rows change as one
                self.federation.watch(server_round, client, reply, self.model)
            if record.take(client, reply):
                self.on_reply(client, names)
        folding = time.perf_counter()
        merged, drift = record.finish(len(cohort))
        record.aggregating += time.perf_counter() - folding
        row = record.row(self.stage(server_round), cohort, trained, drift)
        self.usual_norm = row.get("usual_norm")
        folding = time.perf_counter()
        row |= self.observe(row, merged)
        self.model.update(merged)
        self.digests.update(digests(merged))
        row["seconds"]["aggregate"] += time.perf_counter() - folding
        return row

    def _close_round(self, row: Row, began: float, evaluate_fn: Evaluate | None) -> bool:
        """Evaluate, then let the hooks write, save and show the round; whether one of them says stop."""
        seconds = row.setdefault("seconds", {})
        evaluating = time.perf_counter()
        # Where clients keep personal models they have judged those themselves.
        if evaluate_fn is not None and "test_loss" not in row:
            row.update(evaluate_fn(row["round"], to_record(self.model, local=True)) or {})
        seconds["evaluate"] = time.perf_counter() - evaluating
        seconds["total"] = time.perf_counter() - began
        stops = []
        for hook in self.hooks:
            stop, more = hook.after_round(self, row)
            row.update(more)
            stops.append(stop)
        return any(stops)
