"""Clients spread over several devices are the same run as on one. Copies on the CPU stand for GPUs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.local.cohort import CohortRunner
from fedfrozen_app.local.multi_gpu import Lane, deal
from fedfrozen_app.local.worker_for import installed
from fedfrozen_app.runtimes.inprocess import runtime
from tests.conftest import same_bits, slowly

EXACT = ("model.dtype=float64", "runtime.runner=cohort", "num_rounds=3", "checkpoint.keep=9")
UNEQUAL = ("num_clients=5", "partition.alpha=0.3", "partition.min_size=4")


@pytest.fixture
def spread(monkeypatch):
    """So many devices from now on."""

    def over(count):
        monkeypatch.setattr(runtime, "devices_of", lambda config: [torch.device("cpu")] * count)

    return over


@pytest.mark.parametrize(
    "words",
    [
        ("strategy=fedfrozen", "runtime.max_block=2"),  # several blocks a device, and the freeze
        *slowly(
            ("strategy=fedper",),  # clients keep arrays of their own
            ("strategy=scaffold", "client=sgd", "client.weight_decay=0"),  # and arrays come with the request
            ("strategy=fedavg", "participation=0.4", "runtime.max_block=1"),  # fewer clients than devices
            ("strategy=fedavg", "aggregation=median"),
        ),
    ],
    ids=" ".join,
)
def test_a_run_over_several_devices_is_the_run_on_one(train, spread, words):
    one = train(*EXACT, *UNEQUAL, *words, folder="one")
    spread(3)
    several = train(*EXACT, *UNEQUAL, *words, folder="several")
    for server_round in (1, 2, 3):
        before, after = one.model_after(server_round), several.model_after(server_round)
        for name, value in before.items():
            torch.testing.assert_close(after[name], value, rtol=1e-9, atol=1e-12)
    for row, twin in zip(one.rows, several.rows, strict=True):
        for key in ("clients", "bytes_up", "bytes_down", "trained_params", "stage"):
            assert row.get(key) == twin.get(key), key
        assert row.get("train_loss") == pytest.approx(twin.get("train_loss"))


@pytest.mark.slow
def test_a_run_over_several_devices_repeats_and_resumes_to_the_bit(train, spread):
    spread(2)
    words = (*EXACT, *UNEQUAL, "strategy.warmup_rounds=1", "client.lr_schedule=constant")
    first, again = (train(*words, folder=name) for name in ("first", "again"))
    assert same_bits(first.model, again.model)
    train(*words, "num_rounds=2", folder="half")
    assert same_bits(first.model, train(*words, folder="half", resume=True).model)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 6))
def test_work_is_dealt_evenly_and_once(counts, lanes):
    places = deal(counts, lanes)
    assert sorted(place for own in places for place in own) == list(range(len(counts)))
    loads = [sum(counts[place] for place in own) for own in places]
    assert max(loads) <= sum(counts) / lanes + max(counts)
    assert max(loads) - min(loads) <= max(counts)


def test_a_client_that_fails_on_another_device_ends_the_round_with_its_words(train, spread, monkeypatch):
    spread(2)
    plain = CohortRunner._block

    def fails(self, *given):
        if self.worker is not installed()[1]:
            raise MemoryError("no room on the second device")
        return plain(self, *given)

    monkeypatch.setattr(CohortRunner, "_block", fails)
    with pytest.raises(MemoryError, match="second device"):
        train(*EXACT, *UNEQUAL, folder="fails")


def test_a_lane_works_ahead_by_one_block():
    lane = Lane.__new__(Lane)
    lane.device, made = torch.device("cpu"), []

    def blocks():
        for number in range(4):
            made.append(number)
            yield number

    read = lane.ahead(blocks())
    seen = []
    for block in read:
        lane._thread.submit(int).result()  # behind the next one
        seen.append((block, len(made)))
    assert seen == [(0, 2), (1, 3), (2, 4), (3, 4)]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["runtime.gpus=2", "device=cpu"],
            "runtime.gpus=2 was asked for, and torch sees 0 GPUs: set runtime.gpus=1.",
        ),
        (["runtime.gpus=0"], "runtime.gpus"),
    ],
)
def test_more_gpus_than_there_are_is_one_sentence(words, sentence, capsys):
    assert command(words) == 2
    assert sentence in capsys.readouterr().err
