"""Runs with a clock: the rows' virtual time by hand, the same results as without, resumed, masked, chosen."""

import pytest

from fedfrozen_app.__main__ import run as command
from tests.conftest import same_bits, slowly

CLOCK = ("clock=profiles", "clock.distribution=equal", "clock.uplink=1", "clock.downlink=8")


def parts(row, client):
    wait, download, train, upload = row["virtual_by_client"][client]
    return {"wait": wait, "download": download, "train": train, "upload": upload}


def test_virtual_time_follows_from_bytes_and_operations(train):
    plain = train("strategy=fedfrozen", "strategy.warmup_rounds=1", "num_rounds=2", folder="plain")
    run = train("strategy=fedfrozen", "strategy.warmup_rounds=1", "num_rounds=2", *CLOCK, folder="timed")
    assert same_bits(plain.model, run.model)
    for before, row in zip(run.rows, run.rows[1:], strict=False):
        times = [parts(row, client) for client in row["clients"]]
        assert sum(one["upload"] for one in times) == pytest.approx(row["bytes_up"] * 8 / 1e6, rel=1e-3)
        assert sum(one["download"] for one in times) == pytest.approx(row["bytes_down"] * 8 / 8e6, rel=1e-3)
        slowest = max(sum(one.values()) for one in times)
        assert row["virtual_seconds"] - before["virtual_seconds"] == pytest.approx(slowest, abs=1e-5)
        assert "bytes_by_client" not in row and not any(one["wait"] for one in times)
    warmup, frozen = (parts(run.rows[number], "0") for number in (1, 2))
    assert frozen["upload"] < warmup["upload"] and frozen["train"] < warmup["train"]
    assert run.summary["virtual_seconds"] == run.rows[-1]["virtual_seconds"]
    assert not any("virtual_seconds" in row for row in plain.rows)


def test_a_resumed_run_goes_on_in_its_time(train):
    words = ("strategy=fedavg", *CLOCK, "clock.availability=0.5", "clock.period=3", "checkpoint.every=1")
    whole = train(*words, "num_rounds=3", folder="whole")
    train(*words, "num_rounds=2", folder="parted")
    resumed = train(*words, "num_rounds=3", folder="parted", resume=True)
    assert [row["virtual_seconds"] for row in resumed.rows] == [row["virtual_seconds"] for row in whole.rows]
    assert any(parts(row, client)["wait"] for row in whole.rows[1:] for client in row["clients"])


@pytest.mark.parametrize(
    "words",
    slowly(
        ("secure_aggregation=on",),
        ("strategy=safl", "strategy.top_k=1"),
        ("strategy=fedrep",),
        ("strategy=scaffold",),
        ("privacy=dp_sgd", "privacy.epsilon=8"),
        ("adapter=lora",),
        ("participation=0.5",),
        ("runtime.runner=sequential",),
        ("strategy=fedfrozen", "strategy.warmup_rounds=auto", "num_rounds=3"),
    ),
)
def test_it_counts_whatever_the_method_sends(train, words):
    """The bytes of all clients, and operations where something trains."""
    run = train("strategy=fedavg", "num_rounds=2", *CLOCK, *words)
    for row in run.rows[1:]:
        times = [parts(row, client) for client in row["virtual_by_client"]]
        assert sum(one["upload"] for one in times) == pytest.approx(row["bytes_up"] * 8 / 1e6, rel=1e-3)
        assert all(one["train"] > 0 for one in times)


def test_layers_that_a_client_does_not_train_cost_nothing(train):
    one, both = (
        train("strategy=safl", f"strategy.top_k={count}", "num_rounds=1", *CLOCK, folder=f"top{count}")
        for count in (1, 2)
    )
    assert parts(one.rows[1], "0")["train"] < parts(both.rows[1], "0")["train"]
    assert parts(one.rows[1], "0")["upload"] < parts(both.rows[1], "0")["upload"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["clock.uplink=5"], "clock.uplink"),
        (["clock=profiles", "clock.uplink=0"], "clock.uplink"),
        (["clock=profiles", "clock.distribution=uniform", "clock.spread=1"], "clock.spread=1"),
        (["clock=profiles", "clock.file=nowhere.csv"], "clock.file=nowhere.csv does not exist"),
        (["clock=profiles", "runtime=deployed"], "real sites take real time"),
    ],
)
def test_bad_settings_end_with_a_sentence(tmp_path, capsys, words, sentence):
    assert command([*words, f"output_dir={tmp_path}/run"]) == 2
    text = capsys.readouterr().err
    assert sentence in text and "Traceback" not in text
