"""Temperature, prediction sets and intervals equal a central computation, and cover what they state."""

import json
import math
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from fedfrozen_app.__main__ import run as command
from fedfrozen_app.calibration.calibrate import check_task, rule_of
from fedfrozen_app.calibration.calibration_rows import Part, choose_source
from fedfrozen_app.calibration.quantile import conformal_quantile, counter, rank_of, smallest
from fedfrozen_app.calibration.sets import Rule, groups, not_exchangeable, reliability
from fedfrozen_app.calibration.temperature import fit_temperature, part_of
from fedfrozen_app.config import compose_run
from fedfrozen_app.core.errors import UserError
from fedfrozen_app.data.federated import dataset_of, spec_of
from fedfrozen_app.data.sources.images import open_image
from fedfrozen_app.data.sources.load import prepare
from fedfrozen_app.launch import load_run
from tests.app.test_pages_run import ROOT, python_blocks
from tests.conftest import SMALL, Run, slowly, worker_of

LEVELS = (0.5, 0.8, 0.9, 0.95)


def split(values, parts, seed=0):
    """Over parts of unlike sizes, one of them empty."""
    edges = np.sort(np.random.default_rng(seed).integers(0, len(values), parts - 2))
    return [*np.split(values, edges), values[:0]]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("parts", [2, 7, 40])
def test_the_federated_quantile_is_that_of_all_numbers_together(level, parts):
    generator = np.random.default_rng(parts)
    for numbers in (
        generator.random(503),
        np.abs(generator.normal(scale=1e6, size=200)),
        np.round(generator.random(300), 1),  # ties
        np.concatenate([np.zeros(50), 10.0 ** generator.uniform(-300, 300, 60)]),
    ):
        counters = [counter(own) for own in split(numbers, parts)]
        found = conformal_quantile(level, counters, len(numbers))
        rank = math.ceil((len(numbers) + 1) * level - 1e-9)
        assert found == np.sort(numbers)[rank - 1]  # to the bit


def test_a_rank_beyond_the_last_number_has_no_bound():
    assert smallest(4, [counter(np.array([1.0, 2.0, 3.0]))]) == math.inf
    assert rank_of(0.9, 9) == 9 and rank_of(0.9, 8) == 9 and rank_of(0.9, 99) == 90
    for bad in ([-1.0], [math.nan], [math.inf]):
        with pytest.raises(ValueError, match="finite"):
            counter(np.array(bad))


def test_a_part_tells_counts_alone():
    counts = counter(np.array([0.25, 0.25, 0.5]))(0, 0)
    assert counts.shape == (256,) and counts.sum() == 3
    assert counter(np.array([0.25]))(0x40, 1).sum() == 0  # begins with other bytes


@pytest.mark.parametrize("scale", [0.3, 1.0, 6.0])
def test_the_federated_temperature_is_the_central_one(scale):
    generator = np.random.default_rng(1)
    logits = generator.normal(size=(400, 5))
    labels = np.array([generator.choice(5, p=np.exp(row) / np.exp(row).sum()) for row in logits])
    logits = logits * scale
    parts = zip(split(logits, 9), split(labels, 9), strict=True)
    found = fit_temperature([part_of(own, true) for own, true in parts])
    central = fit_temperature([part_of(logits, labels)])
    assert abs(found - central) <= 1e-12 * central
    # By another road: scipy's own search, and the labels were drawn at temperature `scale`.
    loss = lambda b: -log_softmax(b * logits, axis=1)[np.arange(400), labels].sum()  # noqa: E731
    assert 1 / found == pytest.approx(minimize_scalar(loss, (0.01, 10)).x, rel=1e-6)
    assert found == pytest.approx(scale, rel=0.2)


def test_rows_that_are_all_right_have_a_temperature_above_zero():
    """Their likelihood has no maximum: it grows until no float tells the difference."""
    assert 0.05 <= fit_temperature([part_of(np.eye(3) * 5, np.arange(3))]) < 0.2
    assert fit_temperature([part_of(np.eye(3) * 0.1, np.arange(3))]) == pytest.approx(0.05, rel=1e-6)


@pytest.fixture(scope="module")
def digits():
    """Logits of a plain model on the real digits that it was not trained on."""
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    pixels, labels = pixels[order] / 16, labels[order]
    model = LogisticRegression(max_iter=30, C=0.02).fit(pixels[:300], labels[:300])
    return model.decision_function(pixels[300:]), labels[300:].astype(np.int64)


def drawn(logits, labels, seed):
    """A drawn split: parts that calibrate, and rows that are predicted."""
    order = np.random.default_rng(seed).permutation(len(labels))
    known, rest = order[:700], order[700:]
    generator = np.random.default_rng((seed, 1))
    parts = [
        Part(str(n), logits[own], labels[own], generator.random(len(own)) < 1 / 3)
        for n, own in enumerate(split(known, 8, seed))
    ]
    return [part for part in parts if len(part.labels)], rest


def test_the_coverage_is_the_stated_one_over_twenty_drawn_splits(digits):
    logits, labels = digits
    shares, sizes = [], []
    for seed in range(20):
        parts, rest = drawn(logits, labels, seed)
        rule = rule_of(parts, 0.9, classes=True)
        shares.append(np.mean(rule.scores(logits[rest], labels[rest]) <= rule.threshold))
        sizes.append(rule.sizes(logits[rest]).mean())
    assert abs(np.mean(shares) - 0.9) < 0.01, shares
    assert 0.9 < np.mean(sizes) < 3


def test_intervals_cover_too():
    generator = np.random.default_rng(5)
    predictions = generator.normal(size=1500)
    labels = predictions + generator.standard_t(3, size=1500)
    shares = []
    for seed in range(20):
        parts, rest = drawn(predictions, labels, seed)
        rule = rule_of(parts, 0.9, classes=False)
        together = np.abs(np.concatenate([part.labels - part.logits for part in parts]))
        assert rule.threshold == np.sort(together)[rank_of(0.9, len(together)) - 1]
        shares.append(np.mean(rule.scores(predictions[rest], labels[rest]) <= rule.threshold))
        assert rule.sizes(predictions)[0] == 2 * rule.threshold
    assert abs(np.mean(shares) - 0.9) < 0.01


def test_a_federation_has_the_rule_of_its_rows_together(digits):
    logits, labels = digits
    parts, _ = drawn(logits, labels, 3)
    whole = Part(
        "all", *(np.concatenate([getattr(p, name) for p in parts]) for name in ("logits", "labels", "first"))
    )
    one, other = rule_of(parts, 0.9, classes=True), rule_of([whole], 0.9, classes=True)
    assert abs(one.temperature - other.temperature) <= 1e-12
    assert abs(one.threshold - other.threshold) <= 1e-12


def test_too_few_rows_are_refused():
    part = Part("0", np.zeros(8), np.ones(8), np.zeros(8, dtype=bool))
    with pytest.raises(UserError, match=r"8 rows are too few for a coverage of 0\.9, which needs 9"):
        rule_of([part], 0.9, classes=False)


def test_groups_and_the_sentence_where_exchangeability_fails():
    rule = Rule(0.9, 1.0)
    logits, labels = np.zeros(200), np.r_[np.zeros(150), np.full(50, 2.0)]
    column = np.array(["a"] * 150 + ["b"] * 45 + ["c"] * 5, dtype=object)
    found = groups(rule, logits, labels, {"site": column}, floor=10)
    assert found["all"]["all"]["coverage"] == 0.75 and found["site"]["b"]["coverage"] == 0
    assert "c" not in found["site"]  # fewer than the floor
    (sentence,) = not_exchangeable(found, 0.9)
    assert sentence.startswith("site b: 0% of 45 rows are covered, and 90% were stated.")


def test_reliability_by_hand():
    logits = np.log(np.array([[0.8, 0.2], [0.8, 0.2], [0.3, 0.7]]))
    found = reliability(logits, np.array([0, 1, 1]), 1.0)
    assert found["loss"] == pytest.approx(-np.log([0.8, 0.2, 0.7]).mean())
    assert found["ece"] == pytest.approx((abs(1.6 - 1) + abs(0.7 - 1)) / 3)


# Runs ------------------------------------------------------------------------------------------------------

WORDS = [
    "dataset.limit=400",
    "num_rounds=3",
    "baseline=false",
    "dataset.client_validation=0.3",
    "partition=iid",
]


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibration") / "run"
    assert command([*SMALL, *WORDS, f"output_dir={folder}"]) == 0
    assert command(["calibrate", str(folder), "--coverage", "0.8"]) == 0
    return Run(folder)


def test_a_run_is_calibrated_on_rows_that_training_did_not_see(calibrated):
    found = json.loads((calibrated.folder / "calibration.json").read_text())
    worker = load_run(calibrated.folder, [])
    held = sum(len(worker.rows(str(n)).validation) for n in range(3))
    assert found["rows"]["source"] == "clients" and found["rows"]["parts"] == 3
    assert found["rows"]["temperature"] + found["rows"]["quantile"] == held
    by = found["test"]
    assert set(by["client"]) == {"0", "1", "2"} and len(by["class"]) == 10
    assert sum(one["rows"] for one in by["class"].values()) == by["all"]["all"]["rows"]
    # The same from the run's own probabilities.
    shares = worker.task.probabilities(worker.data.test_table).double().numpy()
    logits = np.log(shares) / found["temperature"]
    again = np.exp(log_softmax(logits, axis=1))
    truth = worker.data.test_table.labels.numpy()
    covered = np.mean(1 - again[np.arange(len(truth)), truth] <= found["threshold"])
    assert covered == pytest.approx(by["all"]["all"]["coverage"], abs=1e-9)
    assert found["after"]["loss"] < found["before"]["loss"]


def test_report_fairness_and_card_have_it(calibrated, capsys):
    page = (calibrated.folder / "report.html").read_text()
    assert "How sure it is" in page and "By client (3)" in page
    assert command(["fairness", str(calibrated.folder)]) == 0
    assert "Coverage 80%: a class is in the set where" in capsys.readouterr().out
    assert command(["verify", str(calibrated.folder)]) == 0


@pytest.mark.parametrize("alone", [False, *slowly(True)])
def test_the_exported_example_gives_the_same_sets(alone, calibrated, tmp_path, monkeypatch, capsys):
    """The card's own lines; `alone`: in an interpreter that cannot import this package."""
    out = tmp_path / "model"
    assert command(["export", str(calibrated.folder), str(out)]) == 0
    card = (out / "README.md").read_text()
    code = next(
        block for block in re.findall(r"```python\n(.*?)```", card, re.S) if "calibration.json" in block
    )
    assert len(code.strip().splitlines()) <= 20
    worker = load_run(calibrated.folder, [])
    found = json.loads((out / "calibration.json").read_text())
    row = prepare(spec_of(dataset_of(worker.config), None)).test.content[0]
    open_image(row, "a row").save(out / "picture.png")
    pixels = worker.data.test_table.inputs["pixel_values"][:1]
    with torch.no_grad():
        logits = worker.model(**worker.task.prepare({"pixel_values": pixels})).logits[0]
    shares = (logits / found["temperature"]).softmax(-1)
    expected = [
        (worker.corpus.classes[n], float(shares[n]))
        for n in shares.argsort(descending=True).tolist()
        if 1 - float(shares[n]) <= found["threshold"]
    ]
    capsys.readouterr()
    monkeypatch.chdir(out)
    if alone:
        stop = "import sys\nsys.modules['fedfrozen_app'] = None\n"
        words = [sys.executable, "-c", stop + code]
        text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    else:
        exec(code, {})
        text = capsys.readouterr().out
    shown = [line.split() for line in text.splitlines()]
    (page,) = python_blocks(ROOT / "docs/calibration.md")
    exec(page.replace('"my-model"', '"."'), {})
    assert set(eval(capsys.readouterr().out)) == {name for name, _ in expected}
    assert [name for name, _ in shown] == [name for name, _ in expected]
    assert [float(score) for _, score in shown] == pytest.approx([score for _, score in expected], abs=1e-5)


def test_a_model_that_went_on_is_not_called_calibrated(calibrated, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(calibrated.folder, copy)
    assert command(["resume", str(copy), "num_rounds=4"]) == 0
    assert not (copy / "calibration.json").exists()
    assert "How sure it is" not in (copy / "report.html").read_text()


def test_the_server_s_rows_serve_where_clients_are_not_asked(calibrated, tmp_path, capsys):
    masked = compose_run([*SMALL, "secure_aggregation=on", "dataset.client_validation=0.1"]).config
    assert choose_source(masked, None) == "clients"
    private = compose_run([*SMALL, "privacy=dp_sgd", "privacy.epsilon=8"]).config
    assert choose_source(private, None) == "server"
    with pytest.raises(UserError, match="hold no rows out"):
        choose_source(private, "clients")
    assert choose_source(compose_run(SMALL).config, None) == "clients"
    words = ["calibrate", str(calibrated.folder), "--coverage", "0.99"]
    assert command([*words, "--rows", "server"]) == 2
    assert "rows are too few for a coverage of 0.99" in capsys.readouterr().err
    assert command([*words[:-1], "7"]) == 2
    assert "--coverage 7 is out of range" in capsys.readouterr().err


def test_a_regression_gets_intervals(tmp_path, capsys):
    generator = np.random.default_rng(0)
    x = generator.normal(size=400)
    y = 3 * x + generator.normal(size=400)
    data, run = tmp_path / "table.csv", tmp_path / "run"
    data.write_text("x,y\n" + "".join(f"{a},{b}\n" for a, b in zip(x, y, strict=True)))
    words = ["dataset=table", f"dataset.path={data}", "dataset.task=regression", "dataset.label_column=y"]
    words += [
        "model=linear",
        "strategy=fedavg",
        "num_clients=3",
        "num_rounds=2",
        "partition=iid",
        "baseline=false",
    ]
    assert command([*words, "dataset.client_validation=0.3", f"output_dir={run}"]) == 0
    capsys.readouterr()
    assert command(["calibrate", str(run)]) == 0
    shown = capsys.readouterr().out
    found = json.loads((run / "calibration.json").read_text())
    assert found["kind"] == "number" and found["temperature"] is None and found["threshold"] > 0
    assert "the interval is the prediction plus and minus" in shown
    assert found["test"]["all"]["all"]["size"] == pytest.approx(2 * found["threshold"])


def test_other_kinds_of_model_are_refused(tmp_path):
    """Entities: a row has a class for each word."""
    (tmp_path / "train.conll").write_text("Severe B-problem\nmigraine I-problem\n. O\n\n" * 40)
    worker = worker_of("dataset=conll", f"dataset.path={tmp_path}", "num_clients=2", "partition=iid")
    with pytest.raises(
        UserError, match="A tokens model cannot be calibrated: only one class, number or time"
    ):
        check_task(worker)
