"""Whole runs of a language model: both runners alike, private ones, and one that learns."""

import json
import math

import pytest

from fedfrozen_app.config import compose_config, read, resolved
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.local.worker import Worker
from tests.conftest import SMALL

WORDS = ["dataset=instructions", "dataset.max_tokens=24", "model.config.num_key_value_heads=1"]
GPT2 = ["dataset=instructions", "dataset.max_tokens=24", "model=gpt2_tiny", "model.config.hidden_size=16"]
GPT2 += [word for word in SMALL if "model.config" not in word]
EXACT = ["model.dtype=float64", "client=sgd", "client.lr=0.1", "num_rounds=2", "checkpoint.keep=9"]


@pytest.fixture
def prompts(tmp_path):
    """Rows of unlike lengths: what is a mean over rows, and what over tokens, differs."""
    lines = [
        {"prompt": f"{n % 7}+{n % 5}?", "answer": "is " * (n % 4) + str(n % 7 + n % 5), "kind": "ab"[n % 2]}
        for n in range(120)
    ]
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return f"dataset.path={path}"


def alike(one, other):
    for name, value in one.model.items():
        apart = float((other.model[name] - value).norm())
        if not name.endswith("key.bias"):  # softmax ignores it
            assert apart <= 1e-9 * max(1.0, float(value.norm())), name
    for row, twin in zip(one.rows, other.rows, strict=True):
        for key in ("test_loss", "test_perplexity", "test_accuracy", "train_loss", "client_val_after"):
            if key in row:
                assert row[key] == pytest.approx(twin[key], rel=1e-9), key


FROZEN = ["strategy=fedfrozen", "strategy.warmup_rounds=1"]


@pytest.mark.parametrize(
    ("words", "strategy"),
    [
        pytest.param(WORDS, ["strategy=fedprox"], id="llama-fedprox", marks=pytest.mark.slow),
        pytest.param(WORDS, FROZEN, id="llama-frozen", marks=pytest.mark.slow),
        pytest.param(GPT2, FROZEN, id="gpt2-frozen"),
    ],
)
def test_both_runners_give_the_same_model(train, prompts, words, strategy):
    given, small = [*words, prompts, *EXACT, *strategy], words is not GPT2
    runs = [
        train(*given, f"runtime.runner={runner}", folder=runner, small=small)
        for runner in ("sequential", "cohort")
    ]
    alike(*runs)
    row = runs[0].rows[-1]
    assert row["test_perplexity"] == pytest.approx(math.exp(row["test_loss"]))
    if strategy is FROZEN:
        before, after = runs[1].model_after(1), runs[1].model_after(2)
        kernel = {name for name in before if ".q_proj" in name or ".k_proj" in name}
        kernel |= {name for name in before if ".c_attn.query" in name or ".c_attn.key" in name}
        assert kernel and all(before[name].equal(after[name]) for name in kernel)
        assert not any(before[name].equal(after[name]) for name in before if "v_proj.weight" in name)


@pytest.mark.slow
def test_personal_metrics_are_means_over_tokens(train, prompts):
    run = train(*WORDS, prompts, "strategy=local", "num_rounds=1", "partition.alpha=0.2")
    row = run.rows[-1]
    config = read(resolved(compose_config(run.summary["command"].split()[1:])))
    worker = Worker(config, corpus := load_corpus(config), shares=share_out(corpus, config, 3))
    tokens = [int((worker.data.client_test_rows(str(n)).labels[:, 1:] >= 0).sum()) for n in range(3)]
    own = row["by_client"]["personal_accuracy"]
    wanted = sum(own[str(n)] * tokens[n] for n in range(3)) / sum(tokens)
    assert row["personal_accuracy"] == pytest.approx(wanted)
    assert row["personal_tokens"] == sum(tokens)
    assert row["personal_perplexity"] == pytest.approx(math.exp(row["personal_loss"]))


@pytest.mark.slow
def test_a_private_run_clips_rows_and_runs(train, prompts):
    words = ["privacy=dp_sgd", "privacy.epsilon=50", "strategy=fedavg", "num_rounds=1", "num_clients=2"]
    row = train(*WORDS, prompts, *words).rows[-1]
    assert row["clients_ok"] == 2 and 0 < row["epsilon_max"] <= 50 and row["test_perplexity"] > 1


@pytest.mark.slow
def test_a_small_model_learns_to_answer(train, prompts, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "samples.json").write_text('[{"prompt": "stale", "before": "stale"}]')
    words = ["num_rounds=4", "client.local_epochs=5", "client.lr=0.02", "model.config.hidden_size=32"]
    run = train(*WORDS, prompts, *words, *FROZEN)
    first, last = run.rows[0]["test_perplexity"], run.rows[-1]["test_perplexity"]
    assert last < first / 20 and run.summary["final_test_perplexity"] == last
    assert run.rows[-1]["test_accuracy"] > 0.5
    samples = json.loads((run.folder / "samples.json").read_text())
    assert "stale" not in str(samples)
    assert len(samples) == 3 and set(samples[0]) == {"prompt", "answer", "before", "after"}
    assert samples[0]["prompt"].endswith("?") and samples[0]["before"] != samples[0]["after"]
    page = (run.folder / "report.html").read_text()
    assert "<h2>Text</h2>" in page and samples[0]["prompt"] in page and "Final test perplexity" in page


@pytest.mark.slow
def test_adapters_of_a_language_model_are_the_same_in_both_runners(train, prompts):
    words = [*WORDS, prompts, *EXACT, *FROZEN, "adapter=lora", "adapter.rank=2"]
    runs = [train(*words, f"runtime.runner={runner}", folder=runner) for runner in ("sequential", "cohort")]
    alike(*runs)
    assert runs[0].rows[-1]["test_perplexity"] < runs[0].rows[0]["test_perplexity"]
    again = train(*words, "model.gradient_checkpointing=true", folder="again")
    alike(runs[0], again)
