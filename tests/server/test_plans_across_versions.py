"""A reply belongs to the plan it was asked under: which names it changes, its bytes, and the ledger."""

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import slowly

CLOCK = ("clock=profiles", "clock.uplink=1", "clock.spread=1", "num_clients=4", "checkpoint.every=1")
KEEP = ("checkpoint.keep=99", "eval_every=9")
KERNEL = ("q_proj", "k_proj")


def model_after(run, number):
    return load_file(run.folder / "checkpoints" / str(number) / "model.safetensors")


def is_kernel(name):
    return any(f".{kind}." in name for kind in KERNEL)


@pytest.mark.parametrize("more", [(), *slowly(("adapter=lora", "adapter.targets=[query,value]"))])
def test_a_late_reply_of_the_warmup_changes_no_kernel_after_the_freeze(train, more):
    """Buffer of one, so that each step is one client's update."""
    words = ("strategy=fedfrozen", "strategy.warmup_rounds=1", "pacing=buffered", "pacing.concurrency=4")
    run = train(*words, *more, "pacing.buffer=1", *CLOCK, *KEEP, "num_rounds=8")
    rows = run.rows[1:]
    late = [row["round"] for row in rows if row["round"] - row["pacing"]["used"][0][1] == 1 < row["round"]]
    assert late, "no reply of the warm-up came after the freeze"
    first = model_after(run, 1)
    for number in range(2, 9):
        before, after = model_after(run, number - 1), model_after(run, number)
        changed = {name for name in after if not torch.equal(after[name], before[name])}
        assert changed == {name for name in after if not is_kernel(name)}
    assert all(torch.equal(first[name], value) for name, value in after.items() if is_kernel(name))
    # Its bytes travelled, and count where it arrived; those of the others hold no kernel.
    size = rows[0]["bytes_up_by_role"]["query"]
    for row in rows[1:]:
        assert row["bytes_up_by_role"].get("query", 0) == (size if row["round"] in late else 0)
    # The kernel is sent with the first model, and once more after the warm-up has changed it.
    down = [row["bytes_down_by_role"].get("query", 0) for row in rows]
    assert down[0] == 4 * size and sum(down[1:]) == size * len(
        {client for row in rows[1:] for client in row["virtual_by_client"]}
    )


@pytest.mark.parametrize(
    "words",
    [
        ("strategy=safl", "strategy.top_k=1"),
        *slowly(
            ("strategy=safl", "strategy.top_k=1", "strategy.keep=0.5"),
            ("strategy=fedavg", "adapter=lora"),
            ("strategy=fedavg", "adapter=lora", "adapter.rule=ffa"),
            ("strategy=fedper",),
            ("strategy=fedfrozen", "strategy.warmup_rounds=2"),
        ),
    ],
)
def test_bytes_and_times_agree(train, words):
    """Bytes down count in the round that asked, those up in the round in which the reply arrives."""
    clock = (
        "clock=profiles",
        "clock.uplink=1",
        "clock.downlink=8",
        "clock.distribution=equal",
        "num_clients=4",
    )
    run = train(*words, *clock, "pacing=buffered", "pacing.concurrency=3", "pacing.buffer=2", "num_rounds=5")
    uploads = {}
    for row in run.rows[1:]:
        number, times = row["round"], row["virtual_by_client"]
        assert sum(time[1] for time in times.values()) == pytest.approx(row["bytes_down"] / 1e6, abs=5e-6)
        uploads |= {(client, number): time[3] for client, time in times.items()}
        arrived = sum(uploads.pop((client, number - age)) for client, age in row["pacing"]["used"])
        assert arrived == pytest.approx(row["bytes_up"] * 8 / 1e6, abs=5e-6)
    # What is on its way when the run ends has not arrived.
    assert {client for client, _ in uploads} == set(run.rows[-1]["pacing"]["at_work"])
    assert any(row["staleness_max"] for row in run.rows[1:])


def test_a_late_reply_of_safl_changes_the_layers_that_its_client_chose(train):
    words = (
        "strategy=safl",
        "strategy.top_k=1",
        "pacing=buffered",
        "pacing.concurrency=4",
        "pacing.buffer=1",
    )
    run = train(*words, *CLOCK, *KEEP, "num_rounds=6", "partition.alpha=0.1")
    assert any(row["staleness_max"] for row in run.rows[1:])
    for row in run.rows[2:]:
        ((_, (layer,)),) = row["selection"].items()
        before, after = model_after(run, row["round"] - 1), model_after(run, row["round"])
        changed = {name for name in after if not torch.equal(after[name], before[name])}
        assert changed and all(f"layer.{layer}." in name or ".layer." not in name for name in changed)
        assert not any("embeddings" in name for name in changed)
