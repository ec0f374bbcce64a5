"""Runs with coded uploads: the plan's bytes, the clock's, killed and resumed, in every runtime, private."""

import numpy as np
import pytest
import torch

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.commands.forecast import forecast
from fedfrozen_app.config import compose_config, compose_run, read, resolved
from fedfrozen_app.core import registry
from fedfrozen_app.exchange.codecs.update_codec import UpdateCodec
from fedfrozen_app.exchange.train_request import TrainRequest, read_train_request
from fedfrozen_app.files import checkpoint
from fedfrozen_app.run.outline import planning_strategy
from tests.conftest import SMALL, Run, same_bits, slowly
from tests.resuming import resumed_and_whole

FEDAVG = ("strategy=fedavg", "num_rounds=2")


@pytest.mark.parametrize(
    "words",
    [
        ("codec=int4", "codec.rotate=true", "strategy=fedfrozen", "strategy.warmup_rounds=1"),
        ("codec=topk", "codec.share=0.01"),
        *slowly(
            ("codec=float16",),
            ("codec=bfloat16", "adapter=lora"),
            ("codec=int8", "codec.block=64", "strategy=scaffold", "client=sgd"),
            ("codec=randomk", "strategy=fedper"),
            ("codec=int8", "model.dtype=float64"),
            ("codec=int8", "strategy=safl", "strategy.select=fixed", "strategy.top_k=1"),
        ),
    ],
    ids=" ".join,
)
def test_the_run_sends_the_bytes_of_the_plan(train, words):
    words = (*FEDAVG, *words)
    found = forecast(read(resolved(compose_config([*SMALL, *words]))))
    rows = train(*words).rows[1:]
    assert [dict(part) for part in found.up_by_round] == [row["bytes_up_by_role"] for row in rows]
    assert [dict(part) for part in found.down_by_round] == [row["bytes_down_by_role"] for row in rows]
    assert all(row["clients_failed"] == 0 for row in rows)


@pytest.mark.parametrize(
    "words",
    [
        ("codec=topk", "codec.share=0.1", "strategy=fedper"),
        *slowly(
            ("codec=int8", "codec.down=int4", "strategy=fedavg"),
            ("codec=int8", "strategy=scaffold", "client=sgd"),
            ("codec=int4", "codec.rotate=true", "strategy=fedfrozen", "strategy.warmup_rounds=1"),
            ("codec=randomk", "participation=0.7", "adapter=lora"),
        ),
    ],
    ids=" ".join,
)
def test_a_stack_of_clients_codes_as_each_alone(train, words):
    """What a client has not sent in round 1 is in its update of round 2, under both runners."""
    words = ("num_rounds=3", "model.dtype=float64", *FEDAVG[:1], *words)
    one, stack = (train(*words, f"runtime.runner={kind}", folder=kind) for kind in ("sequential", "cohort"))
    for name, value in one.model.items():
        torch.testing.assert_close(stack.model[name], value, rtol=0, atol=1e-9)
    same = ("bytes_up_by_role", "clients_failed", "bytes_down_by_role")
    assert [[row.get(key) for key in same] for row in stack.rows] == [
        [row.get(key) for key in same] for row in one.rows
    ]


def test_int8_is_a_quarter_and_keeps_the_model_near(train):
    """Of the whole update little is lost, and the clock counts the coded bytes."""
    clock = ("clock=profiles", "clock.distribution=equal", "clock.uplink=1")
    plain = train(*FEDAVG, *clock, folder="plain")
    coded = train(*FEDAVG, *clock, "codec=int8", folder="coded")
    up = [sum(run.rows[1]["bytes_up_by_role"].values()) for run in (plain, coded)]
    assert 0.25 < up[1] / up[0] < 0.27
    uploads = [sum(one[3] for one in run.rows[1]["virtual_by_client"].values()) for run in (plain, coded)]
    for run, seconds in zip((plain, coded), uploads, strict=True):
        assert seconds == pytest.approx(run.rows[1]["bytes_up"] * 8 / 1e6, rel=1e-3)
    moved = torch.cat([(plain.model[n] - coded.model[n]).flatten() for n in plain.model]).norm()
    size = torch.cat([value.flatten() for value in plain.model.values()]).norm()
    assert 0 < moved < 0.01 * size


@pytest.mark.parametrize(
    "words",
    [
        ("codec=topk", "participation=0.7"),
        *slowly(
            ("codec=randomk",),
            ("codec=int4",),
            ("codec=topk", "strategy=fedper"),
            ("codec=topk", "clock=profiles", "pacing=buffered", "pacing.buffer=2"),
        ),
    ],
    ids=" ".join,
)
def test_killed_and_resumed_to_the_bit(train, monkeypatch, words):
    """What clients have kept of their updates is in the checkpoint."""
    words = ("strategy=fedavg", "num_rounds=4", "checkpoint.every=1", *words)
    _, whole = resumed_and_whole(train, monkeypatch, *words)
    assert whole.rows[-1]["clients_ok"]


def test_a_round_of_topk_by_hand(train):
    """One client: the model moves at the sent places alone, and the rest is in the client's state."""
    words = ("strategy=fedavg", "num_clients=1", "num_rounds=1", "checkpoint.every=1", "model.dtype=float64")
    plain = train(*words, folder="plain")
    coded = train(*words, "codec=topk", folder="coded")
    trained = checkpoint.newest(plain.folder).model
    kept = checkpoint.newest(coded.folder).clients["0"]
    start = train(*words[:2], "num_rounds=0", words[-1], folder="start").model
    for name, value in coded.model.items():
        update = trained[name] - start[name]
        sent = value - start[name]
        assert int((sent != 0).sum()) <= -(-update.numel() // 10)
        assert torch.allclose(sent + kept[f"residual/{name}"], update, rtol=0, atol=1e-15)


class Signs(UpdateCodec):
    """A package's codec: one bit per value, and no scale."""

    def size(self, count, itemsize):
        return -(-count // 8)

    def pack(self, update, drawn):
        return np.packbits(update.numpy() > 0)

    def unpack(self, data, count, dtype):
        return torch.from_numpy(np.unpackbits(data, count=count) * 2e-3 - 1e-3).to(dtype)


def test_a_package_s_codec_is_one_class(train, monkeypatch):
    monkeypatch.setitem(registry.REGISTERED, ("codecs", "signs"), Signs)
    run = train(*FEDAVG, "codec=int8", "codec.name=signs")
    count = sum(value.numel() for value in run.model.values())
    sent = sum(run.rows[1]["bytes_up_by_role"].values()) / run.rows[1]["clients_ok"]
    assert count / 8 <= sent <= count / 8 + len(run.model)
    assert run.rows[-1]["clients_failed"] == 0


def test_the_request_says_the_codec_and_its_settings():
    config = compose_run([*SMALL, *FEDAVG, "codec=int8"]).config
    strategy = planning_strategy(config, {"a": torch.zeros(2)}, {})
    request = strategy.request(1, {})
    assert request.codec == ("int8", {"block": 128, "rotate": False})
    assert read_train_request(request.json) == request
    plain = planning_strategy(compose_run([*SMALL, *FEDAVG]).config, {"a": torch.zeros(2)}, {}).request(1, {})
    assert plain.codec is None and "int8" not in plain.json
    assert isinstance(plain, TrainRequest) and plain.coder is None


@pytest.mark.slow
def test_coding_follows_the_noise(train):
    """Under privacy: the same epsilon as without a codec, from the same accountant."""
    words = (*FEDAVG, "privacy=dp_sgd", "privacy.epsilon=8", "privacy.seeded_noise=true")
    plain, coded = train(*words, folder="plain"), train(*words, "codec=int8", folder="coded")
    assert [row.get("epsilon") for row in plain.rows] == [row.get("epsilon") for row in coded.rows]
    assert coded.rows[-1]["bytes_up"] < 0.35 * plain.rows[-1]["bytes_up"]
    assert not same_bits(plain.model, coded.model)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_flower_simulation_equals_one_process(train, tmp_path):
    words = ("strategy=fedavg", "num_rounds=3", "codec=topk", "client=sgd")
    one = train(*words, folder="one")
    folder = tmp_path / "flower"
    assert (
        command([*SMALL, *words, "runtime=flower", f"output_dir='{folder}'", f"hydra.run.dir='{folder}'"])
        == 0
    )
    other = Run(folder)
    for row, twin in zip(one.rows, other.rows, strict=True):
        for key in ("round", "clients", "bytes_up", "bytes_up_by_role"):
            assert row.get(key) == twin.get(key), key
    assert all(torch.allclose(one.model[n], other.model[n], atol=1e-5) for n in one.model)
