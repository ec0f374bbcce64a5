"""Runs with coded broadcasts: the plan's bytes, killed and resumed, forked, private, in every runtime."""

import pytest
import torch

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.commands.forecast import forecast
from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.files import checkpoint
from tests.conftest import SMALL, Run, same_bits, slowly
from tests.resuming import killed_before_checkpoint, resumed_and_whole

FEDAVG = ("strategy=fedavg", "num_rounds=4", "codec.down=int8")
MASKED = ("secure_aggregation=on", "secure_aggregation.max_examples=200", "secure_aggregation.bits=16")


@pytest.mark.parametrize(
    "words",
    [
        ("participation=0.67", "seed=2"),
        *slowly(
            ("strategy=fedfrozen", "strategy.warmup_rounds=2", "codec=int4"),
            ("strategy=fedpart",),
            ("strategy=fedper", "participation=0.67"),
            ("strategy=scaffold", "client=sgd"),
            ("codec.down=topk", "codec.share=0.05", "participation=0.5"),
            ("codec.down=float16", "adapter=lora", "adapter.rule=ffa"),
        ),
    ],
    ids=" ".join,
)
def test_the_run_sends_the_bytes_of_the_plan(train, words):
    words = (*FEDAVG, *words)
    found = forecast(read(resolved(compose_config([*SMALL, *words]))))
    rows = train(*words).rows[1:]
    assert [dict(part) for part in found.down_by_round] == [row["bytes_down_by_role"] for row in rows]
    assert all(row["clients_failed"] == 0 for row in rows)


@pytest.mark.slow
def test_under_masks_what_did_not_change_is_not_sent(train):
    """Attention is blind to the biases of its keys: their gradient is an error of rounding, of which a masked
    sum of 16 bits keeps nothing. The plan counts an array that trains as changed."""
    words = (*FEDAVG, *MASKED)
    found = forecast(read(resolved(compose_config([*SMALL, *words]))))
    rows = train(*words).rows[1:]
    fewer = []
    for planned, row in zip(map(dict, found.down_by_round), rows, strict=True):
        sent = row["bytes_down_by_role"]
        fewer.append(planned.pop("key") - sent.pop("key"))
        assert planned == sent and row["clients_failed"] == 0
    assert fewer[0] == 0 and min(fewer) >= 0 < max(fewer)


@pytest.mark.slow
def test_a_third_of_the_bytes_and_nearly_the_same_model(train):
    """The clock counts the coded bytes, and the server's model is not rounded."""
    clock = ("clock=profiles", "clock.distribution=equal", "clock.downlink=1")
    plain = train(*FEDAVG[:2], *clock, folder="plain")
    coded = train(*FEDAVG, *clock, folder="coded")
    down = [sum(run.rows[3]["bytes_down_by_role"].values()) for run in (plain, coded)]
    assert 0.25 < down[1] / down[0] < 0.4
    for run in (plain, coded):
        seconds = sum(one[1] for one in run.rows[3]["virtual_by_client"].values())
        assert seconds == pytest.approx(run.rows[3]["bytes_down"] * 8 / 1e6, rel=1e-3)
    moved = torch.cat([(plain.model[n] - coded.model[n]).flatten() for n in plain.model]).norm()
    size = torch.cat([value.flatten() for value in plain.model.values()]).norm()
    assert 0 < moved < 0.01 * size


@pytest.mark.parametrize(
    "words",
    [
        ("participation=0.67", "seed=2"),
        *slowly(
            ("codec=topk", "codec.down=topk"),
            ("strategy=scaffold", "client=sgd"),
            ("strategy=fedfrozen", "strategy.warmup_rounds=2"),
            ("clock=profiles", "pacing=buffered", "pacing.buffer=2"),
        ),
    ],
    ids=" ".join,
)
def test_killed_and_resumed_to_the_bit(train, monkeypatch, words):
    """What clients hold is in the checkpoint, and so are the codes that lead there."""
    _, whole = resumed_and_whole(train, monkeypatch, *FEDAVG, "checkpoint.every=1", *words)
    assert whole.rows[-1]["clients_ok"]


@pytest.mark.slow
def test_a_masked_run_is_resumed_to_the_bit(train, monkeypatch):
    words = (*FEDAVG, "checkpoint.every=1", *MASKED)
    whole = train(*words, folder="whole")
    with killed_before_checkpoint(monkeypatch, 3):
        train(*words, folder="broken")
    resumed = train(*words, folder="broken", resume=True)
    assert same_bits(whole.model, resumed.model)
    assert [row["bytes_down"] for row in resumed.rows[1:]] == [row["bytes_down"] for row in whole.rows[1:]]


@pytest.mark.slow
def test_forks(train):
    """One with the same codec goes on as the run did; one without is sent the exact model, and so is one with
    another codec."""
    constant = "client.lr_schedule=constant"
    whole = train(*FEDAVG, constant, "checkpoint.every=1", "checkpoint.keep=4", folder="whole")
    start = f"from='{whole.folder / 'checkpoints' / '2'}'"
    same = train(*FEDAVG, constant, start, folder="same")
    assert same_bits(same.model, whole.model)
    assert same.rows[-1]["bytes_down"] == whole.rows[-1]["bytes_down"]
    model = sum(value.nbytes for value in whole.model.values())
    for number, codec in enumerate(("none", "int4")):
        other = train(*FEDAVG, f"codec.down={codec}", constant, start, folder=f"fork-{number}")
        assert sum(other.rows[3]["bytes_down_by_role"].values()) == 3 * model
        assert all(row["clients_failed"] == 0 for row in other.rows[1:])


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["sequential", "cohort"])
def test_both_runners_train_from_what_clients_hold(train, runner):
    """One client and one round of SGD from it: w₂ = w₁ + (trained − v₁), with w₁ − v₁ in the checkpoint."""
    words = ("num_clients=1", "model.dtype=float64", f"runtime.runner={runner}")
    words = (*words, "checkpoint.every=1", "checkpoint.keep=4")
    run = train(*FEDAVG, *words, "codec.down=int4", folder="coded")
    states = [checkpoint.read(run.folder / "checkpoints" / str(number)) for number in (2, 3)]
    held = {n.removeprefix("broadcast/value/"): v for n, v in states[1].strategy.items() if "/value/" in n}
    assert held and any(not torch.equal(held[name], states[0].model[name]) for name in held)
    plain = train(*FEDAVG[:2], *words, folder="plain")
    for name in held:
        assert (held[name] - states[0].model[name]).abs().max() < 0.2 * (
            plain.model_after(3)[name] - plain.model_after(1)[name]
        ).abs().max() + 1e-12


@pytest.mark.slow
def test_robust_rules_and_noise_compose(train):
    for number, words in enumerate(
        (
            ("aggregation=median",),
            ("privacy=dp_sgd", "privacy.epsilon=8", "privacy.seeded_noise=true"),
            ("strategy=fedper", "codec=int8"),
            ("runtime=ray", "runtime.workers=1"),
        )
    ):
        run = train(*FEDAVG, *words, folder=str(number))
        assert all(row["clients_failed"] == 0 for row in run.rows[1:]), words
        first, last = (sum(run.rows[n]["bytes_down_by_role"].values()) for n in (1, 4))
        assert last < 0.4 * first, words


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_flower_simulation_equals_one_process(train, tmp_path):
    """There the codes themselves travel, and every digest is checked."""
    words = (*FEDAVG, "codec.down=int4", "participation=0.67", "seed=2", "client=sgd")
    one = train(*words, folder="one")
    folder = tmp_path / "flower"
    assert (
        command([*SMALL, *words, "runtime=flower", f"output_dir='{folder}'", f"hydra.run.dir='{folder}'"])
        == 0
    )
    other = Run(folder)
    for row, twin in zip(one.rows, other.rows, strict=True):
        for key in ("round", "clients", "bytes_down", "bytes_down_by_role", "clients_failed"):
            assert row.get(key) == twin.get(key), key
    assert all(torch.allclose(one.model[n], other.model[n], atol=1e-5) for n in one.model)
