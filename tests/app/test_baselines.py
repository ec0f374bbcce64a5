"""A run ends with what a plain model has on the same rows, where that is more."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.baselines.models import dictionary, linear_on_texts, linear_on_words
from fedfrozen_app.baselines.same_rows import SameRows, few, same_rows
from fedfrozen_app.baselines.score import measured, scores
from fedfrozen_app.config import compose_run
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.federated import load_corpus, share_out
from fedfrozen_app.report.console import better_baseline, final_metrics
from fedfrozen_app.run.job import Job
from fedfrozen_app.run.stored_config import as_it_was
from tests.conftest import same_bits


def test_digits_run_says_that_a_linear_model_does_better_and_the_verb_repeats_it(train, capsys):
    run = train("strategy=fedavg", "baseline=true", "num_rounds=1")
    plain = run.summary["baseline"]
    assert plain["name"] == "logistic regression on pixels" and plain["train_rows"] == plain["of_rows"]
    assert plain["accuracy"] > 0.8 > run.summary["final_test_accuracy"]
    assert "fedfrozen baselines" in better_baseline(run.summary, run.folder)
    assert command(["baselines", str(run.folder), "--plain"]) == 0
    assert f"{plain['accuracy']:.4f}" in capsys.readouterr().out
    (again,) = json.loads((run.folder / "baselines.json").read_text())["baselines"]
    assert again["accuracy"] == plain["accuracy"]


def test_nothing_is_said_where_the_run_is_better_or_names_none(tmp_path):
    better = {"final_test_accuracy": 0.9, "baseline": {"name": "x", "accuracy": 0.8}}
    assert better_baseline(better, tmp_path) == better_baseline({}, tmp_path) == ""
    rows = [{"round": 1, "test_accuracy": 0.9}]
    assert dict(final_metrics(rows, better))["On the same rows, x"] == "0.8000"
    some = {"name": "x", "accuracy": 0.8, "train_rows": 1000, "of_rows": 60000}
    assert "(1,000 of 60,000)" in better_baseline({"final_test_accuracy": 0.4, "baseline": some}, tmp_path)


@pytest.mark.parametrize("words", [["strategy=fedavg", "baseline=false"], ["strategy=local"]])
def test_no_baseline_where_it_is_not_wanted_or_nothing_is_shared(train, words):
    assert "baseline" not in train(*words, "num_rounds=1").summary


def test_by_default_small_data_have_a_baseline_and_it_changes_no_result(train):
    usual = train("strategy=fedavg", "num_rounds=1")
    without = train("strategy=fedavg", "num_rounds=1", "baseline=false", folder="without")
    assert usual.summary["baseline"]["accuracy"] > usual.summary["final_test_accuracy"]
    assert usual.rows[-1]["test_loss"] == without.rows[-1]["test_loss"]
    assert same_bits(usual.model, without.model)


def test_without_being_asked_it_takes_fewer_rows():
    index, plain, asked = np.arange(60_000), compose_run([]).config, compose_run(["baseline=true"]).config
    assert (len(few(index, 784, plain)), len(few(index, 784, asked))) == (2_000, 10_000)


def test_texts_without_words_end_no_run(tmp_path, train, caplog):
    lines = [f"{n % 7} {n % 5},{'ab'[n % 2]}" for n in range(80)]
    (tmp_path / "notes.csv").write_text("text,label\n" + "\n".join(lines) + "\n")
    words = ["dataset=text", f"dataset.path={tmp_path}/notes.csv", "model=bert_tiny", "dataset.limit=null"]
    run = train("strategy=fedavg", *words, "num_rounds=1", "partition.alpha=100", "partition.min_size=1")
    assert "baseline" not in run.summary and run.summary["status"] == "completed"
    assert "There is no figure of TF-IDF" in caplog.text


@pytest.mark.parametrize("words", [["runtime=flower"], ["privacy=dp_sgd"], []], ids=str)
def test_a_run_of_before_keeps_that_it_has_none(words):
    words = ["strategy=fedavg", *words]
    had = Job(compose_run(words), Path()).with_settings().resolved_config | {"baseline": False}
    assert as_it_was(words, had).config.baseline is False


@pytest.mark.parametrize("words", [["privacy=dp_sgd"], ["secure_aggregation=on"], ["runtime=flower"]])
def test_rows_that_are_not_the_servers_are_not_read(words):
    with pytest.raises(UserError, match="ignores baseline"):
        _ = compose_run(["strategy=fedavg", "baseline=true", *words]).config


def test_private_run_is_refused_by_the_verb(train):
    run = train("strategy=fedavg", "privacy=dp_sgd", "privacy.seeded_noise=true", "num_rounds=1")
    assert "baseline" not in run.summary
    assert command(["baselines", str(run.folder)]) == 2


def test_it_trains_on_the_clients_rows_and_not_on_those_of_the_server():
    config = compose_run(["dataset=synthetic_clinical", "strategy=fedavg", "num_clients=3"]).config
    corpus = load_corpus(config)
    shares = share_out(corpus, config, 3)
    rows = same_rows(config, corpus, shares, quick=True)
    assert len(rows.train) == len(corpus.train) - len(shares.validation) and len(rows.test) == len(
        corpus.test
    )
    (found,) = scores(rows)
    assert found["accuracy"] > 0.5


def test_a_linear_model_of_texts_finds_classes_of_six_rows():
    """A word says the class, among twelve that say nothing. Regularised as scikit-learn does by default, the
    model names the most frequent class throughout, and would be no bar for a run."""

    def rows(of_the_first, of_others, seed):
        rng = random.Random(seed)
        labels = [0] * of_the_first + [c for c in range(1, 9) for _ in range(of_others)]
        noise = [[f"word{rng.randrange(60)}" for _ in range(12)] for _ in labels]
        return [" ".join([*words, f"sign{c}"]) for words, c in zip(noise, labels, strict=True)], np.array(
            labels
        )

    data = SameRows("text", *rows(60, 6, 0), *rows(20, 20, 1), 108)
    assert measured(data, linear_on_texts(data))["accuracy"] > 0.4


def test_large_data_are_sampled_in_the_same_way_each_time():
    config = compose_run(["baseline=true"]).config
    index = np.arange(60_000)
    chosen = few(index, 784, config)
    assert len(chosen) == 10_000 and np.array_equal(chosen, few(index, 784, config))
    assert len(few(index, 3 * 32 * 32, config)) == 2604 and few(index[:50], 10**9, config) is not None


def test_a_dictionary_by_hand_and_a_linear_tagger():
    train = [["no", "chest", "pain"], ["chest", "pain", "gone"], ["pain", "is", "chest"]] * 4
    tags = [["O", "B-p", "I-p"], ["B-p", "I-p", "O"], ["O", "O", "O"]] * 4
    test = [["Chest", "pain", "unseen"]]
    rows = SameRows("tokens", train, tags, test, [["B-p", "I-p", "O"]], len(train))
    assert dictionary(rows) == [["B-p", "I-p", "O"]]
    assert measured(rows, dictionary(rows)) == {"f1": 1.0}
    assert measured(rows, [["O", "O", "O"]]) == {"f1": 0.0}
    (predicted,) = linear_on_words(rows)
    assert len(predicted) == 3 and predicted[0] == "B-p"
