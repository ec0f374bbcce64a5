"""Wild replies and damaged files: never a crash without a sentence, never a changed model.

`FUZZ_CASES` in all over the tests below; a slice by default, the whole with `pytest -m slow`.
"""

import json
from collections import Counter

import pytest
import torch
import yaml
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedfrozen_app.core.digests import digest
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.exchange.arrays import PACKED, to_record
from fedfrozen_app.exchange.cache import Cache
from fedfrozen_app.exchange.check import problem_of
from fedfrozen_app.exchange.hello_messages import read_hello
from fedfrozen_app.exchange.messages import Reply, read_reply, train_reply
from fedfrozen_app.exchange.plan import Plan
from fedfrozen_app.exchange.role import Role
from fedfrozen_app.exchange.train_request import TrainRequest
from fedfrozen_app.files import checkpoint
from fedfrozen_app.server.aggregate import RunningMean
from fedfrozen_app.server.optimizer import NoOptimizer
from fedfrozen_app.server.record import RoundRecord
from fedfrozen_app.sites.audit_log import FIRST, AuditLog, read_audit
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.policy import Policy
from fedfrozen_app.sites.site_budget import Price, SiteBudget
from fedfrozen_app.sites.store import RunStore
from fedfrozen_app.sites.strict_request import read_strict_train_request
from tests.conftest import same_bits

FUZZ_CASES = 12_000
MODEL = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3)}
ROLES = {"a": Role("mlp", 0), "b": Role("head")}
ORDER = TrainRequest(1, Plan.full(MODEL), {"a": "0" * 64, "b": "1" * 64})

names = st.sampled_from(["a", "b", "c", "", "a\0"])
numbers = st.one_of(st.integers(-(2**70), 2**70), st.floats(allow_nan=True, allow_infinity=True))
small = st.integers(-3, 9)
arrays = st.builds(
    Array,
    dtype=st.sampled_from(["float32", "float64", "bfloat16", "int8", "object", "", "float32\n"]),
    shape=st.lists(small, max_size=4).map(tuple),
    stype=st.sampled_from(["raw", "numpy.ndarray", "pickle", ""]),
    data=st.binary(max_size=64),
)
huge = st.sampled_from([0.0, -1.5, 3e38, -3e38, float("inf"), float("nan")])
values = st.floats(width=32, allow_nan=True) | huge


def array_like(tensor):
    """An array of this tensor's type and shape, with any values."""
    count = tensor.numel()
    return st.lists(values, min_size=count, max_size=count).map(
        lambda found: Array("float32", tuple(tensor.shape), "raw", torch.tensor(found).numpy().tobytes())
    )


texts = st.one_of(
    st.text(max_size=40),
    st.recursive(
        st.none() | st.booleans() | numbers | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["order", "lacks", "x"]), inner)
        ),
        max_leaves=6,
    ).map(json.dumps),
    st.just("[" * 100_000),
)
figures = st.sampled_from(
    [
        "num-examples",
        "train_loss",
        "epsilon",
        "delta",
        "round",
        "stage",
        "test_loss",
        "val_accuracy",
        "clients_ok",
        "failures",
        "usual_norm",
        "x",
    ]
)


def array_record(found):
    record = ArrayRecord()
    for name, array in found.items():
        record[name] = array
    return record


@st.composite
def packs(draw):
    """As arrays really travel, damaged."""
    data = damaged(to_record(MODEL, local=False)[PACKED].data, draw)
    return array_record({PACKED: Array("uint8", (len(data),), PACKED, data)})


def text_record(text):
    return ConfigRecord({"json": text})


sound = {
    "reply": st.just(json.dumps({"order": ORDER.digest, "lacks": []})).map(text_record),
    "metrics": st.just({"num-examples": 5, "train_loss": 1.0}).map(MetricRecord),
    "arrays": st.fixed_dictionaries({name: array_like(tensor) for name, tensor in MODEL.items()}).map(
        array_record
    ),
}
figure = st.integers(-(2**62), 2**62) | st.floats() | st.lists(st.integers(0, 5), max_size=2)
wild = {
    "reply": texts.map(text_record)
    | st.sampled_from([ConfigRecord({"other": 1}), MetricRecord({"json": 1})]),
    "metrics": st.dictionaries(figures, figure, max_size=3).map(
        lambda found: MetricRecord({"num-examples": 5, **found})
    ),
    "arrays": st.dictionaries(names, arrays, max_size=3).map(array_record)
    | packs()
    | st.just(ConfigRecord()),
}
# A reply that is wild all over never gets past the first look: mostly one part is, and the rest is sound.
records = st.sampled_from([*sound, *sound, "all", "none"]).flatmap(
    lambda part: (
        st.fixed_dictionaries({}, optional=wild)
        if part == "all"
        else st.fixed_dictionaries(sound | {part: wild[part]} if part in wild else sound)
    )
)


def message() -> Message:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 0, 0, 0
    return Message(RecordDict(), dst_node_id=1, message_type=MessageType.TRAIN)


def damaged(content: bytes, draw) -> bytes:
    """Cut, a flipped byte, more at the end, or something else altogether."""
    kind = draw(st.sampled_from(["cut", "flip", "more", "other"]))
    if kind == "cut":
        return content[: draw(st.integers(0, max(len(content) - 1, 0)))]
    if kind == "more":
        return content + draw(st.binary(min_size=1, max_size=8))
    if kind == "other":
        return draw(st.binary(max_size=200))
    place = draw(st.integers(0, len(content) - 1))
    return content[:place] + bytes([content[place] ^ draw(st.integers(1, 255))]) + content[place + 1 :]


def cases(share):
    """A slice for every day, and the share of all cases for `-m slow`."""

    def both(test):
        quiet = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
        few = settings(max_examples=60, derandomize=True, **quiet)
        many = settings(max_examples=int(FUZZ_CASES * share), derandomize=True, **quiet)
        slow = pytest.mark.slow
        return pytest.mark.parametrize("run", [few, pytest.param(many, marks=slow)], ids=["slice", "all"])(
            test
        )

    return both


@cases(0.45)
def test_wild_replies_never_change_the_model(run):
    before = {name: value.clone() for name, value in MODEL.items()}
    ends = Counter()

    @run
    @given(records)
    def check(found):
        content = RecordDict()
        for key, record in found.items():
            content[key] = record
        record = RoundRecord(1, RunningMean(MODEL, lambda name: "rest"))
        try:
            reply = read_reply(Message(content, reply_to=message()))
            taken = record.take("north", problem_of(reply, ORDER, MODEL, ROLES) or reply)
        except ValueError as error:
            taken = record.take("north", str(error))
        update = record.finish(1, 1)
        merged, drift = NoOptimizer().step(MODEL, update.model), update.drift
        if taken:  # then it is a reply as we would send it
            assert set(merged) == set(MODEL)
            assert all(torch.isfinite(value).all() for value in merged.values())
        else:
            assert merged == {} and record.failures[0].startswith("Client north was set aside: it ")
        row = record.row("warmup", ["north"], 9, drift)
        assert (row["round"], row["stage"], row["clients_ok"]) == (1, "warmup", int(taken))
        assert not {"test_loss", "val_accuracy", "usual_norm"} & set(row)
        json.dumps(row, allow_nan=False)
        assert same_bits(MODEL, before)
        ends[record.failures[0].partition(": it ")[2][:20] if record.failures else "taken"] += 1

    check()
    # Cases must get past the first look, or they show nothing.
    assert ends["taken"] and len(ends) >= 4, ends


@cases(0.05)
def test_wild_hellos_are_a_name_or_a_sentence(run):
    keys = st.sampled_from(["name", "num_partitions", "held", "state", "anchor", "x"])
    inner = st.none() | numbers | st.text(max_size=3) | st.lists(st.text(max_size=3) | numbers, max_size=2)
    told = st.dictionaries(keys, inner).map(json.dumps)
    sound = st.just(json.dumps({"name": "north", "num_partitions": None, "held": ["0" * 64]}))

    @run
    @given(told | texts | sound, st.sampled_from(["hello", "other"]))
    def check(text, key):
        try:
            hello = read_hello(Message(RecordDict({key: text_record(text)}), reply_to=message()))
        except ValueError as error:
            assert str(error).startswith("sent ")
        else:
            assert isinstance(hello.name, str) and all(isinstance(held, str) for held in hello.held)

    check()


@cases(0.1)
def test_a_damaged_cache_gives_the_array_or_asks_for_it(run, tmp_path):
    key = digest(MODEL["a"])
    Cache(tmp_path, 10**9).put(key, MODEL["a"])
    path = tmp_path / f"{key}.safetensors"
    good = path.read_bytes()

    @run
    @given(st.data())
    def check(data):
        path.write_bytes(damaged(good, data.draw))
        found = Cache(tmp_path, 10**9).get(key)
        assert found is None or torch.equal(found, MODEL["a"])

    check()


@cases(0.1)
def test_a_damaged_checkpoint_ends_with_a_sentence_or_is_whole(run, tmp_path):
    state = checkpoint.Checkpoint(1, {}, ["seed=1"], MODEL, {"round": 1}, {"0": ["x"]}, {"best": {}})
    state.clients, state.strategy = {"0": MODEL}, MODEL
    folder = checkpoint.write(state, tmp_path, keep=2)
    files = {path: path.read_bytes() for path in folder.iterdir()}

    @run
    @given(st.data())
    def check(data):
        for path, content in files.items():
            path.write_bytes(content)
        path = data.draw(st.sampled_from(sorted(files)))
        path.write_bytes(damaged(files[path], data.draw))
        try:
            found = checkpoint.read(folder)
        except UserError as error:
            assert "no readable checkpoint" in str(error)
        else:  # nothing that matters was hit
            assert same_bits(found.model, MODEL) and same_bits(found.clients["0"], MODEL)
            assert same_bits(found.strategy, MODEL) and (found.round, found.row) == (1, {"round": 1})

    check()


@cases(0.15)
def test_a_damaged_policy_or_kit_allows_nothing_by_accident(run, tmp_path):
    policy = {
        "strategies": ["fedavg"],
        "bundles": ["0" * 64],
        "upload_roles": ["head"],
        "min_examples": 50,
        "max_epsilon": 8.0,
        "rounds_per_day": 10,
        "privacy_required": True,
    }
    kit = {
        "name": "north",
        "superlink": "h:1",
        "port": 1,
        "views": {"main": {"kind": "images", "path": "d", "classes": ["a", "b"], "unit": "patient"}},
        "folder": "var",
    }
    paths = {"policy.yaml": policy, "site.yaml": kit}
    good = {name: yaml.safe_dump(content).encode() for name, content in paths.items()}

    @run
    @given(st.data())
    def check(data):
        name = data.draw(st.sampled_from(sorted(good)))
        (tmp_path / name).write_bytes(damaged(good[name], data.draw))
        try:
            read = Policy.read(tmp_path / name) if name == "policy.yaml" else Kit.read(tmp_path)
        except UserError as error:
            assert str(error)
        else:
            if isinstance(read, Policy):
                assert (read.min_examples >= 0 and read.bundles == "any") or isinstance(read.bundles, tuple)
                assert all(isinstance(word, str) for word in (*read.strategies, *read.upload_roles))

    check()


@cases(0.1)
def test_a_damaged_budget_audit_log_or_store(run, tmp_path):
    budget = SiteBudget(tmp_path / "budget.json")
    budget.charge("one", Price(2.0, 1e-6, "example", "hash"), 1, "order", FIRST)
    log = AuditLog(tmp_path / "audit.jsonl")
    for number in range(3):
        log.write("sent", round=number)
    store = RunStore(tmp_path / "run", keep=3)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 0, 0, 0
    store.write("h", 1, Reply("o", 5, MODEL, {"train_loss": 1.0}), MODEL)
    files = {
        path: path.read_bytes() for path in (budget.path, log.path, *(tmp_path / "run" / "h" / "1").iterdir())
    }

    @run
    @given(st.data())
    def check(data):
        for path, content in files.items():
            path.write_bytes(content)
        path = data.draw(st.sampled_from(sorted(files)))
        path.write_bytes(damaged(files[path], data.draw))
        looks = {
            budget.path: lambda: budget.spent() == (2.0, 1e-6),
            # Cut between two lines it is a whole log of fewer.
            log.path: lambda: [0, 1, 2][: len(rounds := sent_rounds(log.path))] == rounds,
        }
        look = looks.get(path, lambda: same_bits(store.private_before("h", 2), MODEL))
        try:
            assert look()
        except UserError as error:
            assert "damaged" in str(error) or "changed or cut" in str(error)
        reply = store.reply_to("h", 1, "o")
        assert reply is None or (same_bits(reply.arrays, MODEL) and reply.examples == 5)
        if reply is not None:
            train_reply(message(), reply, local=False)

    check()


def sent_rounds(path):
    return [entry["round"] for entry in read_audit(path)]


@cases(0.05)
def test_wild_orders_are_an_order_or_a_sentence(run):
    """As a site reads them: nothing but a `ValueError` comes out."""
    keys = st.sampled_from(
        [*json.loads(ORDER.json), "phases", "selection", "participations", "judge", "keep"]
    )
    inner = st.recursive(
        st.none() | st.booleans() | numbers | st.text(max_size=3),
        lambda part: (
            st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=3) | keys, part, max_size=3)
        ),
        max_leaves=6,
    )
    told = st.dictionaries(keys, inner, max_size=3).map(lambda new: json.dumps(json.loads(ORDER.json) | new))

    @run
    @given(told | texts)
    def check(text):
        try:
            request = read_strict_train_request(text)
        except ValueError:
            return
        assert all(
            isinstance(name, str) for name in (*request.plan.trained, *request.base, *request.base.values())
        )

    check()
