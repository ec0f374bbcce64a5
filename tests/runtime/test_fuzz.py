"""Wild replies and damaged files: never a crash without a sentence, never a changed model.

`FUZZ_CASES` in all over the tests below; a slice by default, the whole with `pytest -m slow`.
"""

import json

import pytest
import torch
import yaml
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedfrozen_app.errors import UserError
from fedfrozen_app.exchange.cache import Cache
from fedfrozen_app.exchange.check import problem_of
from fedfrozen_app.exchange.messages import Reply, read_reply, train_reply
from fedfrozen_app.exchange.plan import Order, Plan
from fedfrozen_app.runtime import checkpoint
from fedfrozen_app.sites.audit import AuditLog, read_audit
from fedfrozen_app.sites.kit import Kit
from fedfrozen_app.sites.policy import Policy, read_run
from fedfrozen_app.sites.store import Budget, RunStore
from strategies.aggregate import RunningMean

FUZZ_CASES = 12_000
MODEL = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3)}
ORDER = Order(1, Plan.full(MODEL), {"a": "0" * 64, "b": "1" * 64})

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
sound = st.lists(st.floats(width=32, allow_nan=True), min_size=6, max_size=6).map(
    lambda values: Array("float32", (2, 3), "raw", torch.tensor(values).numpy().tobytes())
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
    st.just(json.dumps({"order": ORDER.digest, "lacks": []})),
)


def array_record(found):
    record = ArrayRecord()
    for name, array in found.items():
        record[name] = array
    return record


records = st.fixed_dictionaries(
    {},
    optional={
        "reply": texts.map(lambda text: ConfigRecord({"json": text})) | st.just(ConfigRecord({"other": 1})),
        "metrics": st.dictionaries(
            st.sampled_from(["num-examples", "train_loss", "x"]),
            st.integers(-5, 2**40) | st.floats() | st.lists(st.integers(0, 5), max_size=2),
            max_size=3,
        ).map(MetricRecord),
        "arrays": st.dictionaries(names, arrays | sound, max_size=3).map(array_record)
        | st.just(ConfigRecord()),
    },
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
        few = settings(max_examples=40, derandomize=True, **quiet)
        many = settings(max_examples=int(FUZZ_CASES * share), derandomize=True, **quiet)
        slow = pytest.mark.slow
        return pytest.mark.parametrize("run", [few, pytest.param(many, marks=slow)], ids=["slice", "all"])(
            test
        )

    return both


@cases(0.5)
def test_wild_replies_never_change_the_model(run):
    before = {name: value.clone() for name, value in MODEL.items()}

    @run
    @given(records)
    def check(found):
        content = RecordDict()
        for key, record in found.items():
            content[key] = record
        mean = RunningMean(MODEL, lambda name: "rest")
        try:
            reply = read_reply(Message(content, reply_to=message()))
        except ValueError as error:
            assert str(error)
        else:
            problem = problem_of(reply, ORDER, MODEL) or mean.add(reply.arrays, float(reply.examples))
            if problem is None:  # then it is a reply as we would send it
                assert set(reply.arrays) == set(MODEL) and reply.examples > 0
            else:
                assert mean.finish() == ({}, {})
        assert all(torch.equal(value, before[name]) for name, value in MODEL.items())

    check()


@cases(0.1)
def test_a_damaged_cache_gives_the_array_or_asks_for_it(run, tmp_path):
    from fedfrozen_app.exchange.arrays import digest

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
        else:
            assert isinstance(found.round, int)

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
        "data": {"kind": "images", "path": "d"},
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
    budget = Budget(tmp_path / "budget.json")
    budget.charge("one", 2.0, "words", 1, "order")
    log = AuditLog(tmp_path / "audit.jsonl")
    for number in range(3):
        log.write("sent", round=number)
    store = RunStore(tmp_path / "run", keep=3)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 0, 0, 0
    store.write(1, Reply("o", 5, MODEL, {"train_loss": 1.0}), MODEL)
    files = {path: path.read_bytes() for path in (budget.path, log.path, *(tmp_path / "run" / "1").iterdir())}

    @run
    @given(st.data())
    def check(data):
        for path, content in files.items():
            path.write_bytes(content)
        path = data.draw(st.sampled_from(sorted(files)))
        path.write_bytes(damaged(files[path], data.draw))
        for look in (budget.spent, lambda: read_audit(log.path), lambda: store.private_before(2)):
            try:
                look()
            except UserError as error:
                assert "damaged" in str(error) or "changed or cut" in str(error)
        reply = store.reply_to(1, "o")
        assert reply is None or set(reply.arrays) == set(MODEL)
        if reply is not None:
            train_reply(message(), reply, local=False)

    check()


@cases(0.05)
def test_wild_overrides_are_a_run_or_a_sentence(run):
    words = st.sampled_from(
        ["num_rounds=", "seed=", "strategy=", "dataset=images ", "+x=", "~seed", "run_id=", "'"]
    )
    text = st.lists(words | st.text(max_size=6), max_size=4).map("".join)

    @run
    @given(text)
    def check(overrides):
        found = read_run.__wrapped__(overrides, 1, "0" * 64)
        assert found if isinstance(found, str) else found.id

    check()
