"""The two runners over random small runs: the same model, the same private parts, the same rows.

The clients are the awkward ones: with a single row, fewer rows than a batch, no validation or no test rows.
"""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from PIL import Image

from fedfrozen_app.core.errors import UserError
from fedfrozen_app.files import checkpoint
from fedfrozen_app.local import sequential, step
from tests.comparing import is_key_bias
from tests.conftest import same_bits, slowly

TRAIN_ROWS = {"one": 1, "two": 2, "five": 5, "thirteen": 13, "twenty": 20}
TEST_ROWS = {
    "two": 3,
    "five": 1,
    "thirteen": 4,
    "twenty": 9,
}  # the client with one row has none to be evaluated on
WORDS = ["dataset=images", "partition=domain", "num_clients=null", "dataset.limit=null", "num_rounds=2"]
WORDS += ["model.dtype=float64", "model.config.num_hidden_layers=1", "track.tensorboard=false"]
TIMES = ("seconds", "client_seconds")


@pytest.fixture
def pictures(tmp_path):
    rng = np.random.default_rng(0)
    for split, sizes in (("train", TRAIN_ROWS), ("test", TEST_ROWS)):
        for domain, size in sizes.items():
            for number in range(size):
                folder = tmp_path / "pictures" / split / domain / "abc"[number % 3]
                folder.mkdir(parents=True, exist_ok=True)
                pixels = rng.integers(0, 256, (8, 8), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path / "pictures"


def one_of(key, *values):
    return st.sampled_from([f"{key}={value}" for value in values])


RUNS = st.tuples(
    st.sampled_from(
        [
            "strategy=fedavg",
            "strategy=fedprox strategy.mu=0.1",
            "strategy=fedfrozen strategy.warmup_rounds=1",
            "strategy=fedfrozen strategy.warmup_rounds=0 strategy.freeze_scope=v",
            "strategy=local",
        ]
    ),
    st.sampled_from(["client=adamw client.weight_decay=0.1", "client=sgd client.momentum=0.9"]),
    one_of("client.clip", "null", 0.05),
    one_of("client.class_weights", "true", "false"),
    one_of("client.head_lr", "null", 0.006),
    one_of("client.local_epochs", 1, 3),
    one_of("client.local_steps", "null", 1, 4),
    one_of("client.batch_size", 1, 4, 7, 64),
    one_of("client.lr_schedule", "constant", "cosine"),
    one_of("participation", 0.3, 0.6, 1),
    one_of("runtime.max_block", "null", 1, 2, 50),
    one_of("dataset.client_validation", 0, 0.1, 0.4),
    one_of("eval_every", 1, 2),
    one_of("aggregation", "mean", "median"),
    one_of("seed", 0, 1),
)


def check_alike(train, pictures, words):
    common = [*WORDS, f"dataset.path={pictures}", *words]
    one, other = (train(*common, f"runtime.runner={r}", folder=r) for r in ("sequential", "cohort"))
    for row, twin in zip(one.rows, other.rows, strict=True):
        assert_close(*({k: v for k, v in each.items() if k not in TIMES} for each in (row, twin)))
    states = [{"": run.model} | checkpoint.newest(run.folder).clients for run in (one, other)]
    assert set(states[0]) == set(states[1])
    for client, arrays in states[0].items():
        for name, value in arrays.items():
            if not is_key_bias(name):
                torch.testing.assert_close(states[1][client][name], value, rtol=1e-5, atol=1e-8)
    return one, other


def assert_close(one, other, place=""):
    if isinstance(one, dict):
        assert set(one) == set(other), place
        for key, value in one.items():
            assert_close(value, other[key], f"{place}/{key}")
    elif isinstance(one, float):
        assert other == pytest.approx(one, rel=1e-5, abs=1e-7), place
    else:
        assert one == other, place


# Not shrunk: a run takes a second, and the words of the one that failed say what to look at.
@settings(
    max_examples=4,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(RUNS)
@pytest.mark.slow
def test_random_runs_are_alike(train, pictures, words):
    check_alike(train, pictures, " ".join(words).split())


@pytest.mark.parametrize("strategy", ["local", *slowly("fedavg")])
def test_a_client_without_validation_rows_changes_no_other_s_metrics(train, pictures, strategy):
    words = [f"strategy={strategy}", "personal=false"]
    check_alike(train, pictures, words)
    by_client = train(*WORDS, *words, f"dataset.path={pictures}", "runtime.runner=cohort").rows[-1][
        "by_client"
    ]
    assert len(by_client["client_val_after"]) == 4  # of five clients, one has a single row
    if strategy == "local":
        assert len(by_client["personal_accuracy"]) == 4


@pytest.mark.parametrize("runner", ["sequential", "cohort"])
def test_a_round_that_diverged_does_not_stay_with_a_client_for_good(train, monkeypatch, runner):
    """Its private arrays would be NaN in every later round: it continues with those of the round before."""
    real = sequential.learning_rate

    def too_high(settings, server_round, num_rounds):
        return 1e30 if server_round == 2 else real(settings, server_round, num_rounds)

    for module in (sequential, step):
        monkeypatch.setattr(module, "learning_rate", too_high)
    run = train(
        "strategy=local", "client=sgd", f"runtime.runner={runner}", "checkpoint.keep=9", "personal=false"
    )
    assert [row["clients_ok"] for row in run.rows[1:]] == [3, 0, 3]
    # The server has no model of its own: its initial one must not stand for a round without replies.
    assert "test_accuracy" in run.rows[1] and "test_accuracy" not in run.rows[2]
    assert "selected_round" not in run.summary
    first, second = (checkpoint.read(run.folder / "checkpoints" / str(n)).clients for n in (1, 2))
    assert all(same_bits(first[client], second[client]) for client in first)


def test_data_without_test_rows_end_in_a_sentence(train, tmp_path):
    """A class with a single row trains on it: nothing is left to be held out."""
    for name in "abcdef":
        folder = tmp_path / "pictures" / name
        folder.mkdir(parents=True)
        Image.new("L", (8, 8)).save(folder / "1.png")
    words = [
        "dataset=images",
        f"dataset.path={tmp_path / 'pictures'}",
        "partition=iid",
        "partition.min_size=2",
    ]
    with pytest.raises(UserError, match="no test rows"):
        train(*words, "num_clients=2")


@pytest.mark.parametrize(
    "how", ["runtime.runner=cohort", *slowly("runtime.runner=sequential", "privacy=dp_sgd")]
)
def test_a_head_with_a_rate_of_its_own_moves_by_it(train, how):
    """One step of SGD from the same start, and with the same noise: only the head goes further, 3 times."""
    words = [how, "strategy=fedavg", "client=sgd", "client.momentum=0", "client.lr=0.01", "num_rounds=1"]
    words += ["client.local_steps=1", "model.dtype=float64"]
    words += ["privacy.seeded_noise=true"] if how.startswith("privacy") else []
    start = train(*words, "num_rounds=0", folder="start").model
    one, other = train(*words, folder="one").model, train(*words, "client.head_lr=0.03", folder="other").model
    for name, value in start.items():
        times = 3 if name.startswith("classifier") else 1
        torch.testing.assert_close(other[name] - value, times * (one[name] - value), rtol=1e-9, atol=1e-12)
    assert (one["classifier.weight"] - start["classifier.weight"]).norm() > 1e-4
