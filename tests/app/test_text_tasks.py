"""Whole small runs of the text tasks: each strategy, encoder and decoder, both runners."""

import pytest
import torch

from fedfrozen_app.run.evaluation import trivial_scores
from tests.conftest import slowly

SMALL_TEXT = [
    "dataset=synthetic_clinical",
    "model=bert_small",
    "dataset.limit=120",
    "partition.min_size=4",
    "num_rounds=2",
    "model.config.num_hidden_layers=3",
]
LLAMA = [
    "model.model_type=llama",
    "~model.config.hidden_dropout_prob",
    "~model.config.attention_probs_dropout_prob",
]


@pytest.mark.parametrize("task", ["classification", "multilabel", "entities"])
@pytest.mark.parametrize("extra", [[], LLAMA], ids=["bert", "llama"])
@pytest.mark.slow
def test_every_task_trains_under_safl(train, task, extra):
    run = train("strategy=safl", *SMALL_TEXT, f"dataset.task={task}", "strategy.keep=0.625", *extra)
    row = run.rows[-1]
    assert row["clients_failed"] == 0
    key = "test_accuracy" if task == "classification" else "test_f1"
    assert 0 <= row[key] <= 1 and f"final_{key}" in run.summary
    assert (key == "test_f1") == ("test_accuracy" not in row)
    floor = run.summary[key.replace("test", "majority")]
    assert floor == 0 if task == "entities" else 1 / 12 <= floor < 1
    assert row["selection"].keys() == {"0", "1", "2"} and "selected_round" in run.summary
    assert all(0 < score < 1 for score in row["layer_scores"])


@pytest.mark.parametrize("task", ["entities", *slowly("multilabel")])
def test_both_runners_agree(train, task):
    words = ["strategy=fedavg", *SMALL_TEXT, f"dataset.task={task}", "model.dtype=float64", "num_rounds=1"]
    one = train(*words, "runtime.runner=sequential", folder="one").model
    all_at_once = train(*words, "runtime.runner=cohort", folder="all").model
    for name, value in one.items():
        assert torch.allclose(value, all_at_once[name], rtol=0, atol=1e-9), name


def test_the_share_of_the_most_frequent_class_by_hand():
    assert trivial_scores("image", torch.tensor([4, 1, 1, 2])) == {"majority_accuracy": 0.5}
    assert trivial_scores("language", torch.tensor([[0, 1], [1, 1]])) == {}
    assert trivial_scores("text", torch.tensor([])) == {}


def test_scores_of_what_looks_at_no_row_by_hand():
    assert trivial_scores("text", torch.tensor([4, 1, 1, 2])) == {"majority_accuracy": 0.5}
    assert trivial_scores("tokens", torch.tensor([[0, 3], [1, -100]])) == {"majority_f1": 0.0}
    # Label 1 for all of three rows: right twice, wrong once, and one label is missed: 2*2/(3+3).
    several = torch.tensor([[0, 1], [1, 1], [0, 0]])
    assert trivial_scores("multilabel", several) == {"majority_f1": 4 / 6}
    assert trivial_scores("tokens", torch.zeros(0, 3)) == {}
