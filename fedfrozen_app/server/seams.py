"""What a strategy may override, with FedAvg's defaults, and what its methods can read.

A round (train_round.py) calls these methods and never names a strategy.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from fedfrozen_app.config import ClientConfig, Config
from fedfrozen_app.config.codec_checks import codec_of
from fedfrozen_app.core.deprecated import Alias, adopt_old_names
from fedfrozen_app.core.own_objects import name_of
from fedfrozen_app.exchange.codec import plain_sizes
from fedfrozen_app.exchange.names import is_parameter
from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.exchange.role import Role
from fedfrozen_app.exchange.train_request import NamedSettings, TrainRequest
from fedfrozen_app.files.rows import Row
from fedfrozen_app.server.aggregate import Update
from fedfrozen_app.server.federation import Federation, Hook, Settings
from fedfrozen_app.server.loop import OwnLoop
from fedfrozen_app.server.masked_request import masked_bytes, masked_request
from fedfrozen_app.server.model_digests import ModelDigests
from fedfrozen_app.server.server_state import ServerState

if TYPE_CHECKING:
    from fedfrozen_app.models.wrapper import Wrapper


class StrategySeams(OwnLoop):
    """The model and every method that a strategy may override."""

    Settings = Settings
    paper: ClassVar[str] = ""  # its authors, for `fedfrozen methods`, which shows the docstring's first line
    # The file in clients/ that defines how a client trains; in a script or a notebook the class itself.
    algorithm: ClassVar[str | type] = "fedavg"
    undecided = ""  # a sentence for `fedfrozen plan`, if plans depend on the training
    zero_fill = False  # whether a client that did not send a name counts as one that did not change it
    # Namespaces whose means weight all replies equally, not by examples; PARAMETERS: the model's means too.
    equal: tuple[str, ...] = ()
    keeps_replies = False  # whether `keep_reply` is called with what each client sent
    # Why individual replies are needed, as a verb ("ranks"): disables secure aggregation. Empty: sums do.
    one_by_one: ClassVar[str] = ""
    # Besides `synchronous`, the values of `pacing` under which the method is sound: replies may be late, and
    # of several versions of the model.
    pacings: ClassVar[tuple[str, ...]] = ()
    # Whether updates are divided by the clients' local steps, so that some may take fewer (`pacing.partial`).
    divides_by_steps: ClassVar[bool] = False
    # Which values of `codec` the method is sound under: `any`; `complete`, those that send each round's whole
    # update in that round; or `none`.
    codecs: ClassVar[str] = "any"
    metric_names: tuple[str, ...] = ()  # what `observe` adds to a row: no client may send a metric so named
    # Charts of these metrics on a run's page: metric (`name.part`), title, label of the line.
    curves: ClassVar[tuple[tuple[str, str, str], ...]] = ()

    # Old names, for one release.
    tells, carried, order = Alias("metric_names"), Alias("server_state"), Alias("request")
    figures, judged = Alias("client_metric_names"), Alias("evaluated")
    given, given_names = Alias("per_client_arrays"), Alias("per_client_names")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        adopt_old_names(cls)

    def __init__(
        self,
        federation: Federation,
        settings: Any = None,
        hooks: Sequence[Hook] = (),
        first_round: int = 1,
        history: Sequence[Row] = (),
    ) -> None:
        """`history` holds the rows of the rounds before `first_round`, if a run is resumed."""
        self.federation = federation
        self.settings: Any = settings if settings is not None else self.Settings()
        self.hooks = hooks
        self.first_round = first_round
        self.history = history
        self.num_rounds = 0
        self.model: dict[str, Tensor] = {}
        self.model_digests = ModelDigests()
        self.all_valid = True  # the last round's replies
        self.median_norm: float | None = None  # of the last round's updates; a checkpoint's row holds it
        self.optimizer = federation.optimizer
        self.server_state: ServerState = {}  # arrays sent with every request, by namespace

    # Plans and clients -------------------------------------------------------------------------------

    def plan(self, server_round: int) -> Plan:
        """What is trained, shared and private in this round. Default: everything is trained and shared."""
        names = list(filter(is_parameter, self.model))
        frozen = self.federation.rule.frozen(names)
        return Plan.full(names).freeze(frozen) if frozen else Plan.full(names)

    def stage(self, server_round: int) -> str:
        return "train"

    @classmethod
    def check(cls, settings: Any, config: Config) -> None:
        """Raise a `UserError` for a configuration under which this strategy gives wrong results silently."""

    @classmethod
    def needs_versions(cls, settings: Any) -> str:
        """Why these settings need all replies of a round to be of one version of the model, as the beginning
        of a sentence; empty: they do not. Asked where `pacings` allows the run's pacing."""
        return ""

    @classmethod
    def algorithm_for(cls, settings: Any) -> str:
        """The client's algorithm under these settings; a site checks requests against it."""
        return cls.algorithm if isinstance(cls.algorithm, str) else name_of(cls.algorithm)

    @classmethod
    def wrapper(cls, settings: Any) -> "Wrapper | None":
        """The wrapper that this strategy puts around the model; None: it trains the model as it is."""
        return None

    @classmethod
    def client_settings(cls, settings: Any, client: ClientConfig) -> dict[str, Any]:
        """Settings of the client's algorithm; a site checks requests against them."""
        return {}

    @classmethod
    def phase_epochs(cls, settings: Any) -> tuple[tuple[int | None, ...], ...]:
        """The epochs of the phases of each kind of round that has phases; a site takes no others."""
        return ()

    @classmethod
    def choice_for(cls, settings: Any, roles: Mapping[str, Role]) -> NamedSettings | None:
        """The rule by which each client takes its own layers of the plan; None: all train the whole plan.
        A site checks requests against it, and against `codec_for`."""
        return None

    @classmethod
    def codec_for(cls, settings: Any) -> tuple[str, Any] | None:
        """How uploads are encoded: the name of a codec and its setting; None: as `codec` says."""
        return None

    def client_plan(self, server_round: int) -> Plan:
        """What one client trains and sends; if clients choose, a plan of the size that all have."""
        return self.plan(server_round)

    def per_client_names(self, client: str, seen: Collection[str]) -> Sequence[str]:
        """Names of `per_client_arrays` for this client, once the clients `seen` have taken part."""
        return ()

    def per_client_arrays(self, client: str) -> dict[str, Tensor]:
        """Values of private names that clients do not train. They go to this client alone, which keeps them
        until it is sent others."""
        return {}

    def client_metric_names(self) -> tuple[str, ...]:
        """Metrics that this method's clients send beside those that every client sends: a masked sum has a
        place for each. An algorithm's own are in its `metric_names`."""
        return ()

    # Replies and the server's step -------------------------------------------------------------------

    def on_reply(self, client: str, names: Sequence[str]) -> None:
        """A client's reply was accepted, and these are the names it sent."""

    def client_weight(self, client: str, examples: int, metrics: Mapping[str, float]) -> float:
        """What an accepted reply counts in the round's means: a positive number, by default its examples.

        A strategy that overrides it needs individual replies and sets `one_by_one`. Means of metrics, and
        those of namespaces in `equal`, do not change.
        """
        return float(examples)

    def keep_reply(self, client: str, sent: Mapping[str, Tensor]) -> None:
        """The parameters of an accepted reply: copies, which may be kept."""

    def step(self, update: Update) -> dict[str, Tensor]:
        """The next values of the names in `update.model`, whose memory it may reuse.

        It may also replace arrays in `self.server_state`, but must change neither those nor `self.model` in
        place: clients may hold the same arrays.
        """
        if self.optimizer.adds_only and update.values is not None:
            return update.values
        return self.optimizer.step(self.model, update.model)

    def observe(self, row: Row, merged: Mapping[str, Tensor]) -> Row:
        """Learn from a round before its merged values enter `self.model`; returns what to add to its row."""
        return {}

    @classmethod
    def sums_up(cls, rows: Sequence[Row]) -> dict[str, Any]:
        """What to add to a run's summary, computed from its rows."""
        return {}

    def recall(self, row: Row) -> None:
        """Learn again from the row of an earlier round, when a run is resumed from a checkpoint."""

    def state(self) -> dict[str, Tensor]:
        """Arrays beside the model that a checkpoint must keep."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore them; empty if the checkpoint is another strategy's."""

    # Personal models ---------------------------------------------------------------------------------

    def afterwards(self, server_round: int) -> Plan:
        """What a client trains for itself after the last round, when personal models are evaluated; by
        default the plan of one more round, `server_round`."""
        return self.plan(server_round)

    def evaluated(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """A client's metrics at the end: `global`, `personal`, and `after` (the personal model after training
        by `afterwards`). Override it to define which one is the personal model."""
        return metrics

    @property
    def personal(self) -> bool:
        """Whether clients have models of their own, which must then be evaluated one by one."""
        return self.request(max(self.num_rounds, 1), {}).is_personal

    # What follows from these -------------------------------------------------------------------------

    @property
    def shares_model(self) -> bool:
        """Whether a whole model is shared, which the server can evaluate by itself."""
        return not self.plan(max(self.num_rounds, 1)).private

    @property
    def digests(self) -> dict[str, str]:
        """Those of the model, by name."""
        return self.model_digests.known

    def request(self, server_round: int, drawn: Mapping[str, int]) -> TrainRequest:
        """The round's train request; `drawn`: the number of rounds of each client, if they must know."""
        plan = self.plan(server_round)
        private = set(plan.private)
        return TrainRequest(
            round=server_round,
            plan=plan,
            base={name: value for name, value in self.digests.items() if name not in private},
            algorithm=self.algorithm_for(self.settings),
            settings=self.client_settings(self.settings, self.federation.client),
            choice=self.choice_for(self.settings, self.federation.roles),
            codec=self.codec_for(self.settings) or codec_of(self.federation.connection.codec),
            participations=drawn,
        )

    def upload_bytes(self, server_round: int) -> dict[str, int]:
        """By role, the bytes of the arrays that one client sends; the model may be on the meta device."""
        request = self.request(server_round, {})
        if self.federation.secure.name == "on":
            if self.federation.secure.choices == "groups":  # a group's request has its layers alone
                request = replace(request, plan=self.client_plan(server_round), choice=None)
            masked = masked_request(self.federation, request, self.client_metric_names(), self.equal)
            return dict(masked_bytes(masked, self.model, self.federation.roles))
        names, roles = self.client_plan(server_round).shared, self.federation.roles
        sizes = plain_sizes if request.coder is None else request.coder.sizes
        found = Counter(sizes(names, self.model, roles))
        for _ in request.method.to_server:  # an array beside each parameter is as large
            found.update(plain_sizes(names, self.model, roles))
        return dict(found)

    def clients_keep(self, server_round: int) -> bool:
        """Whether clients keep something between their rounds that exists nowhere else."""
        request = self.request(server_round, {})
        feedback = request.coder is not None and request.coder.error_feedback
        return bool(request.plan.private or request.method.client_state or feedback)

    # For the round alone, and so not on the API's page: whether `observe` may change the merged values.

    @property
    def observes(self) -> bool:
        return type(self).observe is not StrategySeams.observe

    # Whether a step may be taken before the replies are checked: it leaves no trace, and the last round's
    # replies were all valid.

    @property
    def can_step_early(self) -> bool:
        plain = type(self).step is StrategySeams.step and self.optimizer.adds_only
        weighs = type(self).client_weight is not StrategySeams.client_weight  # by metrics, not yet known
        return plain and self.all_valid and not weighs
