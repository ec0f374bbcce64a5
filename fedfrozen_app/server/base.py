"""The round that every strategy shares. A strategy says how the plan changes; nothing else."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from torch import Tensor

from fedfrozen_app.config import ClientConfig, Config
from fedfrozen_app.digests import bytes_on_their_way, digests_begun
from fedfrozen_app.exchange.arrays import to_record, to_tensors
from fedfrozen_app.exchange.check import problem_of_names
from fedfrozen_app.exchange.codec import plain_sizes
from fedfrozen_app.exchange.count import Traffic, count_parameters
from fedfrozen_app.exchange.messages import Reply
from fedfrozen_app.exchange.names import PARAMETERS, is_parameter
from fedfrozen_app.exchange.order import Masking, NamedSettings, Order
from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.files.rows import Row
from fedfrozen_app.models.roles import Role
from fedfrozen_app.secure.sum_up import new_session
from fedfrozen_app.server.adapter_rule import AdapterRule
from fedfrozen_app.server.aggregate import Update
from fedfrozen_app.server.carried import Carried, add_to, follow
from fedfrozen_app.server.conversation import Conversation
from fedfrozen_app.server.equal_layers import grouped_round
from fedfrozen_app.server.federation import Evaluate, Federation, Hook, Settings
from fedfrozen_app.server.loop import OwnLoop, close_round
from fedfrozen_app.server.masked import Cohort, MaskedRound, Members
from fedfrozen_app.server.record import RoundRecord
from fedfrozen_app.words import told

log = logging.getLogger(__name__)
# What clients tell of a round, whichever the method: see `Resident` and `train_client`.
FIGURES = (
    *("train_loss", "client_val_before", "client_val_after", "client_seconds"),
    *(f"{which}_{figure}" for which in ("personal", "test") for figure in ("loss", "accuracy", "f1")),
)

if TYPE_CHECKING:
    from fedfrozen_app.models.wrapper import Wrapper


class PlannedFedAvg(OwnLoop):
    """FedAvg with a named plan per round in place of "everything, always".

    It holds the full model, folds replies in one by one, and merges by name.
    """

    Settings = Settings
    paper: ClassVar[str] = (
        ""  # whose method it is, for `fedfrozen methods`; the class's first line says what it does
    )
    algorithm = "fedavg"  # the file in clients/ that says how a client trains
    undecided = ""  # a sentence for `fedfrozen plan`, where plans depend on what training finds out
    zero_fill = False  # whether a client that did not send a name counts as one that did not change it
    # Namespaces whose means count every reply alike, not by its examples; PARAMETERS: those of the model too.
    equal: tuple[str, ...] = ()
    keeps_replies = False  # whether `keep_reply` is to be given what each client sent
    # Why it must see replies one by one, as a verb ("ranks"); empty: their sum is enough, masked or not.
    one_by_one: ClassVar[str] = ""
    tells: tuple[str, ...] = ()  # what `observe` adds to a row: no client may send a figure of that name
    # Of what it tells, a chart each on a run's page: figure (`name.part`), its title, and the line's label.
    curves: ClassVar[tuple[tuple[str, str, str], ...]] = ()

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
        self._digests: dict[str, str] = {}
        self._merged: Callable[[], dict[str, str]] = dict  # the digests of what changed last, once waited for
        self._all_sound = True  # the last round's replies
        self.usual_norm: float | None = None  # the last round's median; a checkpoint's row knows it
        self.optimizer = federation.optimizer
        self.carried: Carried = {}  # arrays beside parameters that go with every order, by namespace

    # What a strategy may say differently ------------------------------------------------------------

    def plan(self, server_round: int) -> Plan:
        """What trains, travels and stays private in this round: everything trains and travels."""
        names = list(filter(is_parameter, self.model))
        frozen = self.federation.rule.frozen(names)
        return Plan.full(names).freeze(frozen) if frozen else Plan.full(names)

    def stage(self, server_round: int) -> str:
        return "train"

    @classmethod
    def check(cls, settings: Any, config: Config) -> None:
        """Refuse, by a `UserError`, a configuration under which this strategy would be silently wrong."""

    @classmethod
    def algorithm_for(cls, settings: Any) -> str:
        """The client's algorithm under these settings; a site holds an order against it."""
        return cls.algorithm

    @classmethod
    def wrapper(cls, settings: Any) -> "Wrapper | None":
        """What this strategy reads the model through; None: it trains the model as it is."""
        return None

    @classmethod
    def client_settings(cls, settings: Any, client: ClientConfig) -> dict[str, Any]:
        """What the client's algorithm needs to know beside the plan; a site holds an order against it."""
        return {}

    @classmethod
    def choice_for(cls, settings: Any, roles: Mapping[str, Role]) -> NamedSettings | None:
        """The rule by which each client takes its own layers of the plan; None: all train the whole plan.
        A site holds an order against it, and against `codec_for`."""
        return None

    @classmethod
    def codec_for(cls, settings: Any) -> tuple[str, Any] | None:
        """How uploads are encoded: the name of a codec and its setting."""
        return None

    def step(self, update: Update) -> dict[str, Tensor]:
        """The next values of the names in `update.model`, whose memory it may reuse.

        It may also replace arrays in `self.carried`, but change neither those nor `self.model` in place:
        clients may hold the same arrays.
        """
        if self.optimizer.adds_only and update.values is not None:
            return update.values
        return self.optimizer.step(self.model, update.model)

    def observe(self, row: Row, merged: Mapping[str, Tensor]) -> Row:
        """Learn from a round before its merged values enter `self.model`; returns what to add to its row."""
        return {}

    def figures(self) -> tuple[str, ...]:
        """Names of figures that this method's clients send, beside those that every client does: a masked
        sum has a place for each. An algorithm's own are in its `tells`."""
        return ()

    @classmethod
    def sums_up(cls, rows: Sequence[Row]) -> dict[str, Any]:
        """What to add to a run's summary, out of its rows."""
        return {}

    def recall(self, row: Row) -> None:
        """Learn again from the row of an earlier round, when a run goes on from a checkpoint."""

    def state(self) -> dict[str, Tensor]:
        """Arrays beside the model that a checkpoint must keep."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore them; empty where the checkpoint is another strategy's."""

    def client_plan(self, server_round: int) -> Plan:
        """What one client trains and sends; where clients choose, a plan of the size that all have."""
        return self.plan(server_round)

    def afterwards(self, server_round: int) -> Plan:
        """What a client trains for itself when the federation is over, which judging tries; by default what
        it would in one more round, `server_round`."""
        return self.plan(server_round)

    def judged(self, figures: Mapping[str, float]) -> Mapping[str, float]:
        """A client's figures by the end: `global`, `personal` and `after`, the personal model after what
        `afterwards` says. Here a method may say what its personal model is."""
        return figures

    def on_reply(self, client: str, names: Sequence[str]) -> None:
        """A client's reply was taken, and these are the names it sent."""

    def keep_reply(self, client: str, sent: Mapping[str, Tensor]) -> None:
        """The parameters of a reply that was taken: copies, free to be kept."""

    def given_names(self, client: str, seen: Collection[str]) -> Sequence[str]:
        """Private names that clients do not train and whose values this client is given by the server, once
        the clients `seen` have taken part."""
        return ()

    def given(self, client: str) -> dict[str, Tensor]:
        """Those values: they go to this client alone, which keeps them until it is given others."""
        return {}

    def upload_bytes(self, server_round: int) -> dict[str, int]:
        """By role, the bytes of the arrays that one client sends; the model may be on the meta device."""
        order = self.order(server_round, {})
        names, roles = self.client_plan(server_round).shared, self.federation.roles
        sizes = plain_sizes if order.coder is None else order.coder.sizes
        found = Counter(sizes(names, self.model, roles))
        for _ in order.method.goes:  # an array beside each parameter is as large
            found.update(plain_sizes(names, self.model, roles))
        return dict(found)

    def clients_keep(self, server_round: int) -> bool:
        """Whether clients hold something between their rounds that nobody else has."""
        order = self.order(server_round, {})
        return bool(order.plan.private or order.method.stays)

    @property
    def personal(self) -> bool:
        """Whether clients have models of their own, which must then be judged one by one."""
        order = self.order(max(self.num_rounds, 1), {})
        return order.is_personal

    @property
    def shares_model(self) -> bool:
        """Whether what is shared is a whole model, which the server can judge by itself."""
        return not self.plan(max(self.num_rounds, 1)).private

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
        self._merged = digests_begun(self.model)
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

    @property
    def digests(self) -> dict[str, str]:
        """Those of the model, by name: begun as soon as it is there, and waited for when somebody asks."""
        self._digests |= self._merged()
        self._merged = dict
        return self._digests

    def order(self, server_round: int, drawn: Mapping[str, int]) -> Order:
        """What clients are told; `drawn`: in how many rounds each takes part, where they must know that."""
        plan = self.plan(server_round)
        private = set(plan.private)
        return Order(
            round=server_round,
            plan=plan,
            base={name: value for name, value in self.digests.items() if name not in private},
            algorithm=self.algorithm_for(self.settings),
            settings=self.client_settings(self.settings, self.federation.client),
            choice=self.choice_for(self.settings, self.federation.roles),
            codec=self.codec_for(self.settings),
            participations=drawn,
        )

    def masked(self, order: Order) -> Order:
        """The same order for clients who mask what they send, for one attempt at its round."""
        settings = {key: value for key, value in asdict(self.federation.secure).items() if key != "name"}
        named = dict.fromkeys((*FIGURES, *order.method.tells, *self.figures()))
        return replace(order, masking=Masking(new_session(), settings, tuple(named), tuple(self.equal)))

    def _train_round(self, server_round: int, conversation: Conversation) -> Row:
        nodes = conversation.present()
        cohort = self.federation.cohort(nodes, server_round)
        members = [(client, nodes[client]) for client in cohort]
        order = self.order(server_round, self.federation.participations(nodes, self.num_rounds))
        trained = count_parameters(self.model, self.client_plan(server_round).trained)
        self.optimizer.follow(set(order.plan.shared))
        self.carried = follow(self.carried, order, self.model)
        order, arrays = add_to(order, self.model, self.carried)
        aggregator = self.federation.aggregator(self.model, self.usual_norm, self.zero_fill, self.equal)
        quorum = self.federation.aggregation.quorum
        record = RoundRecord(server_round, aggregator, quorum, began=time.perf_counter())  # the plan is made
        if self.federation.secure.name == "on":
            masked = self._masked_round(order, members, arrays, record.traffic)
            masked.run()
            record.take_masked(masked)
            for client, its_names in masked.known.items():
                self.on_reply(client, its_names)
            members = []
        rule = self.federation.rule
        rule.begin()
        given = {client: self.given(client) | rule.narrowed(client, self.model) for client in cohort}
        # Where nobody looks at what a client sent, a block may become updates before its figures are known.
        unseen = not (self.keeps_replies or rule.one_by_one or rule.ranks or self.federation.on_upload)
        # Who observes a round may change what it sees: what is done with that before is done afterwards then.
        observes = type(self).observe is not PlannedFedAvg.observe

        def expect(reply: Reply) -> None:
            record.expect(reply)
            may_merge = not observes and self._merges_early and conversation.looks_ahead
            if may_merge and (likely := record.foresee(len(cohort))) is not None:
                likely.merged = self._merge(likely)
                self._foretell(order, likely.merged)

        meanwhile = expect if unseen else None
        talk = conversation.round(order, members, arrays, record.traffic, given, meanwhile=meanwhile)
        for client, reply in talk:
            if not isinstance(reply, str) and (own := problem_of_names(reply, self.tells)):
                reply = own
            if not isinstance(reply, str) and client in rule.ranks:
                reply.arrays = rule.widened(client, reply.arrays, self.model)
            self.federation.show_upload(server_round, client, reply, self.model)
            names = [] if isinstance(reply, str) else list(filter(is_parameter, reply.arrays))
            sent: dict[str, Tensor] = {}
            weight = 0.0
            if (self.keeps_replies or rule.one_by_one) and not isinstance(reply, str):
                weight = aggregator.counts(PARAMETERS, reply.examples, 1)
                # What is taken becomes an update in place, and a block's rows all at once.
                reply.arrays = {name: value.clone() for name, value in reply.arrays.items()}
                sent = {name: reply.arrays[name].clone() for name in names}
            if record.take(client, reply):
                self.on_reply(client, names)
                if self.keeps_replies:
                    self.keep_reply(client, sent)
                if rule.one_by_one:
                    rule.take(client, sent, weight)
        update = record.finish(len(cohort), len(nodes))
        stepping = time.perf_counter()
        merged = self._merge(update) if update.merged is None else update.merged
        if not observes and update.merged is None:
            stepping += self._foretell(order, merged)
        self._all_sound = not record.failures
        # One wait for both.
        coming = None if observes else bytes_on_their_way(merged)
        drift = update.drift
        record.aggregating += time.perf_counter() - stepping
        row = record.row(self.stage(server_round), cohort, trained, drift)
        self.usual_norm = row.get("usual_norm")
        closing = time.perf_counter()
        row |= self.observe(row, merged)
        if observes:
            closing += self._foretell(order, merged)
        begun = digests_begun(merged, coming)
        self.model.update(merged)
        moved: dict[str, Tensor] = {}
        if update.replies:
            for name, value in rule.close(server_round, self.model).items():
                if value is None:
                    del self.model[name], self.digests[name]
                else:
                    self.model[name] = moved[name] = value
        more = digests_begun(moved)
        self._merged = lambda: begun() | more()
        row["seconds"]["aggregate"] += time.perf_counter() - closing
        return row

    @property
    def _merges_early(self) -> bool:
        """Whether a round's step may be taken before its replies are known to be sound: it leaves no trace,
        and those of the last round were."""
        plain = type(self).step is PlannedFedAvg.step and self.optimizer.adds_only
        return plain and self._all_sound

    def _merge(self, update: Update) -> dict[str, Tensor]:
        """The next values of all that a round changes."""
        # Where nothing came in, nothing is to happen: an optimiser would go on by what it remembers.
        stepped = self.step(update) if update.replies else {}
        return {name: value.to(self.model[name]) for name, value in stepped.items()}  # device and dtype

    def _foretell(self, last: Order, merged: Mapping[str, Tensor]) -> float:
        """Say what the next round will probably be, as soon as its model is there: a device that waits for
        nothing else can begin. Returns the seconds that took, which are no part of this round's own work."""
        began = time.perf_counter()
        federation, conversation = self.federation, self.federation.conversation
        moves = type(federation.rule).close is not AdapterRule.close  # the model is then not yet what it is
        if not conversation.looks_ahead or moves or federation.secure.name == "on":
            return 0.0
        if last.round < self.num_rounds:
            try:
                order = self.order(last.round + 1, last.participations)
                known = {name: digest for name, digest in order.base.items() if name not in merged}
                conversation.foretell(replace(order, base=known), {**self.model, **merged})
            except Exception as error:  # noqa: BLE001  (one that lasts is met again when the round begins)
                log.info("Round %d could not be begun ahead: %s", last.round + 1, told(error))
        return time.perf_counter() - began

    def _masked_round(
        self, order: Order, members: Members, arrays: Mapping[str, Tensor], traffic: Traffic
    ) -> MaskedRound:
        """With one cohort; or with one for each choice of layers, which clients then tell first."""
        conversation, secure = self.federation.conversation, self.federation.secure
        if order.choice is not None and secure.choices == "groups":
            limits = secure.min_cohort, secure.step_timeout
            return grouped_round(conversation, order, self.masked, members, arrays, traffic, *limits)
        cohort = Cohort(self.masked(order), members, arrays)
        return MaskedRound(conversation, [cohort], arrays, traffic, secure.step_timeout)

    def _close_round(self, row: Row, began: float, evaluate_fn: Evaluate | None) -> bool:
        return close_round(self, row, began, evaluate_fn)
