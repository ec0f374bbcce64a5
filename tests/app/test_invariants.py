"""What must hold to the bit: in process, sequential, on the CPU with one thread."""

import re

import pytest
import torch
from safetensors.torch import load_file

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.files import checkpoint
from fedfrozen_app.run import federate as running
from tests.conftest import Run, same_bits, slowly
from tests.resuming import kill_in_round, without_times

KEEP_ALL = "checkpoint.keep=100"


def kernel_names(model):
    return [name for name in model if re.search(r"\b(query|key|q_proj|k_proj)\b", name)]


def test_fedprox_without_pull_is_fedavg(train):
    plain = train("strategy=fedavg", folder="a")
    prox = train("strategy=fedprox", "strategy.mu=0", folder="b")
    assert same_bits(plain.model, prox.model)


@pytest.mark.slow
def test_fedprox_with_pull_is_not(train):
    plain = train("strategy=fedavg", folder="a")
    prox = train("strategy=fedprox", "strategy.mu=1", folder="b")
    assert not same_bits(plain.model, prox.model)


def test_fedfrozen_that_never_freezes_is_fedavg(train):
    plain = train("strategy=fedavg", folder="a")
    never = train("strategy=fedfrozen", "strategy.warmup_rounds=3", folder="b")
    assert same_bits(plain.model, never.model)
    assert [row["stage"] for row in never.rows] == ["initial", "warmup", "warmup", "warmup"]


@pytest.mark.parametrize("warmup", [0, 1])
@pytest.mark.slow
def test_kernel_stays_to_the_bit_under_weight_decay(train, warmup):
    run = train(
        "num_rounds=4",
        f"strategy.warmup_rounds={warmup}",
        "client.weight_decay=0.1",
        KEEP_ALL,
    )
    names = kernel_names(run.model)
    assert len(names) == 2 * 2 * 2  # query and key, weight and bias, two layers
    first = run.model_after(max(warmup, 1))
    for server_round in range(max(warmup, 1), 5):
        later = run.model_after(server_round)
        assert all(torch.equal(first[name], later[name]) for name in names)
    rest = [name for name in first if name not in names]
    assert not any(torch.equal(first[name], run.model[name]) for name in rest)


def test_same_seed_same_bits_other_seed_other_bits(train):
    one, again, other = train(folder="a"), train(folder="b"), train("seed=1", folder="c")
    first, second = (run.folder / "model.safetensors" for run in (one, again))
    assert first.read_bytes() == second.read_bytes()
    assert not same_bits(one.model, other.model)


@pytest.mark.slow
def test_dropout_repeats_with_the_seed_too(train):
    dropout = "model.config.hidden_dropout_prob=0.2"
    one, again = train(dropout, folder="a"), train(dropout, folder="b")
    assert same_bits(one.model, again.model)
    assert not same_bits(one.model, train(folder="c").model)


@pytest.mark.slow
def test_cohorts_repeat_and_change_from_round_to_round(train):
    settings = ("num_clients=8", "participation=0.5", "num_rounds=6", "partition=iid")
    one, again = train(*settings, folder="a"), train(*settings, "strategy=fedavg", folder="b")
    cohorts = [row["clients"] for row in one.rows[1:]]
    assert cohorts == [row["clients"] for row in again.rows[1:]]
    assert all(len(cohort) == 4 for cohort in cohorts)
    assert len({tuple(cohort) for cohort in cohorts}) > 1


@pytest.mark.parametrize("stop_after", [3, *slowly(1)])  # after the freeze, and before
def test_resumed_equals_unbroken(train, monkeypatch, stop_after):
    settings = ("num_rounds=4", "strategy.warmup_rounds=2", "participation=0.7")
    whole = train(*settings, folder="whole")
    kill_in_round(monkeypatch, stop_after + 1)
    with pytest.raises(KeyboardInterrupt):
        train(*settings, folder="broken")
    monkeypatch.undo()
    resumed = train(*settings, folder="broken", resume=True)
    assert same_bits(whole.model, resumed.model)
    assert [without_times(row) for row in resumed.rows] == [without_times(row) for row in whole.rows]


@pytest.mark.slow
def test_resume_gives_private_state_back(train, monkeypatch):
    whole = train("strategy=local", folder="whole")
    kill_in_round(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        train("strategy=local", folder="broken")
    monkeypatch.undo()
    resumed = train("strategy=local", folder="broken", resume=True)
    assert resumed.rows[-1]["test_accuracy"] == whole.rows[-1]["test_accuracy"]
    assert resumed.rows[-1]["train_loss"] == whole.rows[-1]["train_loss"]


def test_fork_of_a_fedavg_prefix_is_the_unbroken_fedfrozen(train):
    constant = "client.lr_schedule=constant"  # other schedules run over num_rounds
    prefix = train("strategy=fedavg", "num_rounds=2", constant, folder="prefix")
    frozen = ("strategy=fedfrozen", "strategy.warmup_rounds=2", "num_rounds=4", constant)
    fork = train(*frozen, f"from={prefix.folder}/checkpoints/2", folder="fork")
    assert same_bits(fork.model, train(*frozen, folder="whole").model)
    assert [row["round"] for row in fork.rows] == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_a_fork_has_the_model_of_the_round_it_names_as_its_best(train):
    """Rounds after the fork learn nothing here, so that the best one lies before it."""
    first = train("num_rounds=3", "client.lr=5e-3", "dataset.limit=400", KEEP_ALL)
    best = first.summary["selected_round"]
    words = ["client.lr=1e-12", "dataset.limit=400", "num_rounds=5"]

    def fork(after, folder):
        return train(*words, f"from={first.folder}/checkpoints/{after}", folder=folder)

    late = fork(3, "late")
    assert late.summary["selected_round"] == best < 3
    assert same_bits(load_file(late.folder / "best.safetensors"), first.model_after(best))
    # The first run's file holds a later round's model now: the fork must choose among its own rounds.
    early = fork(best - 1, "early")
    assert early.summary["selected_round"] >= best
    assert (early.folder / "best.safetensors").exists()


@pytest.mark.parametrize("change", ["num_clients=4", "seed=1", "partition=iid", "dataset.limit=200"])
@pytest.mark.slow
def test_nobody_goes_on_with_another_client_s_private_arrays(train, change):
    first = train("strategy=local", "num_rounds=1")
    with pytest.raises(UserError, match=f"another {change.partition('=')[0].partition('.')[0]} than"):
        train("strategy=local", change, f"from={first.folder}/checkpoints/1", folder="fork")


@pytest.mark.parametrize("how", [KeyboardInterrupt, SystemExit])  # the latter is Flower's, of a stopped run
def test_interrupted_run_keeps_what_was_done(train, monkeypatch, tmp_path, how):
    kill_in_round(monkeypatch, 3, how)
    with pytest.raises(how):
        train(folder="broken")
    run = Run(tmp_path / "broken")
    assert run.summary["status"] == "interrupted"
    assert [row["round"] for row in run.rows] == [0, 1, 2]
    assert same_bits(run.model, run.model_after(2))
    assert (run.folder / "report.html").exists()


@pytest.mark.slow
def test_rows_that_were_lost_before_a_checkpoint_are_told(train, caplog):
    """A power cut may keep the checkpoint and take the rows: sums over the rounds are then too low."""
    run = train("num_rounds=2")
    lines = (run.folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    train("num_rounds=3", resume=True)
    assert "are lost" not in caplog.text
    (run.folder / "metrics.jsonl").write_text(lines[0])
    train("num_rounds=4", resume=True)
    assert "of rounds 1, 2 are lost" in caplog.text
    assert [row["round"] for row in run.rows] == [0, 3, 4]


@pytest.mark.parametrize("runner", ["sequential", "cohort"])
@pytest.mark.slow
def test_a_run_that_goes_on_with_another_dtype_has_that_alone(train, runner):
    words = ("strategy.warmup_rounds=0", f"runtime.runner={runner}")  # the kernel is never sent back
    train(*words, "num_rounds=1")
    run = train(*words, "num_rounds=2", "model.dtype=bfloat16", resume=True)
    assert run.rows[-1]["clients_ok"] == 3
    assert {value.dtype for value in run.model.values()} == {torch.bfloat16}


@pytest.mark.slow
def test_a_run_begun_in_a_used_folder_goes_on_as_itself(train, monkeypatch):
    """Later checkpoints of the run before would push out its own, and a resumed run would go on from them."""
    words = ("seed=5", "num_rounds=4", "checkpoint.uploads=0")
    whole = train(*words, folder="whole")
    train("num_rounds=6", "checkpoint.uploads=0", folder="used")
    kill_in_round(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        train(*words, folder="used")
    monkeypatch.undo()
    again = train(*words, folder="used", resume=True)
    assert same_bits(whole.model, again.model)
    assert [without_times(row) for row in again.rows] == [without_times(row) for row in whole.rows]
    for name in ("checkpoints", "uploads"):
        assert checkpoint.numbers(again.folder / name) == checkpoint.numbers(whole.folder / name)
    # So does one that goes back to an earlier round of its own.
    back = train(*words, f"from={again.folder}/checkpoints/3", "num_rounds=3", folder="used")
    assert checkpoint.numbers(back.folder / "checkpoints") == [3]


@pytest.mark.slow
def test_a_run_that_was_killed_in_a_used_folder_has_no_summary(train, monkeypatch):
    """The one before would otherwise be counted as complete, with the rows of this one."""
    run = train("strategy=local")
    assert (run.folder / "personal.json").exists()
    monkeypatch.setattr(running, "write_outputs", lambda *args, **kwargs: {})
    train("strategy=fedavg", "num_rounds=2")
    assert not (run.folder / "summary.json").exists() and not (run.folder / "personal.json").exists()


@pytest.mark.slow
def test_a_run_in_bf16_leaves_the_next_one_its_bits(train):
    """On a CPU without bf16 torch turns oneDNN off when it first meets one."""
    words = ("strategy=fedavg", "num_rounds=1")
    before = train(*words, folder="before")
    train(*words, "client.precision=bf16", folder="between")
    assert same_bits(before.model, train(*words, folder="after").model)
