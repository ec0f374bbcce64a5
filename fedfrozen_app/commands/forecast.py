"""Predicts what a run would train, send and store, from the sizes of its arrays alone.

It simulates the rounds with the run's own plans, cohorts and rule for missing arrays, so that the bytes equal
`bytes_up_by_role` and `bytes_down_by_role`, provided that every trained array changes in each round and no
reply is lost. If clients choose their own layers, the bytes down are an upper bound: every layer is chosen by
some client in every round. The same holds if the server sends a client its own arrays: all of them are
assumed to be new.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from fedfrozen_app.adapters.merged_deltas import is_merged_delta
from fedfrozen_app.commands.downloads import Before, Downloads
from fedfrozen_app.commands.step_memory import Measured, StepMemory
from fedfrozen_app.config import Config
from fedfrozen_app.core.client_order import Numbered
from fedfrozen_app.data.federated import input_shape, load_corpus, share_out
from fedfrozen_app.data.table import InputShape
from fedfrozen_app.exchange.count import bytes_by_role, count_parameters
from fedfrozen_app.exchange.names import names_in_namespaces, with_namespace
from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.exchange.role import Role, is_embedding
from fedfrozen_app.local.algorithm import Algorithm
from fedfrozen_app.models.build import parameters_of
from fedfrozen_app.models.roles import roles_of
from fedfrozen_app.models.wrapper import wrapper_of
from fedfrozen_app.run.outline import planning_strategy
from fedfrozen_app.server.base import PlannedFedAvg
from fedfrozen_app.server.sampling import draw_cohort

Bytes = Counter[str]  # by role
AS_SYNCHRONOUS = "Virtual time decides who is asked when: these are the bytes of synchronous rounds."


@dataclass
class Stage:
    """Consecutive rounds with the same plan for each client. Sums are over the rounds and their clients."""

    name: str
    plan: Plan
    trained_params: int
    # For one client in one round of the stage:
    trained: Bytes
    frozen: Bytes
    private: Bytes
    client_state: Bytes  # arrays that the algorithm keeps at the client between its rounds
    rounds: int = 0
    client_rounds: int = 0
    up: Bytes = field(default_factory=Counter)
    down: Bytes = field(default_factory=Counter)


@dataclass
class Forecast:
    parameters: dict[str, int]  # by role
    model: Bytes
    clients: int
    stages: list[Stage]
    everything_up: int  # what FedAvg would upload with the same cohorts
    but_embeddings_up: int | None  # FedAvg with frozen embeddings, if this strategy freezes them too
    up_by_round: list[Bytes]
    down_by_round: list[Bytes]
    undecided: str  # what is decided only during the run
    memory: list[StepMemory] = field(default_factory=list)  # by stage, if requested
    measured: Measured | None = None

    def total(self, way: str) -> int:
        return sum(sum(getattr(stage, way).values()) for stage in self.stages)


@dataclass(frozen=True)
class Ground:
    """What a forecast depends on in the data: the model's inputs, and the number of clients."""

    shape: InputShape
    clients: int
    tokens: int = 0  # of the longest text; 0 for pictures and tables
    chunks: int = 1  # of each text


def ground_of(config: Config) -> Ground:
    corpus = load_corpus(config)
    shares = share_out(corpus, config, config.num_clients)
    assert shares.partition is not None
    texts = corpus.train.inputs.get("input_ids")
    longest = 0 if texts is None else texts.shape[-1]
    chunks = corpus.reading.chunks if corpus.reading else 1
    return Ground(input_shape(corpus, config), len(shares.partition.indices), longest, chunks)


def forecast(config: Config, ground: Ground | None = None) -> Forecast:
    """Forecast a run. With `ground`, the data are not read."""
    ground = ground or ground_of(config)
    strategy = outlined(config, ground)
    clients = Numbered(ground.clients)
    found = walk(strategy, config.num_rounds, clients, strategy.federation.connection.roles)
    if config.pacing.name != "synchronous":
        found.undecided = f"{found.undecided} {AS_SYNCHRONOUS}".strip()
    wrapper = wrapper_of(config)
    if wrapper.merges:  # then the full model is larger than what is exchanged
        model = wrapper.outline(config, ground.shape)
        found.everything_up += visits_of(found) * sum(v.nbytes for v in wrapper.fixed_values(model).values())
    return found


def visits_of(found: Forecast) -> int:
    return sum(stage.client_rounds for stage in found.stages)


def outlined(config: Config, ground: Ground) -> PlannedFedAvg:
    """The run's strategy, with the shapes of its model."""
    return planning_strategy(config, *outline(config, ground.shape))


def outline(config: Config, shape: InputShape) -> tuple[dict[str, Tensor], dict[str, Role]]:
    """The shapes of the arrays that server and clients exchange, and the roles of all."""
    wrapper = wrapper_of(config)
    model = wrapper.outline(config, shape)
    fixed = wrapper.fixed_names(model)
    return {k: v for k, v in parameters_of(model).items() if k not in fixed}, roles_of(model)


def walk(
    strategy: PlannedFedAvg, num_rounds: int, clients: Sequence[str], roles: Mapping[str, Role]
) -> Forecast:
    """Simulate the rounds as the server and its ledger would."""
    arrays, seed = strategy.model, strategy.federation.seed
    stages: list[Stage] = []
    up_by_round: list[Bytes] = []
    down_by_round: list[Bytes] = []
    seen: dict[str, tuple[int, frozenset[str]]] = {}  # client: its latest round, and the base it then had
    method = strategy.request(1, {}).method
    spaces = method.from_server  # sent down in addition to the shared parameters
    sent = {**arrays, **{with_namespace(space, n): a for space in spaces for n, a in arrays.items()}}
    downloads = Downloads(roles, strategy.federation.connection.broadcast.coder)
    rule, merged_deltas = strategy.federation.rule, dict[str, Tensor]()
    for number in range(1, num_rounds + 1):
        plan, client_plan = strategy.plan(number), strategy.client_plan(number)
        if not stages or (stages[-1].name, stages[-1].plan) != (strategy.stage(number), client_plan):
            stages.append(_stage(strategy.stage(number), client_plan, method, arrays, roles))
        stage = stages[-1]
        cohort = draw_cohort(clients, strategy.federation.participation, seed, number)
        beside = names_in_namespaces(spaces, plan.shared)
        base = (frozenset(arrays) - frozenset(plan.private)) | frozenset(beside)
        base |= frozenset(merged_deltas)
        downloads.begin(number, base, plan.trained, sent | merged_deltas)
        usual, up = Counter(strategy.upload_bytes(number)), Counter[str]()
        down: Bytes = Counter()
        lacking: dict[tuple[int | None, Before], Bytes] = {}
        known = frozenset(seen)
        rule.begin()
        for client in cohort:
            own = rule.narrowed(client, arrays)
            up += _pick(client_plan.shared, arrays | own, roles) if own else usual
            down += _pick(strategy.per_client_names(client, known), arrays, roles)
            key = rule.ranks.get(client), seen.get(client)
            if key not in lacking:
                lacking[key] = downloads.of(base, key[1], sent | merged_deltas | own)
            down += lacking[key]
            seen[client] = (number, base)
            if rule.one_by_one:
                rule.take(client, {name: arrays[name] for name in plan.shared}, 1.0)
        renewed = [name for name in plan.shared if name not in rule.constant(plan.shared)]
        downloads.changed(number, [*renewed, *beside])
        for name, value in rule.close(number, {**arrays, **merged_deltas}).items():
            if value is None:
                del merged_deltas[name]
            elif is_merged_delta(name):
                merged_deltas[name] = value
                downloads.changed(number, [name])
        stage.rounds += 1
        stage.client_rounds += len(cohort)
        stage.up += up
        stage.down += down
        up_by_round.append(up)
        down_by_round.append(down)
    return _summed(strategy, len(clients), roles, stages, up_by_round, down_by_round)


def _summed(
    strategy: PlannedFedAvg,
    clients: int,
    roles: Mapping[str, Role],
    stages: list[Stage],
    up_by_round: list[Bytes],
    down_by_round: list[Bytes],
) -> Forecast:
    """The forecast of all rounds, and of sending the whole model every time."""
    arrays = strategy.model
    whole = bytes_by_role(arrays, roles)
    parameters: Counter[str] = Counter()
    for name, tensor in arrays.items():
        parameters[roles[name].kind] += tensor.numel()
    visits = sum(stage.client_rounds for stage in stages)
    embedding = {name for name in arrays if is_embedding(roles[name])}
    frozen = embedding and not any(embedding & set(stage.plan.shared) for stage in stages)
    rest = sum(_pick(arrays.keys() - embedding, arrays, roles).values())
    return Forecast(
        dict(parameters),
        whole,
        clients,
        stages,
        sum(whole.values()) * visits,
        rest * visits if frozen else None,
        up_by_round,
        down_by_round,
        strategy.undecided,
    )


def _stage(
    name: str, plan: Plan, method: Algorithm, arrays: Mapping[str, Tensor], roles: Mapping[str, Role]
) -> Stage:
    frozen = set(arrays) - set(plan.trained) - set(plan.private)
    return Stage(
        name,
        plan,
        count_parameters(arrays, plan.trained),
        trained=_pick(plan.trained, arrays, roles),
        frozen=_pick(frozen, arrays, roles),
        private=_pick(plan.private, arrays, roles),
        client_state=_kept(method, plan, arrays, roles),
    )


def _kept(method: Algorithm, plan: Plan, arrays: Mapping[str, Tensor], roles: Mapping[str, Role]) -> Bytes:
    """One array per trained name and namespace; a single number if the algorithm keeps scalars."""
    trained = {name: arrays[name] for name in plan.trained}
    kept = Bytes()
    for space in method.client_state:
        scalar = space in method.scalar_state
        kept += bytes_by_role({n: a.new_empty(()) if scalar else a for n, a in trained.items()}, roles)
    return kept


def _pick(names: Iterable[str], arrays: Mapping[str, Tensor], roles: Mapping[str, Role]) -> Bytes:
    return bytes_by_role({name: arrays[name] for name in names}, roles)
