"""The methods that a strategy may override, with FedAvg's defaults, and the attributes that they can read.

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
    zero_fill = False  # whether a name that a client did not send counts as unchanged
    # Namespaces whose means weight all replies equally, not by examples; PARAMETERS: the model's mean, too.
    equal: tuple[str, ...] = ()
    keeps_replies = False  # whether `keep_reply` is called with each client's arrays
    # Why individual replies are needed, as a verb ("ranks"); disables secure aggregation. Empty: not needed.
    one_by_one: ClassVar[str] = ""
    # The values of `pacing` other than `synchronous` under which the method is sound: replies may be late,
    # and from several versions of the model.
    pacings: ClassVar[tuple[str, ...]] = ()
    # Whether updates are divided by local steps, so that clients may take fewer of them (`pacing.partial`).
    divides_by_steps: ClassVar[bool] = False
    # The values of `codec` under which the method is sound: `any`; `complete`, those that send each round's
    # whole update in that round; or `none`.
    codecs: ClassVar[str] = "any"
    metric_names: tuple[str, ...] = ()  # metrics that `observe` adds to a row: clients may not send these
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
        """`history`: the rows of the rounds before `first_round`, if a run is resumed."""
        self.federation = federation
        self.settings: Any = settings if settings is not None else self.Settings()
        self.hooks = hooks
        self.first_round = first_round
        self.history = history
        self.num_rounds = 0
        self.model: dict[str, Tensor] = {}
        self.model_digests = ModelDigests()
        self.all_valid = True  # whether all replies of the last round were valid
        self.median_norm: float | None = None  # of the last round's updates; a checkpoint's row holds it
        self.optimizer = federation.optimizer
        self.server_state: ServerState = {}  # arrays sent with every request, by namespace

    # Plans and clients -------------------------------------------------------------------------------

    def plan(self, server_round: int) -> Plan:
        """Which names are trained, shared and private in this round. Default: all are trained and shared."""
        names = list(filter(is_parameter, self.model))
        frozen = self.federation.rule.frozen(names)
        return Plan.full(names).freeze(frozen) if frozen else Plan.full(names)

    def stage(self, server_round: int) -> str:
        return "train"

    @classmethod
    def check(cls, settings: Any, config: Config) -> None:
        """Raise a `UserError` for configurations under which results would be silently wrong."""

    @classmethod
    def needs_versions(cls, settings: Any) -> str:
        """Why these settings need all replies of a round to be from one version of the model, as the
        beginning of a sentence; empty: they do not. Called if `pacings` allows the run's pacing."""
        return ""

    @classmethod
    def algorithm_for(cls, settings: Any) -> str:
        """The client's algorithm under these settings; a site checks requests against it."""
        return cls.algorithm if isinstance(cls.algorithm, str) else name_of(cls.algorithm)

    @classmethod
    def wrapper(cls, settings: Any) -> "Wrapper | None":
        """The wrapper that this strategy puts around the model; None: no wrapper."""
        return None

    @classmethod
    def client_settings(cls, settings: Any, client: ClientConfig) -> dict[str, Any]:
        """Settings of the client's algorithm; a site checks requests against them."""
        return {}

    @classmethod
    def phase_epochs(cls, settings: Any) -> tuple[tuple[int | None, ...], ...]:
        """The epochs of the phases, for each kind of round with phases; a site accepts no others."""
        return ()

    @classmethod
    def choice_for(cls, settings: Any, roles: Mapping[str, Role]) -> NamedSettings | None:
        """The rule by which each client chooses its layers of the plan; None: all train the whole plan.
        A site checks requests against it, and against `codec_for`."""
        return None

    @classmethod
    def codec_for(cls, settings: Any) -> tuple[str, Any] | None:
        """How uploads are encoded: the name of a codec and its setting; None: as configured by `codec`."""
        return None

    def client_plan(self, server_round: int) -> Plan:
        """What one client trains and sends; if clients choose layers, a plan of the same size."""
        return self.plan(server_round)

    def per_client_names(self, client: str, seen: Collection[str]) -> Sequence[str]:
        """Names of `per_client_arrays` for this client, after the clients `seen` have taken part."""
        return ()

    def per_client_arrays(self, client: str) -> dict[str, Tensor]:
        """Values of private names that clients do not train. They are sent to this client alone, which keeps
        them until it gets new ones."""
        return {}

    def client_metric_names(self) -> tuple[str, ...]:
        """Metrics that this method's clients send in addition to the common ones: a masked sum has a place
        for each. Metrics of an algorithm are in its `metric_names`."""
        return ()

    # Replies and the server's step -------------------------------------------------------------------

    def on_reply(self, client: str, names: Sequence[str]) -> None:
        """Called after a client's reply was accepted, with the names that it sent."""

    def client_weight(self, client: str, examples: int, metrics: Mapping[str, float]) -> float:
        """The weight of an accepted reply in the round's means: a positive number, by default its examples.

        A strategy that overrides it needs individual replies and sets `one_by_one`. Does not affect the means
        of metrics and of namespaces in `equal`.
        """
        return float(examples)

    def keep_reply(self, client: str, sent: Mapping[str, Tensor]) -> None:
        """Called with the parameters of an accepted reply: copies, which may be kept."""

    def step(self, update: Update) -> dict[str, Tensor]:
        """The next values of the names in `update.model`, whose memory it may reuse.

        It may also replace arrays in `self.server_state`, but must change neither those nor `self.model` in
        place: clients may hold the same arrays.
        """
        if self.optimizer.adds_only and update.values is not None:
            return update.values
        return self.optimizer.step(self.model, update.model)

    def observe(self, row: Row, merged: Mapping[str, Tensor]) -> Row:
        """Called before a round's merged values enter `self.model`; returns what to add to its row."""
        return {}

    @classmethod
    def sums_up(cls, rows: Sequence[Row]) -> dict[str, Any]:
        """Entries for a run's summary, computed from its rows."""
        return {}

    def recall(self, row: Row) -> None:
        """Restore state from the row of an earlier round, when a run is resumed from a checkpoint."""

    def state(self) -> dict[str, Tensor]:
        """Arrays besides the model that a checkpoint must keep."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the arrays of `state`; empty if the checkpoint is of another strategy."""

    # Personal models ---------------------------------------------------------------------------------

    def afterwards(self, server_round: int) -> Plan:
        """What a client trains for itself after the last round, when personal models are evaluated; by
        default the plan of one more round, `server_round`."""
        return self.plan(server_round)

    def evaluated(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """A client's final metrics: `global`, `personal`, and `after` (the personal model after training by
        `afterwards`). Override it to define which of them is the personal model."""
        return metrics

    @property
    def personal(self) -> bool:
        """Whether clients have personal models, which must then be evaluated one by one."""
        return self.request(max(self.num_rounds, 1), {}).is_personal

    # Derived -------------------------------------------------------------------------

    @property
    def shares_model(self) -> bool:
        """Whether a whole model is shared, so that the server can evaluate it."""
        return not self.plan(max(self.num_rounds, 1)).private

    @property
    def digests(self) -> dict[str, str]:
        """The model's digests, by name."""
        return self.model_digests.known

    def request(self, server_round: int, drawn: Mapping[str, int]) -> TrainRequest:
        """The round's train request; `drawn`: each client's number of rounds, if clients must know it."""
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
        """The bytes that one client sends, by role; the model may be on the meta device."""
        request = self.request(server_round, {})
        if self.federation.secure.name == "on":
            if self.federation.secure.choices == "groups":  # a group's request contains only its layers
                request = replace(request, plan=self.client_plan(server_round), choice=None)
            masked = masked_request(self.federation, request, self.client_metric_names(), self.equal)
            return dict(masked_bytes(masked, self.model, self.federation.roles))
        names, roles = self.client_plan(server_round).shared, self.federation.roles
        sizes = plain_sizes if request.coder is None else request.coder.sizes
        found = Counter(sizes(names, self.model, roles))
        for _ in request.method.to_server:  # arrays of namespaces are as large as their parameters
            found.update(plain_sizes(names, self.model, roles))
        return dict(found)

    def clients_keep(self, server_round: int) -> bool:
        """Whether clients keep state between their rounds that exists nowhere else."""
        request = self.request(server_round, {})
        feedback = request.coder is not None and request.coder.error_feedback
        return bool(request.plan.private or request.method.client_state or feedback)

    # Internal to the round, not on the API page: whether `observe` may change the merged values.

    @property
    def observes(self) -> bool:
        return type(self).observe is not StrategySeams.observe

    # Whether a step may be taken before the replies are checked: it has no side effects, and all replies of
    # the last round were valid.

    @property
    def can_step_early(self) -> bool:
        plain = type(self).step is StrategySeams.step and self.optimizer.adds_only
        weighs = type(self).client_weight is not StrategySeams.client_weight  # from metrics, not yet known
        return plain and self.all_valid and not weighs
