"""Buffered pacing over Flower's own simulation: its order of arrival, replayed in one process."""

import pytest

from fedfrozen_app.__main__ import run as command
from tests.conftest import SMALL, Run, same_bits
from tests.server.test_live_pacing import replayed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
STEPS = 5
# Five clients share three places: who is asked next follows from who has replied.
PACED = ("num_clients=5", f"num_rounds={STEPS}", "pacing.concurrency=3", "pacing.buffer=2")


@pytest.mark.parametrize(
    "method",
    [
        ("strategy=fedfrozen", "strategy.warmup_rounds=2"),  # replies of the warm-up arrive after the freeze
        ("strategy=fedavg",),
    ],
    ids=["fedfrozen", "fedavg"],
)
def test_ray_s_order_of_arrival_replays_to_the_same_bits(train, tmp_path, monkeypatch, method):
    monkeypatch.setenv("RAY_worker_niceness", "0")  # else its workers starve beside other tests
    folder = tmp_path / "ray"
    line = [*SMALL, "runtime=flower", "pacing=buffered", "runtime.node_timeout=900", *method, *PACED]
    assert command([*line, f"output_dir={folder}", f"hydra.run.dir={folder}"]) == 0
    live = Run(folder)
    assert [row["round"] for row in live.rows] == list(range(STEPS + 1))
    assert all(len(row["pacing"]["used"]) >= 2 and row["clients_failed"] == 0 for row in live.rows[1:])
    used = [(client, age) for row in live.rows[1:] for client, age in row["pacing"]["used"]]
    assert any(age for _, age in used), "no reply was late"
    same = replayed(train, monkeypatch, live, *method, *PACED)
    for one, other in zip(live.rows[1:], same.rows[1:], strict=True):
        for key in ("clients", "staleness_mean", "staleness_max", "bytes_up", "train_loss", "test_accuracy"):
            assert one[key] == other[key], (key, one["round"])
        for key in ("used", "dropped", "at_work"):
            assert sorted(one["pacing"][key]) == sorted(other["pacing"][key]), (key, one["round"])
    assert same_bits(live.model, same.model)
