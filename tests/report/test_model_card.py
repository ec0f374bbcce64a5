"""A model card says what the run's files say, and no more than a policy lets it."""

import json

import pytest

from fedfrozen_app.report.loading_example import Exported
from fedfrozen_app.report.model_card import model_card

EXPORTED = Exported("text", "BertForSequenceClassification", 1234, ("ill", "well"), reads="Texts as bytes.")
CONFIG = {
    "strategy": {"name": "fedavg"},
    "dataset": {"name": "notes", "kind": "text", "subgroup_floor": 10},
    "runtime": {"name": "inprocess"},
    "privacy": {"name": "none", "selection": "noisy"},
    "secure_aggregation": {"name": "off", "min_cohort": 3},
    "client": {"local_epochs": 2, "batch_size": 8, "optimizer": "sgd", "lr": 0.1, "precision": "float32"},
    "adapter": {"name": "none"},
    "partition": {"name": "natural"},
    "model": {"source": "config", "path": None},
    "participation": 0.5,
    "num_rounds": 4,
}
ROWS = {"train": {"rows": 1500}, "test": {"rows": 200}, "server_validation": {"rows": 100}}
CLIENTS = {"0": {"name": "north_<b>", "rows": 1390}, "1": {"name": "south", "rows": 7}}


@pytest.fixture
def card(tmp_path):
    def write(exported=EXPORTED, fairness=None, data=True, summary=None, **changed):
        config = CONFIG | {key: CONFIG[key] | values for key, values in changed.items()}
        found = {"config": config, "rounds": 3, "seed": 5, "final_test_accuracy": 0.75, "git_commit": None}
        found["versions"] = {"fedfrozen": "0.1.0", "torch": "2", "transformers": "5"}
        (tmp_path / "summary.json").write_text(json.dumps(found | (summary or {})))
        (tmp_path / "model.safetensors").write_bytes(b"weights")
        splits = {"train": {"read": 1510, "dropped": {"no label": 10}}}
        record = {"splits": splits, "rows": ROWS, "clients": CLIENTS, "classes": [], "warnings": []}
        for name, content in (("data.json", record if data else None), ("fairness.json", fairness)):
            (tmp_path / name).unlink(missing_ok=True)
            if content is not None:
                (tmp_path / name).write_text(json.dumps(content))
        return model_card(tmp_path, exported)

    return write


def test_data_are_told_in_counts_and_small_ones_are_not(card):
    text = card()
    assert (
        "1,500 train rows, of which the server kept 100" in text
        and "10 rows of the files were left out" in text
    )
    assert "| north\\_\\<b\\> | 1,390 |" in text and "| south | fewer than 10 |" in text
    assert "2 labels, in this order: ill, well." in text and "Accuracy on the test rows | 0.7500" in text
    assert "may repeat what is in its train rows" in text and "saw each client's update" in text
    assert "3, of 4" in text and "random weights" in text


def test_a_plain_model_of_the_same_rows_stands_beside_the_result(card):
    found = {"name": "TF-IDF and logistic regression", "accuracy": 0.81, "train_rows": 2000}
    assert "For comparison: TF-IDF and logistic regression | 0.8100" in card(summary={"baseline": found})
    assert "For comparison" not in card(summary={"baseline": None}) + card()


def test_with_privacy_epsilon_is_told_and_no_client_s_rows(card):
    spent = {"epsilon": {"0": 3.1, "1": 7.96}, "delta": 1e-5, "privacy_unit": "patient", "private": True}
    text = card(privacy={"name": "dp_sgd"}, secure_aggregation={"name": "on"}, summary=spent)
    assert "epsilon at most 7.96 and delta 1e-05, for one patient" in text
    assert "summed under masks, over 3 clients or more" in text
    assert "1,390" not in text and "1,500" not in text and "epsilon does not cover such numbers" in text
    text = card(privacy={"name": "dp_sgd"}, summary=spent | {"private": False})
    assert "Not private: the noise of this run came from its seed" in text and "7.96" not in text


def test_sites_rows_are_the_sites_to_tell(card):
    text = card(runtime={"name": "deployed"})
    assert "The sites' rows stayed with them" in text and "1,390" not in text and "1,500" not in text


def test_fairness_and_calibration_are_the_global_model_s(card):
    gap = {"worst": "south", "best": "north", "worst_accuracy": 0.5, "best_accuracy": 0.9}
    model = {"gaps": {"site": gap | {"gap": 0.4, "low": 0.1, "high": 0.6}}, "groups": {}, "reliability": []}
    model["all"] = {"accuracy": 0.75, "ece": 0.123}
    text = card(fairness={"floor": 10, "models": {"global": model}})
    assert "| site | south (0.500) | north (0.900) | 0.400 (0.100 to 0.600) |" in text
    assert "Expected calibration error on the test rows: 0.123" in text
    text = card()
    assert "did not evaluate this model by group" in text and "take a score for an order" in text


def test_an_adapter_names_its_base(card):
    adapter = Exported("text", "Bert", 9, ("a", "b"), adapter=True)
    assert 'from_pretrained(f"{folder}/base")' in card(adapter)
    elsewhere = card(Exported("text", "Bert", 9, ("a", "b"), adapter=True, base="org/bert"))
    assert "'org/bert', id2label=labels" in elsewhere and "library_name: peft" in elsewhere


def test_an_older_run_has_a_card_too(card):
    assert "The run has no record of its rows" in card(data=False)
