"""For whom a model fails: against scikit-learn, by hand, and in the report of a run with subgroups."""

import json

import numpy as np
import pandas
import pytest
from sklearn.metrics import f1_score, roc_auc_score

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.census.fairness_groups import evaluate_groups, flat, gaps, together, unflat
from fedfrozen_app.census.fairness_scores import (
    Predictions,
    auroc,
    bootstrap,
    calibration_error,
    compute_metrics,
    newcombe,
    reliability,
    wilson,
)
from fedfrozen_app.report.fairness import fairness_section, group_rows


def predictions(rows: int = 400, classes: int = 4, seed: int = 0) -> Predictions:
    rng = np.random.default_rng(seed)
    labels = rng.integers(classes, size=rows)
    logits = rng.normal(size=(rows, classes)) + 1.5 * np.eye(classes)[labels]
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return Predictions(shares, labels, np.arange(rows) // 2)


def test_figures_are_those_of_scikit_learn():
    judged = predictions()
    found, said = compute_metrics(judged), judged.probabilities.argmax(axis=1)
    assert found["accuracy"] == pytest.approx((said == judged.labels).mean())
    assert found["f1"] == pytest.approx(f1_score(judged.labels, said, average="macro"))
    area = roc_auc_score(judged.labels, judged.probabilities, multi_class="ovr", average="macro")
    assert found["auroc"] == pytest.approx(area)
    assert (found["rows"], found["people"]) == (400, 200)


def test_several_labels_are_those_of_scikit_learn():
    rng = np.random.default_rng(1)
    truth = rng.integers(2, size=(300, 5))
    judged = Predictions(np.clip(truth * 0.4 + rng.random((300, 5)) * 0.6, 0, 1), truth, np.arange(300))
    said = judged.probabilities > 0.5
    found = compute_metrics(judged)
    assert found["f1"] == pytest.approx(f1_score(truth, said, average="macro"))
    assert found["auroc"] == pytest.approx(roc_auc_score(truth, judged.probabilities, average="macro"))
    assert found["accuracy"] == pytest.approx((truth == said).all(axis=1).mean())


def test_by_hand():
    """Four rows of two classes: 0.9 right, 0.8 wrong, 0.6 right, 0.6 right."""
    shares = np.array([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6], [0.6, 0.4]])
    judged = Predictions(shares, np.array([0, 1, 1, 0]), np.arange(4))
    found = compute_metrics(judged)
    assert found["accuracy"] == 0.75
    # Class 0: said thrice, two of them so; class 1: said once, and so, of two. F1 4/5 and 2/3.
    assert found["f1"] == pytest.approx((4 / 5 + 2 / 3) / 2)
    # Class 1 scores: truth 0.2 and 0.6, others 0.1 and 0.4: three of four pairs in order.
    assert auroc(judged) == 0.75
    # Bins of a tenth: 0.9 right (gap 0.1), 0.8 wrong (gap 0.8), two of 0.6 right (gap 0.4).
    assert [part["rows"] for part in reliability(judged)] == [2, 1, 1]
    assert calibration_error(judged) == pytest.approx((2 * 0.4 + 0.8 + 0.1) / 4)


def test_intervals_are_the_published_ones():
    """Newcombe 1998: 56 of 70 against 48 of 80 (method 10), and Wilson's for 81 of 263."""
    low, high = wilson(81 / 263, 263)
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)
    low, high = newcombe((56 / 70, 70), (48 / 80, 80))
    assert (round(low, 4), round(high, 4)) == (0.0524, 0.3339)
    assert wilson(0.0, 0) == (0.0, 1.0) and wilson(1.0, 20)[1] == 1.0


def test_bootstrap_draws_people_and_covers_the_figure():
    judged = predictions()
    found = bootstrap(judged, 100)
    for name, value in compute_metrics(judged).items():
        if name in found:
            low, high = found[name]
            assert low < value + 0.03 and high > value - 0.03 and 0 < high - low < 0.2
    # Twenty copies of every person's row tell no more than one.
    copies = Predictions(*(np.repeat(part, 20, axis=0) for part in vars(judged).values()))
    wide, narrow = (found["accuracy"][1] - found["accuracy"][0], *np.diff(bootstrap(copies, 100)["accuracy"]))
    assert narrow > 0.7 * wide


def test_a_small_group_is_hidden_and_cannot_be_taken_from_the_others():
    judged = predictions()
    sex = np.array(["F"] * 200 + ["M"] * 190 + ["X"] * 10, dtype=object)  # five people of the last
    found = evaluate_groups(judged, {"sex": sex}, list("abcd"), floor=10)
    assert set(found["groups"]["class"]) == set("abcd")
    assert "X" not in found["groups"]["sex"] and found["hidden"]["sex"] >= 2
    assert set(evaluate_groups(judged, {"sex": sex}, list("abcd"), 5)["groups"]["sex"]) == {"F", "M", "X"}


def test_sites_together_and_the_worst_group():
    parts = {name: predictions(seed=seed) for seed, name in enumerate(("north", "south"))}
    by_site = {
        name: evaluate_groups(judged, {"sex": ["F", "M"] * 200}, list("abcd"), 10)
        for name, judged in parts.items()
    }
    sent = {name: unflat(flat("global", found))["global"] for name, found in by_site.items()}
    for name in parts:  # what travels is what was found
        assert sent[name]["groups"] == by_site[name]["groups"] and sent[name]["all"] == by_site[name]["all"]
    found = together(sent)
    both = Predictions(
        *(np.concatenate([getattr(j, key) for j in parts.values()]) for key in vars(parts["north"]))
    )
    assert found["all"]["accuracy"] == pytest.approx(compute_metrics(both)["accuracy"])
    assert found["all"]["rows"] == 800 and set(found["groups"]["site"]) == {"north", "south"}
    # Calibration of the pooled rows, from the sites' bins.
    pooled = {part["from"]: part for part in reliability(both)}
    for part in found["reliability"]:
        assert part["right"] == pytest.approx(pooled[part["from"]]["right"])
    gap = gaps(found)["class"]
    assert gap["gap"] == gap["best_accuracy"] - gap["worst_accuracy"] >= 0
    assert gap["low"] <= gap["gap"] <= gap["high"]


def test_one_class_alone_has_recall_and_nothing_else():
    judged = predictions()
    found = evaluate_groups(judged, {}, list("abcd"), floor=1, times=20)
    for own in found["groups"]["class"].values():
        assert set(own) == {"rows", "people", "accuracy", "intervals"} and set(own["intervals"]) == {
            "accuracy"
        }
    assert {"f1", "auroc", "ece"} <= found["all"].keys()
    assert "class" in gaps(found)  # the best and the worst class are worth naming


def test_a_site_with_one_class_is_neither_the_best_nor_given_figures():
    """Its model always names that class: 1.000, which is no merit."""
    easy = Predictions(np.tile([0.9, 0.1], (40, 1)), np.zeros(40, int), np.arange(40))
    good = Predictions(
        np.tile([[0.9, 0.1], [0.2, 0.8], [0.4, 0.6]], (20, 1)), np.tile([0, 1, 0], 20), np.arange(60)
    )
    poor = Predictions(good.probabilities[:, ::-1], good.labels, good.people)
    parts = {"north": easy, "south": good, "west": poor}
    found = together({name: evaluate_groups(one, {}, ["a", "b"], 1) for name, one in parts.items()})
    assert found["groups"]["site"]["north"]["accuracy"] == 1.0
    gap = gaps(found)["site"]
    assert (gap["best"], gap["worst"]) == ("south", "west")
    assert found["all"]["f1"] == pytest.approx(np.mean([compute_metrics(one)["f1"] for one in (good, poor)]))
    told = {"floor": 1, "models": {"global": {**found, "gaps": gaps(found)}}}
    lines = {line[0]: line for line in group_rows(told, "site")}
    assert lines["north"][3:] == ["1.000", "0.912 to 1.000", "one class only", "", ""]
    assert lines["south"][5] != "one class only"
    section = fairness_section(told)
    by_class = next(one for one in section["groups"] if one[0].startswith("By class"))
    assert by_class[1] == ["class", "model", "rows", "recall", "95 % interval"]
    assert all(len(line) == 5 for line in by_class[2])


@pytest.mark.slow
def test_the_report_of_a_run_with_subgroups(tmp_path, capsys):
    """Texts in which one group's labels are noise: the report, the file and the verb name it."""
    rng = np.random.default_rng(0)
    words = {"flu": "fever cough", "fracture": "bone cast"}
    labels = rng.choice(list(words), 600)
    sex = rng.choice(["F", "M"], 600)
    told = np.where(sex == "M", rng.choice(list(words), 600), labels)  # of men the texts say nothing
    frame = pandas.DataFrame({"text": [words[word] for word in told], "label": labels, "sex": sex})
    frame.to_csv(tmp_path / "notes.csv", index=False)
    run = tmp_path / "run"
    tiny = ["hidden_size=16", "intermediate_size=32", "num_hidden_layers=1", "num_attention_heads=2"]
    line = [
        "dataset=text", f"dataset.path={tmp_path}/notes.csv", "dataset.max_tokens=16", f"output_dir={run}",
        "num_clients=2", "num_rounds=3", "partition=iid", "strategy=fedavg", "personal=true",
        "dataset.subgroups=[sex]", "client.lr=0.01", *(f"model.config.{word}" for word in tiny),
    ]  # fmt: skip
    assert command(line) == 0
    found = json.loads((run / "fairness.json").read_text())
    own = found["models"]["global"]
    assert own["groups"]["sex"]["F"]["accuracy"] > 0.95 and own["groups"]["sex"]["M"]["accuracy"] < 0.75
    assert own["gaps"]["sex"]["worst"] == "M" and own["gaps"]["sex"]["low"] > 0.1
    assert set(own["groups"]["site"]) == {"0", "1"} and set(own["groups"]["class"]) == {"flu", "fracture"}
    assert {"global", "personal", "after"} <= set(found["models"])
    summary = json.loads((run / "summary.json").read_text())
    assert own["all"]["accuracy"] == pytest.approx(summary["final_test_accuracy"])
    page = (run / "report.html").read_text()
    assert "Who is served badly" in page and "M (0." in page and "Reliability" in page
    capsys.readouterr()
    assert command(["fairness", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "global model, by sex: M is" in shown
    assert command(["fairness", str(run), "--by", "postcode"]) == 2
    assert "no such column" in capsys.readouterr().err
    assert command([*line, "dataset.subgroups=[age]", "overwrite=true"]) == 2
